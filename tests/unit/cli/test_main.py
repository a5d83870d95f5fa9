"""The command: help at once, mistakes in three beats without a traceback, exit code 2."""

import gc
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import shoal
import shoal.errors
from shoal.cli import main as command
from shoal.cli.commands import COMMANDS
from shoal.cli.main import main
from shoal.errors import ExitCode, from_json


def failed(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> str:
    assert main(arguments) == ExitCode.USER
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    assert [line[:18].strip() for line in err.splitlines()[1:] if line[:3] != "   "] == [
        "you gave:",
        "conflicts with:",
        "write instead:",
    ]
    return err


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"]])
def test_help(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert not stop.value.code
    out = capsys.readouterr().out
    assert "run" in out
    if len(arguments) == 2:
        options = ["--plan", "--devices", "--exact", "--precision", "--set", "--steps", "--resume", "--out"]
        for option in [*options, "--checkpoint-every", "--max-microbatch", "--workers", "--no-telemetry", "exit codes"]:
            assert option in out


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_in_groups_and_fits_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([name, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(f"usage: shoal {name} ")
    assert lines[1] == ""
    titles = [line.rstrip(":") for line in lines if line.endswith(":") and not line.startswith(" ")]
    own = [part.partition(": ")[0] for part in COMMANDS[name].groups.split(" | ")]
    assert titles == [*own, "more", "examples", "exit codes"]
    for example in COMMANDS[name].examples:
        assert command._parse(shlex.split(example)[1:]).command == name


def test_help_lists_all_commands_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line.endswith(":")] == [
        *("train:", "decide:", "check:", "look:", "models:", "begin with:"),
    ]
    names = [line.split()[0] for line in lines if line.startswith("  ") and not line.startswith("  shoal")]
    assert sorted(names) == sorted(COMMANDS)


def test_the_order_of_a_list_may_begin_with_a_minus() -> None:
    assert command._parse(["runs", "--sort", "-loss", "--json"]).sort == "-loss"
    assert command._parse(["runs", "runs", "--sort", "loss"]).sort == "loss"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"shoal {shoal.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "required: COMMAND"),
        (["rum"], "invalid choice: 'rum'"),
        (["run"], "required: JOBFILE"),
        (["run", "a.py", "--set"], "argument --set: expected one argument"),
        (["run", "a.py", "--dev", "2"], "--dev"),
        (["run", "nowhere.py"], "there is no such file"),
    ],
)
def test_mistakes_are_three_beats(capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    assert text in failed(capsys, arguments)


def test_an_unknown_option_is_told_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean '--devices'?" in failed(capsys, ["run", "a.py", "--devises", "2"])


def test_what_was_given_is_repeated(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["shoal", "run", "a.py", "--set"])
    assert "you gave:       shoal run a.py --set\n" in failed(capsys, ["run", "a.py", "--set"])


@pytest.mark.parametrize(
    ("option", "value"),
    [("--devices", "0"), ("--devices", "two"), ("--steps", "-3"), ("--workers", "-1"), ("--checkpoint-every", "1.5")],
)
def test_numbers_are_checked(capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str, value: str) -> None:
    (tmp_path / "a_job.py").write_text("")
    error = failed(capsys, ["run", str(tmp_path / "a_job.py"), f"{option}={value}"])
    assert f"{option} {value}" in error
    assert "whole number of at least" in error


def test_an_error_of_a_worker_is_built_again() -> None:
    document = {"kind": "DataError", "given": "a", "conflict": "b", "remedy": "c", "rank": 1, "host": "h"}
    error = from_json(json.loads(json.dumps(document)))
    assert type(error) is shoal.errors.DataError
    assert error.render().startswith("error on rank 1 (h): DataError: b\n  you gave:       a\n")
    assert type(from_json({**document, "kind": "Nowhere"})) is shoal.errors.InternalError


def test_the_public_names_are_there_one_by_one() -> None:
    assert set(shoal.__all__) == set(shoal._HOMES)
    for name in shoal.__all__:
        assert getattr(shoal, name) is not None
    assert set(dir(shoal)) == set(shoal.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nowhere'"):
        shoal.nowhere  # noqa: B018


@pytest.mark.parametrize(("word", "collects"), [("plan", False), ("report", True)])
def test_a_process_that_plans_collects_no_garbage(word: str, collects: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(f"shoal.cli.{word}.{word}", lambda options: seen.append(gc.isenabled()) or 0)
    monkeypatch.setattr(command, "end_without_threads", lambda code: None)  # it is for a process that ends
    monkeypatch.setattr(sys, "argv", ["shoal", word, "it"])
    try:
        main()
    finally:
        gc.unfreeze()
        gc.enable()
    assert seen == [collects]
