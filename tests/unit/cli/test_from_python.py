"""Calls from Python have the commands' options, defaults and errors."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.cli.main import main
from shoal.cli.options import PlanOptions, RunOptions, option_names, options_from
from shoal.errors import CommandError, JobError, JobFileError, LaunchError, RunDirectoryError, SettingError, ShoalError

# Options of the command that are no keywords: what is so in Python instead.
INSTEAD: dict[str, dict[str, Any]] = {
    "run": {"set": "settings"},
    "plan": {
        "set": "settings",
        "output": shoal.Answer.write,
        "html": shoal.Answer.write_html,
        "learn": "the command's alone: it reads runs, and answers nothing",
    },
}
KINDS: dict[str, Any] = {"run": RunOptions, "plan": PlanOptions}


def keywords(call: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(call).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is not p.VAR_KEYWORD}


@pytest.mark.parametrize("name", KINDS)
def test_a_call_has_the_options_of_its_command(name: str) -> None:
    call, kind = getattr(shoal, name), KINDS[name]
    found, options = keywords(call), set(option_names(kind))
    others = {"settings"} | {text for text in INSTEAD[name].values() if isinstance(text, str)}
    assert options - set(found) == set(INSTEAD[name])
    assert set(found) - options <= others
    defaults = {option: inspect.signature(kind).parameters[option].default for option in options - {"job"}}
    assert {option: found[option] for option in defaults if option in found} == {
        option: default for option, default in defaults.items() if option in found
    }


@pytest.mark.parametrize("name", KINDS)
def test_the_docstring_has_a_row_of_each(name: str) -> None:
    text = inspect.getdoc(getattr(shoal, name)) or ""
    rows = [row.split("|")[1] for row in text.splitlines() if row.startswith("|")]
    told = {word for row in rows for word in re.findall(r"`(\w+)`", row)}
    assert told == set(keywords(getattr(shoal, name)))


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("net_job.py").write_text("def job(lr: float = 0.1): ...\n")
    Path("plan.toml").write_text("[layout]\ndata = 2\n")
    return "net_job.py"


SAME: dict[str, tuple[list[str], dict[str, Any]]] = {
    "a number": (["--devices", "0"], {"devices": 0}),
    "a text": (["--steps", "two"], {"steps": "two"}),
    "precision": (["--precision", "fp8"], {"precision": "fp8"}),
    "accepted without resume": (["--accept-changes"], {"accept_changes": True}),
    "resume of nothing": (["--resume", "--out", "gone"], {"resume": True, "out": Path("gone")}),
    "a plan and devices": (["--plan", "plan.toml", "--devices", "3"], {"plan": "plan.toml", "devices": 3}),
    "a plan that is not there": (["--plan", "none.toml"], {"plan": Path("none.toml")}),
    "initial weights twice": (["--init-from", "x", "--resume"], {"init_from": "x", "resume": True}),
    "a kind of difference": (["--init-from", "x", "--init-allow", "odd"], {"init_from": "x", "init_allow": "odd"}),
    "renaming": (["--init-rename", "a=b"], {"init_rename": {"a": "b"}}),
    "a file that is not there": (["--require-certificate", "c.json"], {"require_certificate": "c.json"}),
}


@pytest.mark.parametrize("name", SAME)
def test_a_contradiction_is_refused_in_the_commands_words(
    name: str, job: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, given = SAME[name]
    code = main(["run", job, *arguments])
    with pytest.raises(ShoalError) as caught:
        shoal.run(job, **given)
    assert (caught.value.render().strip(), caught.value.exit_code) == (capsys.readouterr().err.strip(), code)


def returned(lr: float = 0.1) -> None:
    """No Job."""


REFUSED: dict[str, tuple[Callable[[], Any], type[ShoalError], str]] = {
    "no job": (lambda: shoal.run(3), JobError, "shoal.run(3, ...); that is a int, and no job; give a job function"),
    "no job to plan": (lambda: shoal.plan(None), JobError, "shoal.plan(None, ...)"),
    "another tool's word": (lambda: shoal.run(returned, gpus=2), CommandError, "for gpus write devices="),
    "a slip": (lambda: shoal.run(returned, devicse=2), CommandError, "did you mean 'devices'?"),
    "of the job file": (lambda: shoal.run("net_job.py", rl=2), CommandError, "no parameter of net_job.py"),
    "of another call": (lambda: shoal.plan(returned, gpus=2), CommandError, "for gpus write max_devices="),
    "settings": (lambda: shoal.plan(returned, settings={"lr": "high"}), SettingError, "--set lr=high; lr is of type"),
    "an object": (lambda: shoal.plan(returned, lr=object()), SettingError, "a setting is a number, a text"),
    "no Job": (lambda: shoal.plan(returned), JobFileError, "returned NoneType; a job function returns a shoal.Job"),
    "a plan": (lambda: shoal.run(returned, plan=3), CommandError, "plan=3; that is a int, and no plan"),
    "no run": (lambda: shoal.Run("nowhere"), RunDirectoryError, "no run began there"),
    "an aim": (lambda: shoal.plan("net_job.py", aim="quickest"), ShoalError, "fastest"),
    "a price": (lambda: shoal.plan("net_job.py", price=0), CommandError, "--price 0; --price takes a number of US"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, job: str) -> None:
    call, kind, words = REFUSED[name]
    with pytest.raises(kind, match=re.escape(words)):
        call()


@pytest.mark.parametrize("inside", [{"SHOAL_INSIDE_RUN": "1"}, {"RANK": "1", "WORLD_SIZE": "2"}])
def test_a_rank_starts_no_ranks(inside: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", **inside}.items():
        monkeypatch.setenv(name, text)
    if "RANK" not in inside:
        monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(LaunchError, match=r"shoal\.run"):
        shoal.run(returned)


def test_numbers_are_whole() -> None:
    for wrong in (True, 2.0, None.__class__):
        with pytest.raises(CommandError, match="takes a whole number"):
            options_from(RunOptions, {"job": "x", "devices": wrong})
    assert options_from(RunOptions, {"job": "x", "devices": 2}).devices == 2
    assert "SHOAL_INSIDE_RUN" not in os.environ
