"""Numbers that a loss reads back are seen in a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.doctor.test_causes import HEALTHY, run

from shoal.doctor.causes import causes
from shoal.doctor.read_backs import lost_in, places_of, read_backs


def event(name: str, began: float, lasted: float, row: int = 2, category: str = "cpu_op") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1000 + row, "ts": began, "dur": lasted}


def trace(reads: int, others: int = 0) -> dict[str, Any]:
    """A step of 40 ms with so many reads of 4 us, 10 us apart, in its forward."""
    events = [event("step 3", 0.0, 40_000.0, 0, "shoal"), event("forward", 0.0, 30_000.0, 0, "shoal")]
    events += [event("aten::item", 100.0 + 10.0 * number, 4.0) for number in range(reads)]
    events += [event("aten::mm", 25_000.0 + 2.0 * number, 1.0) for number in range(others)]
    return {"otherData": {"steps": "3"}, "traceEvents": events}


# The trace has 10 ms of reads and 2 ms of others: of 18 ms of forward without a profiler.
TRACED = run(spans={"forward": 0.018})
SECONDS = 0.015


def test_a_pass_is_divided_as_its_trace_is() -> None:
    found = read_backs(trace(1000, others=1000), TRACED)
    assert found is not None
    assert found.count == 1000
    assert found.seconds == pytest.approx(SECONDS, rel=0.01)


def test_a_tensor_that_is_taken_apart_to_be_read_belongs_to_it() -> None:
    document = trace(1000, others=1000)
    document["traceEvents"].append(event("aten::unbind", 0.0, 10.0))
    document["traceEvents"].append(event("aten::select", 2.0, 1.0))  # within that
    found = read_backs(document, TRACED)
    assert found is not None
    assert found.seconds == pytest.approx(0.018 * 10.1 / 12.1, rel=0.002)
    document["traceEvents"].append(event("aten::unbind", 27_500.0, 8000.0))  # for something else
    found = read_backs(document, TRACED)
    assert found is not None
    assert found.seconds == pytest.approx(0.018 * 10.1 / 20.1, rel=0.002)


def test_a_step_without_reads() -> None:
    assert read_backs(trace(0, others=10), HEALTHY) is None
    assert read_backs(trace(1, others=10), HEALTHY) is None
    assert read_backs({"traceEvents": []}, HEALTHY) is None


def test_the_cause_names_the_lines(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text("def loss(model, batch):\n    seen = batch[0].sum().item()\n    return model(batch[0]).tolist()\n")
    found = read_backs(trace(1000, others=1000), TRACED)
    assert found is not None
    (first,) = causes(TRACED, lost_in(found, TRACED, places_of(job)))
    assert first.cause == "read backs"
    assert "job.py:2, job.py:3" in first.seen
    assert first.regained == pytest.approx(SECONDS / TRACED.step, rel=0.01)
    assert places_of(tmp_path / "gone.py") == ()
