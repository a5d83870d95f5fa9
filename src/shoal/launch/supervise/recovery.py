"""Verdict on a run whose ranks have ended, by the same rules on every engine; and its recovery after a loss.

Recovery is the decision to restart all ranks, the pause before, and the record.
"""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.errors import ExitCode, LaunchError, PeerError, RankLostError, ShoalError, from_json, say_note
from shoal.launch.signals import Signals
from shoal.launch.supervise.child import rank_lost
from shoal.runs.attempts import Events, instant
from shoal.runs.directory import RunDirectory, read_json
from shoal.runs.records import last_records

_LONGEST_PAUSE_SECONDS = 60.0
_FROM_OUTSIDE = ("SIGKILL", "SIGTERM", "SIGSTOP", "was frozen", "does not answer", "does not reach", "did not come")
_DIGITS = re.compile(r"[\d.]+")  # seconds, in sentences that are otherwise identical


@dataclass(frozen=True)
class EndedRank:
    """Rank whose process has ended, from its launcher's point of view.

    `report`: its report, or None if it ended without one.
    `loss`: describes its loss, from the stacks of the ranks that noticed the loss, by rank.
    `code`: exit code of the process, negative for a signal; None if unknown.
    `given_up`: True if the launcher ended it after another rank had failed.
    """

    report: dict[str, Any] | None
    loss: Callable[[Mapping[int, str]], RankLostError]
    code: int | None = None
    given_up: bool = False


def verdict(ranks: Sequence[EndedRank], signals: Signals, *, elsewhere: bool = True) -> tuple[int, ShoalError | None]:
    """Return the exit code of all ranks and the root error. `elsewhere`: other hosts may have ranks, unknown here."""
    lost = sorted((rank for rank in ranks if rank.report is None), key=lambda rank: rank.given_up)
    if signals.twice and lost:
        return int(ExitCode.INTERRUPTED), None
    reports = [rank.report for rank in ranks if rank.report]
    errors = [report["error"] for report in reports if report.get("error")]
    roots = [report for report in reports if report.get("error") and report["error"]["kind"] != "PeerError"]
    if roots:
        return int(roots[0]["exit_code"]), from_json(roots[0]["error"])
    if signals.received and any(rank.code == -signal.SIGTERM for rank in lost):
        return int(ExitCode.INTERRUPTED), None  # the signal came before the rank could handle it: nothing had begun
    if lost:
        stacks = {int(error["rank"]): error.get("traceback") or "" for error in errors if error.get("rank") is not None}
        return int(ExitCode.RANK_LOST), lost[0].loss(stacks)
    if errors:
        return int(ExitCode.RANK_LOST if elsewhere else ExitCode.FAILED), from_json(errors[0])
    return max((int(report["exit_code"]) for report in reports), default=0), None


