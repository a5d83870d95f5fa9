"""Callbacks on several processes: one run whatever the layout, requests of one rank followed by all, failures named."""

from __future__ import annotations

import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests import forks
from tests.launching import JOBS, Ended, Run, run, run_all
from tests.ranks.test_relayout import ONE_THREAD, plan
from tests.usual import parametrize

import shoal

pytestmark = pytest.mark.ranks

JOB = f"{JOBS / 'hooked.py'}"
DEVICES = (1, 2, 3, 4)
METRICS = ("loss", "accuracy")
# Averaged, evaluated where asked for, ended before its last step, and disturbed after each step.
SETTINGS = {"ema": 0.9, "stop": 2, "asks": "evaluation@5,checkpoint@6", "busy": "true"}


def told(out: Path, rank: int = 0) -> list[str]:
    return (out / f"told-{rank}.txt").read_text(encoding="utf-8").splitlines()


def facts(ended: Ended) -> tuple[Any, ...]:
    """What has to be the same on any number of processes, to the bit."""
    result = ended.expect(0).result
    averaged = shoal.weights_sha256(shoal.load(ended.out, ema=True))
    keys = ("weights_sha256", "sample_digest", "metrics", "steps", "ended_by")
    return (averaged, *(result[key] for key in keys), tuple(told(ended.out)))


def disturbed(model: str, out: Path, devices: int, *arguments: str) -> Run:
    settings = {**SETTINGS, "model": model, "steps": 60 if model == "mlp" else 16}
    return Run(f"{JOB}:job", out, devices, True, arguments, settings, ONE_THREAD)


@parametrize("devices", [(1, 2), DEVICES], usual=["1-2"])
@parametrize("model", ["mlp", "convnet"], usual=["convnet"])
def test_one_run_on_any_number_of_processes(model: str, devices: tuple[int, ...], tmp_path: Path) -> None:
    ends = run_all([disturbed(model, tmp_path / str(n), n) for n in devices])
    found = [facts(ended) for ended in ends]
    assert all(other == found[0] for other in found[1:])
    assert told(tmp_path / "2", rank=1) == told(tmp_path / "2", rank=0)
    if model == "mlp":
        assert ends[0].result["ended_by"]["callback"] == "EarlyStopping"
        assert ends[0].result["steps"] < 60
    elif devices == (1, 2):  # and the callbacks have changed nothing
        steps = ("--steps", str(ends[0].result["steps"]))
        settings = {"model": model}
        plain = run(Run(f"{JOB}:plain", tmp_path / "plain", 1, True, steps, settings, ONE_THREAD)).expect(0)
        assert plain.result["weights_sha256"] == ends[0].result["weights_sha256"]


@parametrize(("before", "after"), [(2, 1), (1, 3), (3, 2)], usual=["2-1"])
def test_one_run_across_a_resume(before: int, after: int, tmp_path: Path) -> None:
    """Ended between two evaluations, and taken up by another number of processes."""
    whole = run(disturbed("mlp", tmp_path / "whole", 1))
    out = tmp_path / "two"
    run(disturbed("mlp", out, before, "--steps", "10")).expect(0)
    for path in out.glob("told-*"):
        path.unlink()
    ended = run(disturbed("mlp", out, after, "--resume", "--steps", "60"))
    assert facts(ended)[:-1] == facts(whole)[:-1]
    later = [line for line in told(whole.out) if line.startswith("evaluation") and int(line.split()[1]) > 10]
    assert [line for line in told(out) if line.startswith("evaluation")] == later
    assert told(out)[0].startswith("start 10 10 "), "its state came back"


def test_what_one_rank_asks_for_all_do(tmp_path: Path) -> None:
    call = Run(f"{JOB}:one_rank_asks", tmp_path, 2, settings={"asks": "evaluation@2,checkpoint@3,end@6"})
    ended = run(call).expect(0)
    assert ended.result["ended_by"] == {"callback": "Told", "reason": "as asked", "step": 6}
    assert told(tmp_path, 0) == told(tmp_path, 1)
    assert [line.split()[:2] for line in told(tmp_path)][1:] == [
        ["evaluation", "2"],
        ["checkpoint", "3"],
        ["evaluation", "4"],
        ["checkpoint", "6"],
        ["evaluation", "6"],
        ["end", "completed"],
    ]


