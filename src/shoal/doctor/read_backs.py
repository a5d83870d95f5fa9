"""Numbers that a job's code reads back from tensors within a step (`.item()`), found in a trace of the run.

On a GPU each read makes the host wait for the device. On a CPU a read costs a microsecond; thousands take milliseconds.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.doctor.causes import LostTime, Remedy
from shoal.doctor.run_times import RunTimes
from shoal.runs.chrome_trace import SPAN_ROW

_READ, _APART = "aten::item", "aten::unbind"  # the operator of iterating over a tensor
_CALLS = ("item", "tolist")
_COMPUTING = ("forward", "backward")
# Longest pauses in microseconds that count as Python's: between two reads (True), where Python builds lists of tensors,
# and between other operators (False). Longer pauses come from the profiler or garbage collection.
_GAPS = {True: 1000.0, False: 100.0}
_FEWEST = 2
_MOST_BYTES = 1 << 20  # largest job file to read


@dataclass(frozen=True)
class ReadBacks:
    """Reads in a step: their number, and their seconds without a profiler."""

    count: float
    seconds: float


def read_backs(document: Mapping[str, Any], times: RunTimes) -> ReadBacks | None:
    """Return the reads in forwards and backwards of rank 0, with the unpacking of tensors and Python between reads.

    The profiler slows all of a pass, so the run's seconds are divided in the trace's proportions.
    """
    events = [e for e in document.get("traceEvents", ()) if e.get("ph") == "X" and e.get("pid") == 1]
    spans = [e for e in events if e.get("cat") == "shoal" and e["tid"] % 1000 == SPAN_ROW]
    steps = sum(e["name"].startswith("step ") for e in spans)
    operators = sorted((e for e in events if e.get("cat") != "shoal"), key=lambda e: float(e["ts"]))
    count, seconds = 0, 0.0
    for name in _COMPUTING:
        passes = [(e["ts"], e["ts"] + e["dur"]) for e in spans if e["name"] == name]
        own = [[o for o in operators if began <= o["ts"] <= ended] for began, ended in passes]
        count += sum(o["name"] == _READ for one in own for o in one)
        reading, other = map(sum, zip(*map(divided, own), strict=True)) if own else (0.0, 0.0)
        if reading:
            seconds += times.spans.get(name, 0.0) * reading / (reading + other)
    return ReadBacks(count / steps, seconds) if steps and count >= _FEWEST * steps else None


def divided(operators: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Return the microseconds of reads and of other operators, each with Python's time between two of a kind."""
    outer: list[tuple[str, float, float]] = []
    for operator in operators:
        if not outer or operator["ts"] >= outer[-1][2]:  # not nested in another operator
            outer.append((operator["name"], operator["ts"], operator["ts"] + operator["dur"]))
    seconds, before, was = {True: 0.0, False: 0.0}, None, 0.0
    for place, (name, began, ended) in enumerate(outer):
        follows = outer[place + 1][0] if place + 1 < len(outer) else ""
        reads = name == _READ or (name == _APART and follows == _READ)
        if before is reads and began - was < _GAPS[reads]:
            seconds[reads] += began - was
        seconds[reads] += ended - began
        before, was = reads, ended
    return seconds[True], seconds[False]


def lost_in(reads: ReadBacks, times: RunTimes, places: Sequence[str]) -> LostTime:
    """Return the cause, with the lines of the job's file that read numbers."""
    where = f" ({', '.join(places)})" if places else ""
    share = reads.seconds / times.total
    seen = f"{reads.count:.0f} numbers are read back from tensors in each step{where}"
    words = "without .item() in model and loss: keep numbers as tensors, and count them in metrics"
    remedy = Remedy("no-read-backs", words, share)
    return LostTime("read backs", "numbers read back in the loss", reads.seconds, share, seen, (remedy,), share)


def places_of(path: Path) -> tuple[str, ...]:
    """Return the lines of a job's file that read numbers back. The file is parsed as text and not executed."""
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:  # a run directory may name any file
            return ()
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ()
    lines = {
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _CALLS
        and not node.args
    }
    return tuple(f"{path.name}:{line}" for line in sorted(lines))
