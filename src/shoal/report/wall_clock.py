"""Wall clock of a run, divided into parts that sum to it: start-up, spans of steps, evaluation, idle time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal.runs.attempts import Attempt, Undone
from shoal.runs.records import SPANS, StepRecord
from shoal.runs.run_files import RunFiles

# Parts in the order of display, with their descriptions.
PARTS: dict[str, str] = {
    "start_up": "from the command, or from the loss of a rank, to the first step",
    "data_wait": "of steps: waiting for samples",
    "host_to_device": "of steps: copying samples to the device",
    "forward": "of steps: the model and the loss",
    "backward": "of steps: the gradients",
    "exposed_communication": "of steps: waiting for sums and for other ranks",
    "optimizer": "of steps: the update",
    "other": "of steps: all else that the host does",
    "evaluation": "on the evaluation data",
    "checkpoint": "while training waits for it, within steps or after them",
    "between_steps": "callbacks, records, and the step in flight",
    "trained_again": "steps whose result was lost with a rank, or was taken back",
    "lost": "from the last record to the notice that a rank was lost",
    "idle": "between one call of the run and the next",
    "shut_down": "hashing the weights, writing the result",
    "not_recorded": "of a call without telemetry, or of an older version",
}

_SPANS = frozenset(SPANS) - {"other"}


@dataclass(frozen=True)
class WallPart:
    """Part of the wall clock: its seconds on rank 0, and its share of the whole."""

    name: str
    seconds: float
    share: float
    meaning: str


@dataclass(frozen=True)
class WallClock:
    """Wall clock of a run from its first command to its end or its last recorded instant. Instants are since the epoch.

    `seconds`: by the clock; the parts are measured separately. `busy_seconds`: without idle time.
    """

    seconds: float
    parts: tuple[WallPart, ...]
    began_at: float | None = None
    until: float | None = None
    first_start_up: float = 0.0  # sum over calls of their first start-up

    @property
    def busy_seconds(self) -> float:
        """Seconds for which the run had its devices."""
        return self.seconds - self.of("idle")

    @property
    def ettr(self) -> float | None:
        """Effective training time ratio: time of steps in the result and of evaluations, over the training time.

        The training time excludes idle time, the first start-up and the shut-down. None if no steps are known.
        """
        whole = self.busy_seconds - self.first_start_up - self.of("shut_down")
        productive = self.of(*_SPANS - {"checkpoint"}, "other", "evaluation")
        return min(1.0, productive / whole) if whole > 0.0 and productive > 0.0 else None

    def of(self, *names: str) -> float:
        """Return the seconds of parts."""
        return sum(part.seconds for part in self.parts if part.name in names)


def wall_clock(files: RunFiles) -> WallClock:
    """Return the wall clock of a run; without recorded attempts, as far as the result has it."""
    if not files.attempts:
        return _without_attempts(files)
    sums = _Sums()
    attempts, undone = files.attempts, [u for attempt in files.attempts for u in attempt.undone]
    dated = sorted((r for r in files.records if r.at is not None), key=lambda r: r.at or 0.0)
    instants = [record.at or 0.0 for record in dated]
    starts = [attempt.started_at for attempt in attempts]
    unknown = sums.steps(r for r in files.records if r.at is None)  # from versions that recorded no instants
    at, first, called = starts[0], starts[0], 0.0
    for number, attempt in enumerate(attempts):
        following = attempts[number + 1] if number + 1 < len(attempts) else None
        low = bisect_left(instants, starts[number]) if number else 0
        high = bisect_left(instants, following.started_at) if following else len(dated)
        begin, until = starts[number] if number else 0.0, following.started_at if following else float("inf")
        lost = [u for u in undone if u.last_at is not None and begin <= u.last_at < until]
        begins = max(at, attempt.started_at)
        if number:
            sums.add("idle", begins - at)
        piece = _AttemptTime(attempt, following, dated[low:high], lost, files.read_at if files.is_held else None)
        called += max(0.0, piece.first() - begins) if not attempt.restarts else 0.0
        at = piece.add_to(sums, begins)
    return replace(sums.whole(at - first + unknown, first, at), first_start_up=called)


class _Sums:
    """Seconds by part of the wall clock."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] += max(0.0, seconds)

    def steps(self, records: Iterable[StepRecord]) -> float:
        """Add the spans of steps, and the evaluation and checkpoint after each; return the seconds of all together."""
        total = 0.0
        for record in records:
            known = 0.0
            for name, seconds in record.spans.items():
                if name in _SPANS:
                    self.seconds[name] += seconds
                    known += seconds
            self.add("other", record.seconds - known)
            total += record.seconds
            if record.after:
                total += self.after(record.after)
        return total

    def after(self, seconds: Mapping[str, float] | None) -> float:
        """Add the events after a step; return their seconds."""
        total = 0.0
        for name in ("evaluation", "checkpoint"):
            self.add(name, (seconds or {}).get(name, 0.0))
            total += (seconds or {}).get(name, 0.0)
        return total

    def whole(self, seconds: float, began_at: float | None, until: float | None) -> WallClock:
        seconds = max(seconds, 0.0)
        parts = tuple(
            WallPart(name, value, value / seconds if seconds else 0.0, PARTS[name])
            for name, value in self.seconds.items()
        )
        return WallClock(seconds, parts, began_at, until)