@parametrize("hook", ["on_start", "on_step", "on_evaluation", "on_end"], usual=["on_step"])
@parametrize("rank", [0, 1], usual=["1"])
def test_one_that_raises_on_a_rank_is_named(rank: int, hook: str, tmp_path: Path) -> None:
    settings = {"hook": hook, "rank": rank}
    out = tmp_path / "run"
    ended = run(Run(f"{JOB}:raises", out, 2, settings=settings)).expect(0)
    if hook != "on_start":  # it raises from the third step on
        assert ended.output.count("callback Raises raised in") == 1
        assert f"on rank {rank}" in ended.output
        assert "ValueError: no such file" in ended.output
    assert ended.result["steps"] == 8
    assert told(out, 1)[-1].startswith("end completed 8")


@pytest.mark.slow
def test_one_that_is_required_ends_the_run_on_all_ranks(tmp_path: Path) -> None:
    ended = run(Run(f"{JOB}:raises", tmp_path, 2, settings={"required": "true", "rank": 1}))
    ended.expect(2)
    assert "callback Raises" in ended.stderr
    assert "step 3 is saved" in ended.stderr
    assert told(tmp_path, 0)[-1].startswith("end failed 3")


@pytest.mark.slow
def test_one_that_changes_a_parameter_ends_the_run(tmp_path: Path) -> None:
    ended = run(Run(f"{JOB}:meddles", tmp_path, 2)).expect(2)
    assert "callback Meddles, whose on_step changes 0.weight" in ended.stderr


@pytest.mark.slow
def test_states_that_differ_between_ranks_are_named(tmp_path: Path) -> None:
    ended = run(Run(f"{JOB}:apart", tmp_path, 2, arguments=("--checkpoint-every", "2"))).expect(0)
    assert ended.output.count("callback Apart has another state on rank 1 than on rank 0") == 1


@pytest.mark.slow
def test_other_callbacks_on_a_rank_are_refused(tmp_path: Path) -> None:
    ended = run(Run(f"{JOB}:others", tmp_path, 2)).expect(2)
    assert "callbacks" in ended.stderr


@pytest.mark.slow
def test_several_evaluation_sets_on_any_number_of_processes(tmp_path: Path) -> None:
    """Watched by one set, ended by another, averaged too; in exact mode the same to the bit."""
    call = partial(Run, f"{JOB}:sets", exact=True, environment=ONE_THREAD)
    ends = run_all([call(out=tmp_path / str(n), devices=n) for n in (1, 3)])
    found = [ended.expect(0).result for ended in ends]
    assert found[0]["metrics"] == found[1]["metrics"]
    assert set(found[0]["metrics"]) == {f"{e}{s}/{m}" for e in ("", "ema_") for s in ("a", "b") for m in METRICS}
    assert found[0]["best"]["metric"] == "ema_b/accuracy"
    assert found[0]["ended_by"] == found[1]["ended_by"]
    assert "a/loss is not better than" in found[0]["ended_by"]["reason"]


# ------------------------------------------------------------------------------------------------------------- layouts

LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "data": {"layout": {"data": 2}},
    "ZeRO-1": {"layout": {"shard": 2}, "shard": {"level": "optimizer"}},
    "ZeRO-2": {"layout": {"shard": 2}, "shard": {"level": "gradients"}},
    "ZeRO-3": {"layout": {"shard": 2}, "shard": {"level": "parameters"}},
    "tensor": {"layout": {"tensor": 2}},
    "pipeline": {"layout": {"pipeline": 2}},
    "hybrid": {"layout": {"data": 2, "shard": 2}, "shard": {"level": "parameters"}},
    "shard x pipeline": {"layout": {"shard": 2, "pipeline": 2}, "shard": {"level": "parameters"}},
}
STEPS = 12
# Of a float32 training of so many steps on another layout: TOLERANCE of test_relayout.py, of weights instead of losses.
CLOSE = 2e-5


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    out = tmp_path_factory.mktemp("alone") / "run"
    return run(Run(f"{JOB}:stack", out, 1, settings={"steps": STEPS}, environment=ONE_THREAD)).expect(0)


