"""The command: help at once, mistakes in three beats without a traceback, exit code 2."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import shoal
import shoal.errors
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


def modules_after(arguments: list[str]) -> set[str]:
    code = (
        "import sys\nfrom shoal.cli.main import main\n"
        f"try: code = main({arguments!r})\nexcept SystemExit as stop: code = stop.code or 0\n"
        "print('\\n', code, *(m for m in ('torch', 'numpy', 'pydantic', 'rich') if m in sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    code_text, *loaded = run.stdout.splitlines()[-1].split()
    assert code_text in ("0", "2")
    return set(loaded)


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    assert modules_after(arguments) == set()


def test_a_mistake_is_told_before_torch_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "a_job.py").write_text("")
    assert not {"torch", "numpy"} & modules_after(["run", str(tmp_path / "a_job.py"), "--precision", "fp8"])
    assert not {"torch", "numpy"} & modules_after(["run", str(tmp_path / "nowhere.py")])


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
    assert error.render().startswith("error on rank 1 (h): DataError\n  you gave:       a\n")
    assert type(from_json({**document, "kind": "Nowhere"})) is shoal.errors.InternalError


def test_a_setting_without_effect_is_told_in_one_line(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text('[layout]\ndata = 2\n[server]\nmode = "asynchronous"\nstaleness = 3\n', encoding="utf-8")
    job = tmp_path / "job.py"
    job.write_text("def job():\n    raise SystemExit(3)\n", encoding="utf-8")
    command = [sys.executable, "-m", "shoal", "run", str(job), "--plan", str(plan), "--out", str(tmp_path / "out")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "warning: server.staleness = 3: no effect" in found.stderr
    assert "SettingWarning" not in found.stderr


def test_a_closed_pipe_is_no_traceback() -> None:
    code = (
        "import sys, shoal.cli.main, shoal.cli.run.prepare\ndef broken(*a): raise BrokenPipeError\n"
        "shoal.cli.run.prepare.run = broken\nsys.exit(shoal.cli.main.main(['run', 'a.py']))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (1, "")


def test_the_public_names_are_there_one_by_one() -> None:
    assert sorted(shoal.__all__) == shoal.__all__
    assert set(shoal.__all__) == set(shoal._HOMES)
    for name in shoal.__all__:
        assert getattr(shoal, name) is not None
    assert set(dir(shoal)) == set(shoal.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nowhere'"):
        shoal.nowhere  # noqa: B018
