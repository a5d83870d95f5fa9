"""The effective share of a call's time."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.run_folders import RunFolder

from shoal.runs.attempts import AttemptLog, EffectiveTime, call_began_at, earlier_starts, instant, mtbf_seconds


def test_steps_that_are_trained_again_count_once(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.begins()
    run.steps(6)
    found = EffectiveTime(0)
    for record in run.records:
        found.take(record)
    assert found.seconds == pytest.approx(sum(record.seconds for record in run.records))
    found.take(dataclasses.replace(run.records[2], seconds=9.0))  # step 3 again: 4 to 6 are undone
    assert found.seconds == pytest.approx(sum(record.seconds for record in run.records[:2]) + 9.0)


def test_neither_checkpoints_nor_what_comes_after_a_step_but_evaluations(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.begins()
    run.one_step(0.5, checkpoint=0.25)
    found = EffectiveTime(0)
    found.take(run.records[0].followed_by("evaluation", 2.0).followed_by("checkpoint", 4.0))
    assert found.seconds == pytest.approx(2.5)


def test_of_a_calls_earlier_starts_what_is_left_counts(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.begins()
    run.steps(5)
    run.ends("preempted")
    run.begins(idle=100.0)
    call = json.loads((run.path / "attempts.jsonl").read_text().splitlines()[-1])
    run.steps(10)
    run.written()
    files = run.path / "attempts.jsonl", run.path / "records.jsonl"
    began_at, seconds = earlier_starts(*files, call["started_at"], 12)
    assert began_at == call["at"]
    assert seconds == pytest.approx(sum(record.seconds for record in run.records[5:12]))
    assert earlier_starts(tmp_path / "none", tmp_path / "none", 0.0, 3) == (None, 0.0)


def test_an_engines_new_start_is_of_the_call_that_began_with_the_first(tmp_path: Path) -> None:
    """Its own command began after the losses, of which there would be none in the call."""
    log, now = AttemptLog(tmp_path / "attempts.jsonl", lambda: 0.0), 500.0
    for started_at, restarts in ((100.0, 0), (150.0, 1), (200.0, 0), (300.0, 1), (400.0, 2)):
        log.began(started_at, {}, restarts=restarts)

    def began(restarts: int, lost_at: float | None = None) -> float:
        where = SimpleNamespace(out=tmp_path)
        request: Any = SimpleNamespace(where=where, started_at=now, restarts=restarts, lost_at=lost_at)
        return call_began_at(request)

    assert began(3) == 200.0
    assert (began(0), began(3, lost_at=450.0)) == (now, now), "the first start; and one that was told"
    log.ended("preempted", 4, 420.0, {})
    assert began(3) == now, "a call that ended in good order"


def test_the_mean_time_between_losses_counts_those_of_the_call(tmp_path: Path) -> None:
    lost = [json.dumps({"at": instant(at), "kind": "lost"}) for at in (150.0, 250.0, 350.0)]
    (tmp_path / "events.jsonl").write_text("".join(f"{line}\n" for line in lost))
    assert mtbf_seconds(tmp_path / "events.jsonl", 200.0, 400.0) == 100.0
    assert mtbf_seconds(tmp_path / "events.jsonl", 400.0, 500.0) is None