@parametrize("layout", LAYOUTS, usual=[])
def test_averages_in_every_layout(layout: str, alone: Ended, tmp_path: Path) -> None:
    """And taken up by another layout in the midst of it."""
    sections = plan(tmp_path / "plan.toml", LAYOUTS[layout])
    out, settings = tmp_path / "run", {"steps": STEPS}
    call = Run(f"{JOB}:stack", out, None, False, (*sections, "--steps", "6"), settings, ONE_THREAD)
    run(call).expect(0)
    other = plan(tmp_path / "other.toml", LAYOUTS["data" if layout == "ZeRO-3" else "ZeRO-3"])
    shutil.copytree(out, tmp_path / "other")
    for folder, again in ((out, ()), (tmp_path / "other", other)):
        call = Run(
            f"{JOB}:stack", folder, None, False, (*again, "--resume", "--steps", str(STEPS)), settings, ONE_THREAD
        )
        ended = run(call).expect(0)
        found, wanted = shoal.load(folder, ema=True), shoal.load(alone.out, ema=True)
        assert found.keys() == wanted.keys()
        for key in wanted:
            difference = (found[key] - wanted[key]).abs().max()
            assert difference <= CLOSE, (key, float(difference))
        assert ended.result["metrics"]["ema_loss"] == pytest.approx(alone.result["metrics"]["ema_loss"], rel=CLOSE)
        assert ended.result["metrics"]["ema_loss"] != ended.result["metrics"]["loss"]
        assert (folder / f"sampled-{STEPS}.txt").read_text() == ended.result["weights_sha256"]


@pytest.mark.slow
def test_a_sample_that_raises_lets_nobody_wait(tmp_path: Path) -> None:
    sections = plan(tmp_path / "plan.toml", LAYOUTS["ZeRO-3"])
    ended = run(Run(f"{JOB}:sample_raises", tmp_path / "run", None, arguments=sections)).expect(0)
    assert ended.output.count("callback Sample raised in on_step") == 1
    assert ended.result["steps"] == 6


GATHERED = [
    ("on_step", "raises", 0, "raised in on_step after step 2 on rank 1", "OSError: disk full on this host"),
    ("on_evaluation", "raises", 0, "raised in on_evaluation after step 6 on rank 1", "OSError: disk full on this host"),
    ("on_step", "leaves", 0, "raised in on_step after step 2 on rank 0", "rank 1 has ended its hook without it"),
    ("on_end", "raises", 0, "raised in on_end after step 6 on rank 1", "OSError: disk full on this host"),
    ("on_end", "fails", 2, "whose on_step changes", "callbacks do not train"),
]


@parametrize(("hook", "instead", "code", "what", "why"), GATHERED, usual=[], ids=lambda value: str(value)[:20])
def test_nobody_waits_for_a_rank_that_does_not_gather(
    hook: str, instead: str, code: int, what: str, why: str, tmp_path: Path
) -> None:
    sections = plan(tmp_path / "plan.toml", LAYOUTS["ZeRO-3"])
    settings = {"hook": hook, "instead": instead}
    ended = run(Run(f"{JOB}:gathers", tmp_path / "run", None, arguments=sections, settings=settings)).expect(code)
    assert what in ended.output
    assert why in ended.output
    if code == 0:
        assert ended.output.count("callback Gathers raised in") == 1, "the cause alone"
        assert ended.result["steps"] == 6


# ------------------------------------------------------------------------------------------------- servers and verify


@pytest.mark.slow
def test_hooks_with_servers(tmp_path: Path) -> None:
    sections = plan(tmp_path / "plan.toml", {"layout": {"data": 2}, "server": {"mode": "synchronous"}})
    ended = run(Run(f"{JOB}:served", tmp_path / "run", None, arguments=sections)).expect(0)
    assert ended.result["ended_by"]["callback"] == "Told"
    assert 6 <= ended.result["steps"] < 24
    lines = [line.split() for line in told(tmp_path / "run")]
    assert lines[0][:2] == ["start", "0"]
    assert {line[0] for line in lines} == {"start", "evaluation", "checkpoint", "end"}
    assert lines[-1][:2] == ["end", "completed"]


@pytest.mark.slow
def test_averages_on_servers_are_refused(tmp_path: Path) -> None:
    sections = plan(tmp_path / "plan.toml", {"layout": {"data": 2}, "server": {"mode": "synchronous"}})
    ended = run(Run(f"{JOB}:served", tmp_path / "run", None, arguments=sections, settings={"ema": "true"})).expect(2)
    assert "the parameters are on the servers" in ended.stderr


@pytest.mark.slow
def test_verify_calls_none(tmp_path: Path) -> None:
    settings = ("--set", "ema=0.9", "--set", "stop=2", "--set", "busy=true")
    command = ["verify", f"{JOB}:job", "--devices", "2", "--steps", "2", "--out", str(tmp_path), *settings]
    done = forks.run([sys.executable, "-m", "shoal", *command], cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(tmp_path.rglob("told-*"))
