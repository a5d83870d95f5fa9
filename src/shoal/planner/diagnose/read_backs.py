"""Numbers that a job's code reads back from tensors within a step (`.item()`), as a trace of the run shows them.

On a GPU each makes the host wait for the device. On a CPU one costs a microsecond, and thousands cost milliseconds.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.planner.diagnose.causes import LostTime, Remedy
from shoal.planner.diagnose.run_times import RunTimes
from shoal.runs.chrome_trace import SPAN_ROW

_READ = "aten::item"
_CALLS = ("item", "tolist")
_COMPUTING = ("forward", "backward")
# Python between two reads of one loop.
_GAP_MICROSECONDS = 60.0
_FEWEST = 2
_MOST_BYTES = 1 << 20  # of a job's file


@dataclass(frozen=True)
class ReadBacks:
    """Reads of a step: how many, and their seconds where no profiler runs."""

    count: float
    seconds: float


def read_backs(document: Mapping[str, Any], times: RunTimes) -> ReadBacks | None:
    """Reads in the forwards and backwards of rank 0.

    Seconds are those of the trace, Python between two reads included, and no more than all of the run's computing.
    The profiler adds a fraction of a microsecond to each.
    """
    events = [e for e in document.get("traceEvents", ()) if e.get("ph") == "X" and e.get("pid") == 1]
    spans = [e for e in events if e.get("cat") == "shoal" and e["tid"] % 1000 == SPAN_ROW]
    count = sum(e["name"].startswith("step ") for e in spans)
    passes = [(e["ts"], e["ts"] + e["dur"]) for e in spans if e["name"] in _COMPUTING]
    found = sorted(
        (e for e in events if e["name"] == _READ and _is_within(e["ts"], passes)), key=lambda e: float(e["ts"])
    )
    if not count or len(found) < _FEWEST * count:
        return None
    stretches = _stretches([(e["ts"], e["ts"] + e["dur"]) for e in found])
    reading = sum(ended - began for began, ended in stretches) / 1e6 / count
    return ReadBacks(len(found) / count, min(reading, times.computing))


def _is_within(at: float, intervals: Sequence[tuple[float, float]]) -> bool:
    return any(began <= at <= ended for began, ended in intervals)


def _stretches(reads: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Reads with what Python does between two of them."""
    found: list[tuple[float, float]] = []
    for began, ended in reads:
        if found and began - found[-1][1] < _GAP_MICROSECONDS:
            found[-1] = found[-1][0], max(ended, found[-1][1])
        else:
            found.append((began, ended))
    return found


def lost_in(reads: ReadBacks, times: RunTimes, places: Sequence[str]) -> LostTime:
    """The cause, with the places in the job's file where numbers are read."""
    where = f" ({', '.join(places)})" if places else ""
    share = reads.seconds / times.total
    seen = f"{reads.count:.0f} numbers are read back from tensors in each step{where}"
    words = "without .item() in model and loss: keep numbers as tensors, and count them in metrics"
    remedy = Remedy("no-read-backs", words, share)
    return LostTime("read backs", "numbers read back in the loss", reads.seconds, share, seen, (remedy,), share)


def places_of(path: Path) -> tuple[str, ...]:
    """Lines of a job's file that read numbers back. The file is read as text; nothing of it is run."""
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:  # a run directory may name anything
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
