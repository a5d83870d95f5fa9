"""A trial runs each remedy in turn with the run as it is, and one that cannot run is told."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.run_folders import RunFolder

from shoal.doctor import trial
from shoal.doctor.causes import Remedy
from shoal.doctor.run_times import seconds_per_step
from shoal.doctor.trial import TrialJob, changed_plan, tried
from shoal.errors import LaunchError
from shoal.plans.plan import Plan, read_plan
from shoal.runs.records import read_steps

FOUR = Plan.from_mapping(
    {"schema": 1, "layout": {"data": 4}, "collectives": {"all_reduce": "shared_memory"}, "prediction": {"x": 1.0}},
    "test",
)
WORKERS = Remedy("workers", "2 workers", 0.5, {"data": {"workers": 2}})
FEWER = Remedy("fewer-devices", "1 device", 0.3, devices=1)
RARELY = Remedy("rarely", "rarely", 0.1, arguments=("--evaluate-every", "100"))


def test_plans_of_remedies() -> None:
    assert changed_plan(FOUR, WORKERS).data.workers == 2
    one = changed_plan(FOUR, FEWER)
    assert (one.layout.data, one.collectives.all_reduce, one.batch.grains_per_microbatch) == (1, "native", 0)
    assert one.prediction == {}


class Commands:
    """Stands for `shoal run`: writes records whose steps take as long as a table says."""

    def __init__(self, seconds: dict[str, float], fails: str = "") -> None:
        self.seconds, self.fails, self.calls = seconds, fails, list[list[str]]()
        self.variables: list[dict[str, str]] = []

    def __call__(self, command: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
        out = Path(command[command.index("--out") + 1])
        name = out.name.rpartition("-")[0]
        self.calls.append(command)
        self.variables.append(more["env"])
        if name == self.fails:
            return subprocess.CompletedProcess(command, 2, "", "error: no such thing\n")
        read_plan(Path(command[command.index("--plan") + 1]))
        run = RunFolder(out, prediction=False)
        run.begins()
        run.steps(20, self.seconds[name])
        run.ends()
        run.written()
        return subprocess.CompletedProcess(command, 0, "", "")


def names(commands: Commands) -> list[str]:
    return [Path(c[c.index("--out") + 1]).name.rpartition("-")[0] for c in commands.calls]


def test_remedies_run_in_turn_with_the_run_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = Commands({"unchanged": 0.1, "workers": 0.05, "rarely": 0.08})
    monkeypatch.setattr(trial.subprocess, "run", commands)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    job = TrialJob("job.py", FOUR, 20, ("--set", "lr=1", "--evaluate-every", "10"), {"OMP_NUM_THREADS": None}, rounds=2)
    said: list[str] = []
    found = tried(job, [WORKERS, RARELY], said.append)
    assert names(commands) == ["unchanged", "workers", "rarely", "rarely", "workers", "unchanged"]
    assert [result.gain for result in found] == pytest.approx([0.5, 0.2], abs=0.05)
    assert len(found[0].gains) == 2
    assert len(said) == 6
    assert all("OMP_NUM_THREADS" not in variables for variables in commands.variables)
    assert commands.calls[0][-4:] == ["--set", "lr=1", "--evaluate-every", "10"]
    assert commands.calls[2][-4:] == ["--set", "lr=1", "--evaluate-every", "100"]


def test_trials_go_on_until_their_rounds_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = Commands({"unchanged": 0.1, "workers": 0.05})
    # Another program holds up the second round, which is no half of five.
    taken = iter([0.05, 0.09, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05])
    plain = commands.__call__

    def held_up(command: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
        if "workers-" in command[command.index("--out") + 1]:
            commands.seconds["workers"] = next(taken)
        return plain(command, **more)

    monkeypatch.setattr(trial.subprocess, "run", held_up)
    (found,) = tried(TrialJob("job.py", FOUR, 20), [WORKERS], lambda text: None)
    assert len(found.gains) == 5
    assert found.gain == pytest.approx(0.5, abs=0.05)
    taken = iter([0.05, 0.09] * 9)
    (found,) = tried(TrialJob("job.py", FOUR, 20), [WORKERS], lambda text: None)
    assert len(found.gains) == 9, "the most"


def test_a_remedy_that_cannot_run_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial.subprocess, "run", Commands({"unchanged": 0.1, "rarely": 0.1}, fails="workers"))
    found = tried(TrialJob("job.py", FOUR, 20), [WORKERS, RARELY], lambda text: None)
    assert found[0].gain is None
    assert "no such thing" in str(found[0].error)
    assert found[1].gain is not None


def test_a_run_that_cannot_be_run_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial.subprocess, "run", Commands({}, fails="unchanged"))
    with pytest.raises(LaunchError, match="no such thing"):
        tried(TrialJob("job.py", FOUR, 20), [WORKERS], lambda text: None)


def test_what_ends_a_run_is_no_part_of_its_steps(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", prediction=False)
    run.begins()
    run.steps(20)
    run.evaluates(60.0)
    run.ends()
    assert seconds_per_step(list(read_steps(run.written() / "records.jsonl"))) == pytest.approx(0.11, rel=0.1)
