"""Effective training time ratio (ETTR) of a call: the share of its time spent on steps that are in the result.

Source: Kokolis et al., Revisiting Reliability in Large-Scale Machine Learning Research Clusters, 2024.
"""

from __future__ import annotations

import contextlib
import json
from array import array
from pathlib import Path

from shoal.runs.attempts import Attempt, attempts_of
from shoal.runs.directory import RunDirectory
from shoal.runs.records import StepRecord, read_steps
from shoal.runs.request import RunRequest

# Tolerance: two writers round the start of a call.
_ROUNDED_SECONDS = 0.01


def productive_seconds(record: StepRecord) -> float:
    """Return the seconds of a step and the evaluation after it, without the time of saving state."""
    return record.seconds - record.spans.get("checkpoint", 0.0) + (record.after or {}).get("evaluation", 0.0)


class EffectiveTime:
    """Sum of the seconds of a start's steps, without retrained ones. `step`: the last step before the start."""

    def __init__(self, step: int) -> None:
        self._first, self._seconds = step, array("d")

    def take(self, record: StepRecord) -> None:
        """Count a step. If the step was counted before, that count and all later ones are removed first."""
        del self._seconds[max(0, record.step - 1 - self._first) :]
        self._seconds.append(productive_seconds(record))

    @property
    def seconds(self) -> float:
        """Seconds of the steps that count."""
        return sum(self._seconds)


def earlier_starts(attempts: Path, records: Path, began_at: float, step: int) -> tuple[float | None, float]:
    """Return when a call's first start began to train, and the seconds of earlier steps that are still in the result.

    Args:
        began_at: start of the call, in seconds since the epoch.
        step: the step that this start continues from.

    Returns: the instant in seconds since the epoch, or None if no start recorded one; and the seconds.
    """
    first = [one.began_at for one in _read(attempts) if one.started_at >= began_at - _ROUNDED_SECONDS]
    seconds = 0.0
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        of_call = (record for record in read_steps(records) if (record.at or 0.0) >= began_at and record.step <= step)
        seconds = sum(productive_seconds(record) for record in of_call)
    return min(first, default=None), seconds


def call_began_at(request: RunRequest) -> float:
    """Return when the call of a request began, in seconds since the epoch.

    An engine restarts a run with a new command that does not know the first one's start. The recorded attempts are
    searched back to the call's first start, by their restart numbers. An attempt that ended normally ends the search.
    """
    began_at, restarts = request.started_at, request.restarts
    if request.lost_at is not None or restarts == 0:  # shoal's own launcher passes the start of the call on
        return began_at
    earlier = [
        one for one in _read(RunDirectory(request.where.out).attempts) if one.started_at < began_at - _ROUNDED_SECONDS
    ]
    for one in reversed(earlier):
        if one.restarts >= restarts or one.status in ("completed", "preempted"):
            break
        began_at, restarts = one.started_at, one.restarts
    return began_at


def _read(attempts: Path) -> tuple[Attempt, ...]:
    """Read the attempts in a file. Unreadable lines are skipped."""
    lines = []
    with contextlib.suppress(OSError), attempts.open(encoding="utf-8") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                lines.append(json.loads(line))
    return attempts_of(lines)
