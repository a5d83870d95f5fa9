"""The effective share of a call's time."""

import dataclasses
import json
from pathlib import Path

import pytest
from tests.run_folders import RunFolder

from shoal.runs.effective_time import EffectiveTime, earlier_starts


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