@dataclass(frozen=True)
class _AttemptTime:
    """One attempt with its records; `now` is set if a process trains."""

    attempt: Attempt
    following: Attempt | None
    records: Sequence[StepRecord]
    undone: Sequence[Undone]
    now: float | None

    def add_to(self, sums: _Sums, begins: float) -> float:
        """Add the attempt's parts and return the instant of its end."""
        attempt, first = self.attempt, self.first()
        signs = [r.at + sum((r.after or {}).values()) for r in self.records[-1:] if r.at is not None]
        signs += [u.last_at for u in self.undone if u.last_at is not None]
        end = last_sign = max([attempt.began_at, *signs])
        lost = 0.0
        if attempt.ended_at is not None:
            end = max(last_sign, attempt.ended_at)
        elif self.following is not None and self.following.restarts:  # a rank was lost
            end = max(last_sign, self.following.started_at)
            lost = end - last_sign
        elif self.following is None and self.now is not None:
            end = max(last_sign, self.now)
        sums.add("start_up", first - begins)
        known = sums.steps(self.records) + sums.after(attempt.after) + lost
        sums.add("lost", lost)
        again = sum(u.seconds + sum(u.after.values()) for u in self.undone)
        sums.add("trained_again", again)
        trained = min(end, attempt.trained_at) if attempt.trained_at is not None else end
        sums.add("shut_down", end - trained)
        rest = trained - first - known - again
        sums.add("between_steps" if self.records or self.undone else "not_recorded", rest)
        return end

    def first(self) -> float:
        """Return the instant at which the first step started."""
        begins = [r.began_at for r in self.records[:1] if r.began_at is not None]
        begins += [u.first_at for u in self.undone if u.first_at is not None]
        return max(self.attempt.began_at, min(begins)) if begins else self.attempt.began_at


def _without_attempts(files: RunFiles) -> WallClock:
    """Return the wall clock from `result.json` and the records; earlier calls only contribute their steps."""
    sums, result = _Sums(), files.result
    resumed = result.get("resumed_from") or 0
    before = sums.steps(r for r in files.records if r.step <= resumed)
    own = [r for r in files.records if r.step > resumed]
    steps = sums.steps(own)
    whole = max(_number(result.get("wall_seconds")), steps)
    start = _number(result.get("first_step_seconds")) - (own[0].seconds if own else 0.0)
    start = min(max(0.0, start), whole - steps)
    sums.add("start_up", start)
    sums.add("not_recorded", whole - steps - start)
    return sums.whole(whole + before, None, None)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