@dataclass
class Recovery:
    """Restarts of one call of `shoal run`, recorded in the events.

    All ranks are restarted at most `most` times in a row without a new step or checkpoint. If the same rank is lost
    twice in the same way after the same step, the cause is the job: there is no third try. Signals from outside are an
    exception, since two may arrive at the same step.
    """

    most: int
    directory: RunDirectory
    clock: Callable[[], float] = time.monotonic
    count: int = 0  # restarts of the ranks
    events: Events = field(init=False)
    _in_vain: int = 0  # restarts in a row
    _furthest: int = -1
    _saved: int = -1
    _saved_file: int = 0  # the time of the newest checkpoint's file, by the clock of the file system
    _before: tuple[Any, ...] | None = None

    def __post_init__(self) -> None:
        self.events, self._saved_at = Events(self.directory.events), self.clock()

    def pause(self, error: ShoalError | None, noticed_at: float) -> float | None:
        """Return the seconds to wait before the ranks are restarted. None if they are not; `error` then says why."""
        if self.most == 0 or not isinstance(error, RankLostError | PeerError):
            return None
        reached, newest = last_step(self.directory.records), self._newest()
        cause, newline, last_words = error.conflict.partition("\n")
        reason = self._refusal(error.rank if error.rank is not None else error.host, cause, reached, newest)
        if isinstance(error, PeerError):
            noticed = "an error of the ranks' collectives"
        else:
            signs = {"was stopped (": "its state", "was frozen (": "its cgroup", "has been in ": "its heartbeat"}
            signs["no sign of life"] = "its launcher's heartbeat"
            noticed = next((sign for words, sign in signs.items() if words in cause), "the end of its process")
        done = "the run ended: " + reason if reason else f"all ranks start again from step {newest}"
        self.events.add(
            "lost",
            error,
            at=instant(time.time() - self.clock() + noticed_at),
            after_step=reached,
            done=done,
            noticed=noticed,
        )
        if reason is not None:
            error.conflict = f"{cause}; {reason}{newline}{last_words}"
            return None
        return min(_LONGEST_PAUSE_SECONDS, 2.0 ** (self._in_vain - 1)) if self._in_vain else 0.0

    def _refusal(self, rank: int | str | None, cause: str, reached: int, saved: int) -> str | None:
        """Return why the ranks are not restarted. Return None, and count a restart, if they are."""
        loss = (rank, _DIGITS.sub("", cause), reached)
        is_new = reached > self._furthest or saved > self._saved
        self._in_vain = 0 if is_new else self._in_vain + 1
        self._furthest, self._saved = max(self._furthest, reached), saved
        again = loss == self._before and not any(name in cause for name in _FROM_OUTSIDE)
        self._before = loss
        if again:
            return f"it was lost twice in the same way, both times after step {reached}"
        if self._in_vain >= self.most:
            return f"{self._in_vain} starts in a row got no further than step {self._furthest}"
        self.count += 1
        return None

    def until_done(
        self, signals: Signals, once: Callable[[int, float], tuple[int, ShoalError | None, float]]
    ) -> tuple[int, ShoalError | None]:
        """Restart the ranks until none is lost, and return the last exit code and root error. A signal ends that.

        `once`: starts all ranks and waits for them, given the number of restarts and the time at which the last loss
            was noticed, by `time.monotonic`. It returns the exit code, the error, and the time of the error.
        Raises: FencedError if another process has resumed the run.
        """
        noticed_at = 0.0
        while True:
            self.unsaved_seconds()  # a checkpoint from before this start
            self._saved_at = self.clock()
            code, error, noticed_at = once(self.count, noticed_at)
            if self.count and isinstance(error, LaunchError):  # the ranks have met before: a loss like any other
                place, code = error.host or "", int(ExitCode.RANK_LOST)
                error = rank_lost(error.given, error.conflict, host=place, rank=error.rank, remedy=error.remedy)
            if error is not None:
                self.events.fence.check()
            pause = self.pause(error, noticed_at) if not signals.received else None
            if error is None or pause is None:
                return code, error
            say_note(self.described(error, pause))
            if signals.wait(pause):
                return int(ExitCode.PREEMPTED), None

    def described(self, error: ShoalError, pause_seconds: float) -> str:
        """Return a line about the loss and the restart, followed by the stacks of the lost rank."""
        where = f"rank {error.rank} on {error.host}" if error.rank is not None else "a rank"
        if error.rank is None and error.host:
            where = f"host {error.host}"
        wait = f" in {pause_seconds:.0f} s" if pause_seconds else ""
        what, newline, shown = error.conflict.partition("\n")
        return f"{where} was lost: {what}; all ranks start again{wait}, from step {self._newest()}{newline}{shown}"

    def unsaved_seconds(self) -> float:
        """Return the seconds since the newest checkpoint or the current start of the ranks, whichever is later.

        A checkpoint counts from the first call that sees its file: file systems have clocks of their own.
        """
        with contextlib.suppress(OSError):
            saved = self.directory.saved.stat().st_mtime_ns
            if saved != self._saved_file:
                self._saved_file, self._saved_at = saved, self.clock()
        return self.clock() - self._saved_at

    def _newest(self) -> int:
        return int((read_json(self.directory.saved) or {}).get("step", 0))


def last_step(records: Path) -> int:
    """Return the step of the last complete record that counts; 0 if there is none."""
    with contextlib.suppress(OSError):
        return max((record.step for record in last_records(records)), default=0)
    return 0
