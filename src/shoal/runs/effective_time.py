"""Effective training time ratio (ETTR) of a call: the share of its time that brought steps which are in the result.

Kokolis et al., Revisiting Reliability in Large-Scale Machine Learning Research Clusters, 2024.
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

# Two writers round the instant at which a call began.
_ROUNDED_SECONDS = 0.01


def productive_seconds(record: StepRecord) -> float:
    """The seconds of a step and of an evaluation after it; to save the state is no part of the training."""
    return record.seconds - record.spans.get("checkpoint", 0.0) + (record.after or {}).get("evaluation", 0.0)


class EffectiveTime:
    """Sum of the seconds of a start's steps, without those that were trained again; `step`: the last one before it."""

    def __init__(self, step: int) -> None:
        self._first, self._seconds = step, array("d")

    def take(self, record: StepRecord) -> None:
        """Counts a step; one that was counted already, and those after it, were undone."""
        del self._seconds[max(0, record.step - 1 - self._first) :]
        self._seconds.append(productive_seconds(record))

    @property
    def seconds(self) -> float:
        """Seconds of the steps that count."""
        return sum(self._seconds)


def earlier_starts(attempts: Path, records: Path, began_at: float, step: int) -> tuple[float | None, float]:
    """Of a call's starts before this one: when the first of them began to train, and the seconds of what is left of it.

    `began_at` is the call's own beginning, `step` the one that this start goes on after. Instants in seconds since the
    epoch; None where no start says it.
    """
    first = [one.began_at for one in _read(attempts) if one.started_at >= began_at - _ROUNDED_SECONDS]
    kept = 0.0
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        of_call = (record for record in read_steps(records) if (record.at or 0.0) >= began_at and record.step <= step)
        kept = sum(productive_seconds(record) for record in of_call)
    return min(first, default=None), kept


def call_began_at(request: RunRequest) -> float:
    """When the call began of which a request is a start, in seconds since the epoch.

    An engine's new start is a command of its own that knows no earlier instant: the attempts say it, whose numbers of
    restarts fall back to the first of the call. One that ended in good order ended its call.
    """
    began_at, restarts = request.started_at, request.restarts
    if request.lost_at is not None or restarts == 0:  # shoal's own launcher hands its beginning over
        return began_at
    earlier = [one for one in _read(RunDirectory(request.out).attempts) if one.started_at < began_at - _ROUNDED_SECONDS]
    for one in reversed(earlier):
        if one.restarts >= restarts or one.status in ("completed", "preempted"):
            break
        began_at, restarts = one.started_at, one.restarts
    return began_at


def _read(attempts: Path) -> tuple[Attempt, ...]:
    """The attempts in a file; lines that cannot be read are left out."""
    lines = []
    with contextlib.suppress(OSError), attempts.open(encoding="utf-8") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                lines.append(json.loads(line))
    return attempts_of(lines)
