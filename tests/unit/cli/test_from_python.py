"""Calls from Python have the commands' options, defaults and errors."""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import shoal
from shoal.cli.main import _parser, main
from shoal.cli.options import EvaluateOptions, ExportOptions, PlanOptions, PredictOptions, RunOptions
from shoal.errors import CommandError, JobError, JobFileError, LaunchError, RunDirectoryError, SettingError, ShoalError
from shoal.plans.plan import read_plan
from shoal.runs.options import option_names, options_from, options_of

_SCRIPT = ("script", "launcher", "cpu")
# Options of the command that are no keywords: what is so in Python instead.
INSTEAD: dict[str, dict[str, Any]] = {
    "run": {
        "set": "settings",
        "dry_run": "the command's alone: it prints",
        "verify": "the command's alone: shoal.verify is called before",
    },
    "plan": {
        "set": "settings",
        "output": shoal.Answer.write,
        "html": shoal.Answer.write_html,
        "more": shoal.Answer.write_html,
        "emit": "the command's alone: it prints",
        **dict.fromkeys(_SCRIPT, "the command's alone: a script is a command"),
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


@pytest.mark.parametrize("name", [*KINDS, "export", "evaluate", "predict"])
def test_the_docstring_has_a_row_of_each(name: str) -> None:
    text = inspect.getdoc(getattr(shoal, name)) or ""
    rows = [row.split("|")[1] for row in text.splitlines() if row.startswith("|")]
    told = {word for row in rows for word in re.findall(r"`(\w+)`", row)}
    assert told == set(keywords(getattr(shoal, name)))


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("net_job.py").write_text("def job(lr: float = 0.1, x=()): ...\n")
    Path("plan.toml").write_text("[layout]\ndata = 2\n")
    return "net_job.py"


SAME: dict[str, tuple[list[str], dict[str, Any]]] = {
    "a number": (["--devices", "0"], {"devices": 0}),
    "a text": (["--steps", "two"], {"steps": "two"}),
    "precision": (["--precision", "fp6"], {"precision": "fp6"}),
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


def named(name: str = "a") -> None:
    """No Job either."""


REFUSED: dict[str, tuple[Callable[[], Any], type[ShoalError], str]] = {
    "no job": (lambda: shoal.run(3), JobError, "shoal.run(3, ...); a value of type int is no job; give a job function"),
    "no job to plan": (lambda: shoal.plan(None), JobError, "shoal.plan(None, ...)"),
    "another tool's word": (lambda: shoal.run(returned, gpus=2), CommandError, "for gpus write devices="),
    "a slip": (lambda: shoal.run(returned, devicse=2), CommandError, "did you mean 'devices'?"),
    "of the job file": (lambda: shoal.run("net_job.py", rl=2), CommandError, "no parameter of net_job.py"),
    "of another call": (lambda: shoal.plan(returned, gpus=2), CommandError, "for gpus write max_devices="),
    "settings": (lambda: shoal.plan(returned, settings={"lr": "high"}), SettingError, "--set lr=high; lr is of type"),
    "an object": (lambda: shoal.plan(returned, lr=object()), SettingError, "a setting is a number, a text"),
    "a setting twice": (
        lambda: shoal.run(returned, settings={"lr": 0.1}, lr=0.2),
        SettingError,
        "settings: lr=0.1, and lr=0.2; lr is set twice; write one of them",
    ),
    "a mapping as a file": (lambda: shoal.run(returned, config={"lr": 1}), CommandError, "write settings= for a"),
    "a number for a text": (
        lambda: shoal.plan(named, name=5),
        SettingError,
        'name=5; name is of type str, and 5 is not a text; write name="abc", say',
    ),
    "a truth for a number": (lambda: shoal.plan(returned, lr=True), SettingError, "lr=True; lr is of type float"),
    "keys that are numbers": (lambda: shoal.plan(named, name={1: 2}), SettingError, "and no other dict; make that in"),
    "no Job": (lambda: shoal.plan(returned), JobFileError, "returned NoneType; a job function returns a shoal.Job"),
    "a plan": (lambda: shoal.run(returned, plan=3), CommandError, "plan=3; a value of type int is no plan"),
    "no run": (lambda: shoal.Run("nowhere"), RunDirectoryError, "no run began there"),
    "an aim": (lambda: shoal.plan("net_job.py", aim="quickest"), ShoalError, "fastest"),
    "a price": (lambda: shoal.plan("net_job.py", price=0), CommandError, "--price 0; --price takes a number of US"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, job: str) -> None:
    call, kind, words = REFUSED[name]
    with pytest.raises(kind, match=re.escape(words)):
        call()


@pytest.mark.parametrize(
    ("inside", "on"), [({"SHOAL_INSIDE_RUN": "1"}, "local"), ({"RANK": "1", "WORLD_SIZE": "2"}, "slurm")]
)
def test_a_rank_starts_no_ranks(inside: dict[str, str], on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", **inside}.items():
        monkeypatch.setenv(name, text)
    if "RANK" not in inside:
        monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(LaunchError, match=r"shoal\.run"):
        shoal.run(returned, on=on)


def test_numbers_are_whole() -> None:
    for wrong in (True, 2.0, None.__class__):
        with pytest.raises(CommandError, match="takes a whole number"):
            options_from(RunOptions, {"job": "x", "devices": wrong})
    assert options_from(RunOptions, {"job": "x", "devices": 2}).devices == 2
    assert "SHOAL_INSIDE_RUN" not in os.environ


# Of each option the command's arguments, and the call's.
RUN: dict[str, tuple[list[str], dict[str, Any]]] = {
    "job": (["net_job.py:job"], {}),
    "plan": (["--plan", "plan.toml"], {"plan": Path("plan.toml")}),
    "devices": (["--devices", "3"], {"devices": 3}),
    "exact": (["--exact"], {"exact": True}),
    "precision": (["--precision", "bf16"], {"precision": "bf16"}),
    "set": (["--set", "x=1, 2", "--set", "lr=high"], {"lr": "high", "settings": {"x": "1, 2"}}),
    "config": (["--config", "a.toml", "--config", "b.toml"], {"config": [Path("a.toml"), "b.toml"]}),
    "out": (["--out", "there"], {"out": Path("there")}),
    "max_microbatch": (["--max-microbatch", "4"], {"max_microbatch": 4}),
    "share_gpu": (["--share-gpu"], {"share_gpu": True}),
    "workers": (["--workers", "2"], {"workers": 2}),
    "steps": (["--steps", "9"], {"steps": 9}),
    "resume": (["--resume"], {"resume": True}),
    "resume_if_exists": (["--resume-if-exists"], {"resume_if_exists": True}),
    "accept_changes": (["--accept-changes"], {"accept_changes": True}),
    "checkpoint_every": (["--checkpoint-every", "5"], {"checkpoint_every": 5}),
    "evaluate_every": (["--evaluate-every", "5"], {"evaluate_every": 5}),
    "keep_checkpoints": (["--keep-checkpoints", "all"], {"keep_checkpoints": "all"}),
    "require_certificate": (["--require-certificate", "c.json"], {"require_certificate": Path("c.json")}),
    "no_source": (["--no-source"], {"no_source": True}),
    "private": (["--private"], {"private": True}),
    "records": (["--records", "all"], {"records": "all"}),
    "no_telemetry": (["--no-telemetry"], {"no_telemetry": True}),
    "track": (["--track", "tensorboard", "--track", "mlflow:here"], {"track": ["tensorboard", "mlflow:here"]}),
    "trace": (["--trace", "10-12"], {"trace": "10-12"}),
    "bad_samples": (["--bad-samples", "3"], {"bad_samples": 3}),
    "check_replicas": (["--check-replicas", "9"], {"check_replicas": 9}),
    "max_restarts": (["--max-restarts", "0"], {"max_restarts": 0}),
    "init_from": (["--init-from", "w"], {"init_from": Path("w")}),
    "init_allow": (["--init-allow", "missing"], {"init_allow": "missing"}),
    "step": (["--step", "compiled"], {"step": "compiled"}),
    "shares": (["--shares", "by-speed"], {"shares": "by-speed"}),
    "init_rename": (["--init-rename", "a=b", "--init-rename", "c=d"], {"init_rename": {"a": "b", "c": "d"}}),
    "layout": (["--layout", "data=2"], {"layout": "data=2"}),
    "cluster": (["--cluster", "8xH100"], {"cluster": "8xH100"}),
    "on": (["--on", "slurm:--time=9"], {"on": "slurm:--time=9"}),
}
PLAN: dict[str, tuple[list[str], dict[str, Any]]] = {
    "job": (["net_job.py:job"], {}),
    "cluster": (["--cluster", "8xH100"], {"cluster": "8xH100"}),
    "aim": (["--aim", "cheapest"], {"aim": "cheapest"}),
    "max_devices": (["--max-devices", "3"], {"max_devices": 3}),
    "seq": (["--seq", "64"], {"seq": 64}),
    "batch": (["--batch", "8"], {"batch": 8}),
    "precision": (["--precision", "bf16"], {"precision": "bf16"}),
    "set": (["--set", "lr=high"], {"lr": "high"}),
    "config": (["--config", "a.toml"], {"config": "a.toml"}),
    "mtbf": (["--mtbf", "8"], {"mtbf": "8"}),
    "price": (["--price", "2.5"], {"price": "2.5"}),
    "tokens": (["--tokens", "1e9"], {"tokens": "1e9"}),
    "samples": (["--samples", "1e9"], {"samples": "1e9"}),
}
OPTIONS = {"run": RUN, "plan": PLAN}


class CaughtError(Exception):
    """Carries the options that a call makes."""


@pytest.mark.parametrize("name", KINDS)
def test_each_option_arrives_as_the_commands(name: str, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def caught(options: Any, *_: Any) -> None:
        raise CaughtError(options)

    monkeypatch.setattr("shoal.cli.from_python.with_plan", lambda options, environment: options)
    monkeypatch.setattr("shoal.cli.from_python.requested", caught)
    monkeypatch.setattr("shoal.cli.plan.answered", caught)
    assert set(option_names(KINDS[name])) - {
        "output",
        "emit",
        "html",
        "more",
        "learn",
        "dry_run",
        "verify",
        *_SCRIPT,
    } == set(OPTIONS[name])
    for option, (arguments, given) in OPTIONS[name].items():
        command = [name, *([] if option == "job" else [job]), *arguments]
        wanted = options_of(KINDS[name], _parser().parse_args(command))
        assert option == "job" or getattr(wanted, option) != getattr(plain(name, job), option)
        with pytest.raises(CaughtError) as found:
            getattr(shoal, name)(arguments[0] if option == "job" else job, **given)
        (options,) = found.value.args
        pairs = tuple(tuple(text.split("=")) for text in wanted.set)
        assert {**vars(options), "started_at": 0} == {**vars(wanted), "started_at": 0, "set": pairs}, option


AFTER: dict[str, dict[str, tuple[list[str], dict[str, Any]]]] = {
    "export": {
        "run": (["other"], {"run": Path("other")}),
        "output": (["-o", "there"], {"output": Path("there")}),
        "step": (["--step", "7"], {"step": 7}),
        "ema": (["--ema"], {"ema": True}),
        "max_shard_size": (["--max-shard-size", "2GB"], {"max_shard_size": "2GB"}),
        "dtype": (["--dtype", "bfloat16"], {"dtype": "bfloat16"}),
        "tokenizer": (["--tokenizer", "t"], {"tokenizer": Path("t")}),
    },
    "evaluate": {
        "run": (["other"], {"run": Path("other")}),
        "step": (["--step", "best"], {"step": "best"}),
        "ema": (["--ema"], {"ema": True}),
        "devices": (["--devices", "2"], {"devices": 2}),
        "set": (["--set", "lr=high"], {"lr": "high"}),
        "config": (["--config", "a.toml"], {"config": Path("a.toml")}),
    },
    "predict": {
        "run": (["other"], {"run": Path("other")}),
        "output": (["-o", "a.npz"], {"output": Path("a.npz")}),
        "data": (["--data", "train"], {"data": "train"}),
        "step": (["--step", "7"], {"step": 7}),
        "ema": (["--ema"], {"ema": True}),
        "devices": (["--devices", "2"], {"devices": 2}),
        "set": (["--set", "lr=high"], {"lr": "high"}),
        "config": (["--config", "a.toml"], {"config": Path("a.toml")}),
    },
}
AFTER_KINDS: dict[str, Any] = {"export": ExportOptions, "evaluate": EvaluateOptions, "predict": PredictOptions}


@pytest.mark.parametrize("name", AFTER)
def test_options_of_calls_on_a_run_arrive_as_the_commands(name: str, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def caught(options: Any, *_: Any, **__: Any) -> None:
        raise CaughtError(options)

    monkeypatch.setattr("shoal.cli.export.exported", caught)
    monkeypatch.setattr("shoal.cli.trained_engine.evaluate_request", caught)
    monkeypatch.setattr("shoal.cli.trained_engine.predict_request", caught)
    kind, own = AFTER_KINDS[name], [] if name == "export" else [job]
    assert set(option_names(kind)) - {"job", "json"} == set(AFTER[name])
    for option, (arguments, given) in AFTER[name].items():
        given = {"run": "r", **given}
        words = [name, *own, *(arguments if option == "run" else ["r", *arguments])]
        wanted = options_of(kind, _parser().parse_args(words))
        with pytest.raises(CaughtError) as found:
            getattr(shoal, name)(*own, given.pop("run"), **given)
        (options,) = found.value.args
        same = {"set": tuple(tuple(text.split("=")) for text in wanted.set)} if own else {}
        if name == "predict" and option != "output":
            same["output"] = options.output  # a file that is read and removed
        assert vars(options) == {**vars(wanted), **same}, option


def test_a_dtype_that_there_is_not_is_refused() -> None:
    with pytest.raises(CommandError, match="dtype takes"):
        shoal.export("r", dtype="int4")


def plain(name: str, job: str) -> Any:
    return options_of(KINDS[name], _parser().parse_args([name, job]))


def test_plans_of_every_kind_arrive(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr("shoal.cli.from_python.requested", lambda options: taken.append(options.plan) or {}["stop"])
    made = read_plan(Path("plan.toml"))
    for given in (made, SimpleNamespace(plan=made), "plan.toml", None):
        with pytest.raises(KeyError):
            shoal.run(job, plan=given)
    assert taken == [made, made, "plan.toml", None]


def test_a_run_directory_is_data(tmp_path: Path) -> None:
    """A file that it names is run where the caller names it too, and not else."""
    code = tmp_path / "named.py"
    code.write_text(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\ndef job(): ...\n")
    (tmp_path / "job.json").write_text(json.dumps({"file": str(code), "function": "job", "by_value": False}))
    with pytest.raises(JobFileError, match="a run directory is data: no code that it names is run"):
        shoal.Run(tmp_path).model()
    assert not (tmp_path / "ran").exists()
    with pytest.raises(JobFileError, match="a job function returns"):
        shoal.Run(tmp_path, f"{code}:job").model()
    assert (tmp_path / "ran").exists()
