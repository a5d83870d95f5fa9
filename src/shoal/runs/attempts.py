"""Attempts and incidents of a run: `attempts.jsonl`, `events.jsonl`, and the effective time that follows from them.

Each call, and each restart after lost ranks, has a few lines in `attempts.jsonl`. Records of retrained steps replace
earlier ones, so this file accounts for the time of the replaced ones.
"""

from __future__ import annotations

import contextlib
import json
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shoal.bounded_files import objects_of
from shoal.errors import ShoalError
from shoal.runs.directory import Fence, RunDirectory
from shoal.runs.records import StepRecord, read_steps
from shoal.runs.request import RunRequest
from shoal.runs.sound_values import Amount, Ranks, Seconds, Steps, adapter


class Events:
    """Writer of an event log. It writes nothing without a path, and ignores write errors.

    `fence`: generation of the writer. `add` raises FencedError if a later generation has started.
    """

    def __init__(self, path: Path | None, fence: Fence | None = None) -> None:
        self._path, self.fence = path, fence or Fence()

    def add(self, kind: str, error: ShoalError | None = None, **more: Any) -> None:
        """Append an event, with rank, host and cause if `error` has them.

        `more`: for an incident, the known ones of `step`, `what`, `noticed` (how), `done`, and the cost in `seconds`.
        """
        if self._path is None:
            return
        event: dict[str, Any] = {"at": instant(time.time()), "kind": kind, "generation": self.fence.generation}
        if error is not None:
            event |= {"rank": error.rank, "host": error.host, "who": error.given, "what": error.conflict}
        with contextlib.suppress(OSError):
            self.fence.append(self._path, json.dumps({**event, **more}))


def mtbf_seconds(path: Path, since: float, now: float) -> float | None:
    """Return the mean time between losses of ranks in an event log since an instant, or None without losses."""
    losses = 0
    for event in objects_of(path):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            losses += event["kind"] == "lost" and datetime.fromisoformat(event["at"]).timestamp() >= since
    return (now - since) / losses if losses else None


def instant(seconds: float) -> str:
    """Format an instant, in seconds since the epoch, as ISO 8601 in UTC with milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


@dataclass
class StartUp:
    """Phases of a start-up: seconds by name. Each phase begins where the previous one ended, the first at `since`."""

    since: float
    seconds: dict[str, float] = field(default_factory=dict)
    clock: Callable[[], float] = time.time

    def ends(self, phase: str) -> None:
        """Record that a phase ends now."""
        now = self.clock()
        self.seconds[phase] = round(max(0.0, now - self.since), 4)
        self.since = now


class AttemptLog:
    """Writer of `attempts.jsonl` on rank 0. It does nothing without a path, and ignores write errors."""

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time, fence: Fence | None = None) -> None:
        self._path, self._clock, self._fence = path, clock, fence or Fence()

    def began(self, started_at: float, phases: dict[str, float], **about: Any) -> None:
        """Record that training starts. `started_at`: start of the command, or the time when ranks were lost."""
        self._add("began", {"started_at": round(started_at, 3), "phases": phases, **about})

    def undone(self, records: Sequence[StepRecord]) -> None:
        """Record the steps that are about to be trained again."""
        if records:
            self._add("undone", Undone.of(records).__dict__)

    def ended(self, status: str, step: int, trained_at: float, after: dict[str, float], **more: Any) -> None:
        """Record the end of training. `trained_at`: end of the last step and of the work that followed the step."""
        entry = {"status": status, "step": step, "trained_at": round(trained_at, 3), "after": after}
        self._add("ended", {**entry, **more})

    def _add(self, kind: str, more: dict[str, Any]) -> None:
        if self._path is None:
            return
        line = {"kind": kind, "at": round(self._clock(), 3), "generation": self._fence.generation, **more}
        with contextlib.suppress(OSError):
            self._fence.append(self._path, json.dumps(line))


@dataclass(frozen=True)
class Undone:
    """Steps whose records were replaced: their number, and the sums of their seconds, spans and `after` times."""

    from_step: Steps
    steps: Steps
    samples: Amount
    seconds: Seconds
    spans: dict[str, float]
    after: dict[str, float]
    first_at: float | None = None  # start of the first step, in seconds since the epoch
    last_at: float | None = None  # end of the last step and of the work after it

    @classmethod
    def of(cls, records: Sequence[StepRecord]) -> Undone:
        """Sum up records, of which there must be at least one."""
        first, last = records[0], records[-1]
        return cls(
            from_step=first.first,
            steps=sum(record.steps for record in records),
            samples=sum(record.num_samples for record in records),
            seconds=sum(record.seconds for record in records),
            spans=summed(record.spans for record in records),
            after=summed(record.after or {} for record in records),
            first_at=first.began_at,
            last_at=last.at + sum((last.after or {}).values()) if last.at is not None else None,
        )


@dataclass(frozen=True)
class Attempt:
    """One start of a run's ranks. Instants are in seconds since the epoch.

    `ended_at` is None if no end was recorded.
    """

    started_at: Seconds
    began_at: Seconds
    phases: dict[str, Seconds] = field(default_factory=dict)
    resumed_from: Steps | None = None
    restarts: Amount = 0
    num_steps: Steps | None = None
    world_size: Ranks = 1
    host: str = ""
    device: str = ""
    threads: Ranks | None = None  # number in each process
    cores: Ranks | None = None  # number on rank 0's host
    evaluate_every: Steps | None = None
    checkpoint_every: Steps | None = None
    undone: tuple[Undone, ...] = ()
    ended_at: Seconds | None = None
    trained_at: Seconds | None = None
    status: str | None = None
    step: Steps | None = None  # last step, if the attempt ended
    after: dict[str, float] = field(default_factory=dict)
    checkpoint_cpu: float | None = None  # mean CPU seconds of the writer thread per checkpoint


def summed(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return the sums by name."""
    sums: dict[str, float] = {}
    for part in parts:
        for name, seconds in part.items():
            sums[name] = sums.get(name, 0.0) + seconds
    return sums


