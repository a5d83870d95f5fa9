"""Records cross as JSON lines and come back equal."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.runs.records import SPANS, RankTimes, RunRecord, Spread, StepRecord, read_steps, sample_rate

FLOATS = st.floats(allow_nan=False, allow_infinity=False)
STEP = StepRecord(
    step=3,
    epoch=0,
    samples=96,
    num_samples=32,
    loss=0.5,
    weight=32.0,
    grad_norm=None,
    learning_rate=0.1,
    loss_scale=None,
    seconds=0.25,
    spans=dict.fromkeys(SPANS, 0.03125),
    ranks={"forward": Spread(0.1, 0.2, 1)},
    memory_bytes=1 << 30,
    digest="ab" * 32,
)
RUN = RunRecord(
    status="completed",
    steps=3,
    samples=96,
    world_size=2,
    train_loss=0.5,
    metrics={"accuracy": 0.75},
    eval_samples=10,
    weights_sha256="cd" * 32,
    sample_digest="ab" * 32,
    step_seconds={"median": 0.1},
    wall_seconds=2.5,
)


def test_sums_of_all_ranks_come_back_equal() -> None:
    record = replace(STEP, by_rank=RankTimes(10, [1.0, 2.0], {1: [0.5, 0.0], -1: [0.0, 0.25]}))
    assert StepRecord.from_line(record.to_line()) == record


@given(FLOATS, FLOATS, st.none() | st.text(), st.dictionaries(st.text(), FLOATS, max_size=3))
def test_a_step_comes_back_equal(loss: float, rate: float, skipped: str | None, metrics: dict[str, float]) -> None:
    record = replace(STEP, loss=loss, learning_rate=rate, skipped=skipped, metrics=metrics)
    line = record.to_line()
    assert "\n" not in line
    assert StepRecord.from_line(line) == record


def test_a_run_comes_back_equal() -> None:
    record = replace(RUN, error={"kind": "PlanError"}, versions={"torch": "2"}, resumed_from=4)
    assert RunRecord.from_json(record.to_json()) == record


def test_keys_of_newer_versions_are_left_out() -> None:
    line = json.dumps({**json.loads(STEP.to_line()), "moon": "full"})
    assert StepRecord.from_line(line) == STEP
    text = json.dumps({**json.loads(RUN.to_json()), "moon": "full"})
    assert RunRecord.from_json(text) == RUN


def test_a_last_line_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    lines = [replace(STEP, step=n).to_line() + "\n" for n in (1, 2, 3)]
    for cut in (1, 40, len(lines[2]) - 1):
        path.write_text("".join(lines[:2]) + lines[2][:-cut])
        assert [r.step for r in read_steps(path)] == [1, 2]
    path.write_text("".join(lines))
    assert [r.step for r in read_steps(path)] == [1, 2, 3]


@pytest.mark.parametrize("field", ["weight", "grad_norm", "loss"])
def test_a_value_without_a_number_is_null(field: str) -> None:
    for value in (math.nan, math.inf):
        line = replace(STEP, **{field: value}).to_line()
        assert json.loads(line)[field] is None


def test_a_rate_below_one_is_shown_as_seconds_a_sample() -> None:
    assert [sample_rate(4200, 2.0), sample_rate(3, 12.0), sample_rate(0, 1.0)] == [
        "2,100 samples/s",
        "4.0 s a sample",
        "0 samples/s",
    ]
