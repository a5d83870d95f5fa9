"""Attempts of a run: each call, and each restart after lost ranks, has a few lines in `attempts.jsonl`.

Retrained steps replace their records, so this file accounts for the time of the replaced ones.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.runs.generation import Fence
from shoal.runs.records import StepRecord
from shoal.runs.sound_values import adapter


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

    from_step: int
    steps: int
    samples: int
    seconds: float
    spans: dict[str, float]
    after: dict[str, float]
    first_at: float | None = None  # start of the first step, in seconds since the epoch
    last_at: float | None = None  # end of the last step and of the work after it

    @classmethod
    def of(cls, records: Sequence[StepRecord]) -> Undone:
        """Sum up records, of which there must be at least one."""
        first, last = records[0], records[-1]
        return cls(
            from_step=first.step,
            steps=len(records),
            samples=sum(record.num_samples for record in records),
            seconds=sum(record.seconds for record in records),
            spans=summed(record.spans for record in records),
            after=summed(record.after or {} for record in records),
            first_at=first.at - first.seconds if first.at is not None else None,
            last_at=last.at + sum((last.after or {}).values()) if last.at is not None else None,
        )


@dataclass(frozen=True)
class Attempt:
    """One start of a run's ranks. Instants are in seconds since the epoch.

    `ended_at` is None if no end was recorded.
    """

    started_at: float
    began_at: float
    phases: dict[str, float] = field(default_factory=dict)
    resumed_from: int | None = None
    restarts: int = 0
    num_steps: int | None = None
    world_size: int = 1
    host: str = ""
    device: str = ""
    threads: int | None = None  # number in each process
    cores: int | None = None  # number on rank 0's host
    evaluate_every: int | None = None
    checkpoint_every: int | None = None
    undone: tuple[Undone, ...] = ()
    ended_at: float | None = None
    trained_at: float | None = None
    status: str | None = None
    step: int | None = None  # last step, if the attempt ended
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
