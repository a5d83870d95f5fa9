"""Recovery of a run after the loss of a rank: the decision to restart all ranks, the pause before, and the record."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.errors import ExitCode, PeerError, RankLostError, ShoalError
from shoal.launch.signals import Signals
from shoal.runs.directory import RunDirectory, read_json
from shoal.runs.events import Events, instant

# Default number of restarts in a row without a newly trained step.
MOST = 5
_LONGEST_PAUSE_SECONDS = 60.0
_FROM_OUTSIDE = ("SIGKILL", "SIGTERM", "SIGSTOP", "does not answer")
_DIGITS = re.compile(r"[\d.]+")  # seconds, in sentences that are otherwise identical


@dataclass(frozen=True)
class Loss:
    """Loss of a rank or host: its number or name if known, the cause, and the last recorded and last saved steps."""

    rank: int | str | None
    how: str
    reached: int
    saved: int


@dataclass
class RestartBudget:
    """Decision after each loss: restart all ranks at most `most` times in a row without a new step or checkpoint.

    If the same rank is lost twice in the same way after the same step, the cause is the job: there is no third try.
    Signals from outside are an exception, since two may arrive at the same step.
    """

    most: int
    count: int = 0
    in_vain: int = 0  # in a row
    _furthest: int = -1
    _saved: int = -1
    _before: tuple[Any, ...] | None = None

    def refusal(self, loss: Loss) -> str | None:
        """Return why the ranks are not restarted after `loss`. Return None, and count a restart, if they are."""
        same = (loss.rank, _DIGITS.sub("", loss.how), loss.reached)
        is_new = loss.reached > self._furthest or loss.saved > self._saved
        self.in_vain = 0 if is_new else self.in_vain + 1
        self._furthest, self._saved = max(self._furthest, loss.reached), loss.saved
        outside = any(name in loss.how for name in _FROM_OUTSIDE)
        again, self._before = same == self._before and not outside, same
        if again:
            return f"it was lost twice in the same way, both times after step {loss.reached}"
        if self.in_vain >= self.most:
            return f"{self.in_vain} starts in a row got no further than step {self._furthest}"
        self.count += 1
        return None

    @property
    def pause_seconds(self) -> float:
        """The seconds to wait before the next restart."""
        return min(_LONGEST_PAUSE_SECONDS, 2.0 ** (self.in_vain - 1)) if self.in_vain else 0.0


@dataclass
class Recovery:
    """Restarts of one call of `shoal run`, recorded in the events."""

    most: int
    directory: RunDirectory
    clock: Callable[[], float] = time.time
    budget: RestartBudget = field(init=False)
    events: Events = field(init=False)

    def __post_init__(self) -> None:
        self.budget = RestartBudget(self.most)
        self.events, self._began = Events(self.directory.events), self.clock()

    @property
    def count(self) -> int:
        """The number of restarts of the ranks."""
        return self.budget.count

    def pause(self, error: ShoalError | None, noticed_at: float) -> float | None:
        """Return the seconds to wait before the ranks are restarted. None if they are not; `error` then says why."""
        if self.most == 0 or not isinstance(error, RankLostError | PeerError):
            return None
        reached, newest = last_step(self.directory.records), self._newest()
        reason = self.budget.refusal(
            Loss(error.rank if error.rank is not None else error.host, error.conflict.split("\n")[0], reached, newest)
        )
        done = "the run ended: " + reason if reason else f"all ranks start again from step {newest}"
        self.events.add("lost", error, at=instant(noticed_at), after_step=reached, done=done, noticed=_noticed(error))
        if reason is not None:
            cause, newline, last_words = error.conflict.partition("\n")
            error.conflict = f"{cause}; {reason}{newline}{last_words}"
            return None
        return self.budget.pause_seconds

    def until_done(
        self, signals: Signals, once: Callable[[int, float], tuple[int, ShoalError | None, float]]
    ) -> tuple[int, ShoalError | None]:
        """Restart the ranks until none is lost. After a signal no restart follows.

        Args:
            signals: the signals that arrive during the run.
            once: starts all ranks and waits for them, given the number of restarts and the time at which the last loss
                was noticed (seconds since the epoch). It returns the exit code, the error, and the time of the error.

        Returns:
            The exit code and the root error of the last start.

        Raises:
            FencedError: another process has resumed the run.
        """
        noticed_at = 0.0
        while True:
            self._began = self.clock()
            code, error, noticed_at = once(self.count, noticed_at)
            if error is not None:
                self.events.fence.check()
            pause = self.pause(error, noticed_at) if not signals.received else None
            if error is None or pause is None:
                return code, error
            print(f"note: {self.told(error, pause)}", file=sys.stderr)
            if signals.wait(pause):
                return int(ExitCode.PREEMPTED), None

    def told(self, error: ShoalError, pause_seconds: float) -> str:
        """Return a line about the loss and the restart, followed by the stacks of the lost rank."""
        where = f"rank {error.rank} on {error.host}" if error.rank is not None else "a rank"
        if error.rank is None and error.host:
            where = f"host {error.host}"
        wait = f" in {pause_seconds:.0f} s" if pause_seconds else ""
        what, newline, shown = error.conflict.partition("\n")
        return f"{where} was lost: {what}; all ranks start again{wait}, from step {self._newest()}{newline}{shown}"

    def unsaved_seconds(self) -> float:
        """Return the seconds since the newest checkpoint or the current start of the ranks, whichever is later."""
        saved = 0.0
        with contextlib.suppress(OSError):
            saved = self.directory.saved.stat().st_mtime
        return max(0.0, self.clock() - max(saved, self._began))

    def _newest(self) -> int:
        return int((read_json(self.directory.saved) or {}).get("step", 0))


def _noticed(error: ShoalError) -> str:
    """Return the sign by which a loss was noticed."""
    if isinstance(error, PeerError):
        return "an error of the ranks' collectives"
    said = error.conflict.split("\n")[0]
    ways = {"was stopped (": "its state", "has been in ": "its heartbeat"}
    return next((way for words, way in ways.items() if words in said), "the end of its process")


def last_step(records: Path) -> int:
    """Return the step of the last complete record; 0 if there is none."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError), records.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - (1 << 16)))
        for line in reversed(file.read().splitlines(keepends=True)):
            if line.endswith(b"\n"):
                return int(json.loads(line)["step"])
    return 0