def attempts_of(lines: Iterable[dict[str, Any]]) -> tuple[Attempt, ...]:
    """Parse the lines of an `attempts.jsonl`. Incomplete lines are skipped."""
    entries: list[dict[str, Any]] = []
    for line in lines:
        kind = line.get("kind")
        with contextlib.suppress(KeyError, TypeError, ValueError):
            if kind == "began":
                entries.append({"began_at": float(line["at"]), **line, "undone": ()})
            elif entries and kind == "undone":
                entries[-1]["undone"] += (adapter(Undone).validate_python(line),)
            elif entries and kind == "ended":
                end = {key: line.get(key) for key in ("status", "step", "trained_at", "checkpoint_cpu")}
                entries[-1] |= {**end, "ended_at": float(line["at"]), "after": line.get("after") or {}}
    attempts: list[Attempt] = []
    for entry in entries:
        with contextlib.suppress(ValueError):
            attempts.append(adapter(Attempt).validate_python(entry))
    return tuple(sorted(attempts, key=lambda attempt: attempt.started_at))


# Tolerance: two writers round the start of a call.
_ROUNDED_SECONDS = 0.01


def productive_seconds(record: StepRecord) -> float:
    """Return the seconds of a step and the evaluation after it, without the time of saving state."""
    return record.seconds - record.spans.get("checkpoint", 0.0) + (record.after or {}).get("evaluation", 0.0)


_MOST_STEPS = 1 << 16


class EffectiveTime:
    """Sum of the seconds of a start's steps, without retrained ones. `step`: the last step before the start.

    Only the seconds of the last 65,536 steps are stored separately. A return to an earlier step is estimated by the
    mean of the steps before.
    """

    def __init__(self, step: int) -> None:
        self._start = self._first = step
        self._before, self._seconds = 0.0, array("d")

    def take(self, record: StepRecord) -> None:
        """Count a step. If the step was counted before, that count and all later ones are removed first."""
        last = record.step - 1
        if last < self._first:
            self._before *= max(0, last - self._start) / max(1, self._first - self._start)
            self._first = max(last, self._start)
        del self._seconds[max(0, last - self._first) :]
        self._seconds.append(productive_seconds(record))
        if len(self._seconds) == 2 * _MOST_STEPS:
            self._before += sum(self._seconds[:_MOST_STEPS])
            self._first += _MOST_STEPS
            del self._seconds[:_MOST_STEPS]

    @property
    def seconds(self) -> float:
        """Seconds of the steps that count."""
        return self._before + sum(self._seconds)


def earlier_starts(attempts: Path, records: Path, began_at: float, step: int) -> tuple[float | None, float]:
    """Return when a call's first start began to train, and the seconds of earlier steps that are still in the result.

    Args:
        began_at: start of the call, in seconds since the epoch.
        step: the step that this start continues from.

    Returns: the instant in seconds since the epoch, or None if no start recorded one; and the seconds.
    """
    first = [one.began_at for one in read_attempts(attempts) if one.started_at >= began_at - _ROUNDED_SECONDS]
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
        one
        for one in read_attempts(RunDirectory(request.where.out).attempts)
        if one.started_at < began_at - _ROUNDED_SECONDS
    ]
    for one in reversed(earlier):
        if one.restarts >= restarts or one.status in ("completed", "preempted"):
            break
        began_at, restarts = one.started_at, one.restarts
    return began_at


def read_attempts(path: Path) -> tuple[Attempt, ...]:
    """Return the attempts in a file, without damaged lines."""
    return attempts_of(objects_of(path))


def run_status(*, is_held: bool, attempts: Sequence[Attempt], result: Mapping[str, Any]) -> str:
    """Return running, killed, or the status in the result, which is of an earlier attempt if the last has no end."""
    if is_held:
        return "running"
    return "killed" if attempts and attempts[-1].ended_at is None else str(result.get("status") or "killed")
