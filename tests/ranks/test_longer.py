"""Runs that are resumed with another length: to more epochs, with a schedule that depends on them, and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.launching import JOBS, Ended, Run, run, run_all
from tests.usual import parametrize

pytestmark = pytest.mark.ranks

JOB = f"{JOBS / 'longer.py'}:job"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def trained(out: Path, devices: int = 1, *arguments: str, **settings: Any) -> Run:
    function = settings.pop("function", "job")
    call = Run(f"{JOBS / 'longer.py'}:{function}", out, devices, exact=True, environment=ONE_THREAD)
    call.arguments, call.settings = arguments, settings
    return call


def described(ended: Ended) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ended.out / "job.json").read_text(encoding="utf-8"))
    return found


@parametrize("processes", [(1, 1), (2, 3), (3, 1)], usual=["2-3"])
def test_three_epochs_and_three_more_are_six(processes: tuple[int, int], tmp_path: Path) -> None:
    """Bit for bit, on any number of processes, of a run that was done; records and job.json know of both lengths."""
    before, after = processes
    whole, first = run_all([trained(tmp_path / "six", epochs=6), trained(tmp_path / "run", before, epochs=3)])
    ended = first.expect(0).result
    assert ended["status"] == "completed"
    longer = run(trained(first.out, after, "--resume", epochs=6)).expect(0)
    assert "settings: epochs: 3 -> 6; of the job they change nothing but how long" in longer.stdout
    assert "length: 3 epochs (12 steps), 6 epochs (24 steps) from here on" in longer.stdout
    assert "learning rate of step 13: 0.1; there is no schedule" in longer.stdout
    assert whole.expect(0).result["weights_sha256"] == longer.result["weights_sha256"] != ended["weights_sha256"]
    assert longer.result["sample_digest"] == whole.result["sample_digest"]
    assert [record["step"] for record in longer.records] == list(range(1, 25))
    assert described(longer)["lengths"] == [
        {"from_step": 1, "kind": "epochs", "count": 3},
        {"from_step": 13, "kind": "epochs", "count": 6},
    ]


def test_a_schedule_over_the_length(tmp_path: Path) -> None:
    """It has another value from here on, which is said beside the old one."""
    first = run(trained(tmp_path / "run", 1, epochs=1, schedule="cosine")).expect(0)
    longer = run(trained(first.out, 1, "--resume", epochs=2)).expect(0)
    assert (
        "learning rate of step 5: 0 by the old length, 0.05 from here on; not as 2 epochs at once: the steps so far "
        "had the rates of 1 epoch" in longer.stdout
    )
    assert longer.records[4]["learning_rate"] == pytest.approx(0.05)
    again = run(trained(first.out, 1, "--resume")).expect(0)  # 2 epochs are the run's own now
    assert "length:" not in again.stdout


def test_another_default_in_the_file(tmp_path: Path) -> None:
    """Counts as a setting does; a resume of the same file does not load the job twice."""
    file = tmp_path / "own.py"
    text = (
        f"import sys\nsys.path.append({str(JOBS)!r})\nimport longer\nprint('loaded')\n\n\ndef job(epochs: int = 1):\n"
    )
    file.write_text(f"{text}    return longer.job(epochs)\n")
    call = Run(file, tmp_path / "run", 1, exact=True, environment=ONE_THREAD)
    run(call).expect(0)
    call.arguments = ("--resume",)
    assert run(call).expect(0).stdout.count("loaded") == 1
    file.write_text(file.read_text().replace("epochs: int = 1", "epochs: int = 2"))
    longer = run(call).expect(0)
    assert "settings: epochs: 1 -> 2; of the job they change nothing but how long" in longer.stdout
    assert longer.result["steps"] == 8


@parametrize(
    ("changes", "named"),
    [
        ({"lr": 0.2}, "the run to resume has another optimizer\n  you gave:       the setting lr: 0.1 -> 0.2"),
        ({"epochs": 3, "lr": 0.2}, "the setting lr: 0.1 -> 0.2\n"),
        ({"lr": 0.2, "function": "leaving"}, "the setting lr: 0.1 -> 0.2\n"),
        ({"lr": 0.2, "function": "by_attribute"}, "the run to resume has another optimizer"),
        ({"epochs": 3, "function": "warm"}, "the run to resume has another schedule"),
        ({"epochs": 1}, "the run has trained 8 steps already"),
        ({"samples": 100, "epochs": 2}, "8 steps"),
    ],
    ids=["a rate", "length and rate", "left behind", "by attribute", "in the schedule", "shorter", "fewer samples"],
    usual=["length and rate", "left behind", "in the schedule"],
)
def test_what_is_refused(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    """Nothing is trained, and the run stays as it was."""
    begin = {"epochs": 2, **{key: value for key, value in changes.items() if key == "function"}}
    first = run(trained(tmp_path / "run", 1, **begin)).expect(0)
    before = described(first)
    refused = run(trained(first.out, 1, "--resume", **changes)).expect(2)
    assert named in refused.stderr
    assert described(first) == before


@pytest.mark.slow
def test_a_short_last_step_cannot_be_made_up_for(tmp_path: Path) -> None:
    """Of a length in samples: the ids that it left out would be lost; where it ends with a step all is well."""
    first = run(trained(tmp_path / "run", 1, samples=20)).expect(0)
    refused = run(trained(first.out, 1, "--resume", samples=50)).expect(2)
    assert "12 samples of step 2 were left out" in refused.stderr
    whole = run(trained(tmp_path / "whole", 1, samples=32)).expect(0)
    longer = run(trained(whole.out, 1, "--resume", samples=55)).expect(0)
    assert longer.result["samples"] == 55


@pytest.mark.slow
def test_an_interrupted_run_may_become_shorter(tmp_path: Path) -> None:
    """While its checkpoint is before the new end."""
    first = run(trained(tmp_path / "run", 2, "--steps", "3", epochs=5)).expect(0)
    shorter = run(trained(first.out, 1, "--resume", "--steps", "8", epochs=2)).expect(0)
    assert shorter.result["steps"] == 8
    assert described(shorter)["lengths"][-1] == {"from_step": 4, "kind": "epochs", "count": 2}
