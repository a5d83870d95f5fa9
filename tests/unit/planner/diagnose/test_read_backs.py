"""Numbers that a loss reads back are seen in a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.planner.diagnose.test_causes import HEALTHY, run

from shoal.planner.diagnose.causes import causes
from shoal.planner.diagnose.read_backs import lost_in, places_of, read_backs


def event(name: str, began: float, lasted: float, row: int = 2, category: str = "cpu_op") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1000 + row, "ts": began, "dur": lasted}


def trace(reads: int, others: int = 0) -> dict[str, Any]:
    """A step of 40 ms with so many reads of 4 us, 10 us apart, in its forward."""
    events = [event("step 3", 0.0, 40_000.0, 0, "shoal"), event("forward", 0.0, 30_000.0, 0, "shoal")]
    events += [event("aten::item", 100.0 + 10.0 * number, 4.0) for number in range(reads)]
    events += [event("aten::mm", 25_000.0 + number, 1.0) for number in range(others)]
    return {"otherData": {"steps": "3"}, "traceEvents": events}


def test_stretches_of_reads_are_counted_with_what_lies_between() -> None:
    found = read_backs(trace(1000, others=1000), HEALTHY)
    assert found is not None
    assert found.count == 1000
    assert found.seconds == pytest.approx(0.01, rel=0.01)


def test_reads_take_no_more_than_the_computing_that_they_are_part_of() -> None:
    found = read_backs(trace(1000), run(spans={"forward": 0.003, "backward": 0.001}))
    assert found is not None
    assert found.seconds == pytest.approx(0.004)


def test_a_step_without_reads() -> None:
    assert read_backs(trace(0, others=10), HEALTHY) is None
    assert read_backs(trace(1, others=10), HEALTHY) is None
    assert read_backs({"traceEvents": []}, HEALTHY) is None


def test_the_cause_names_the_lines(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text("def loss(model, batch):\n    seen = batch[0].sum().item()\n    return model(batch[0]).tolist()\n")
    found = read_backs(trace(1000, others=1000), HEALTHY)
    assert found is not None
    (first,) = causes(HEALTHY, lost_in(found, HEALTHY, places_of(job)))
    assert first.cause == "read backs"
    assert "job.py:2, job.py:3" in first.seen
    assert first.regained == pytest.approx(0.01 / HEALTHY.step, rel=0.01)
    assert places_of(tmp_path / "gone.py") == ()
