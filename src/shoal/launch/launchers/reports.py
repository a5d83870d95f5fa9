"""Reports of ranks that an engine has started, by which their launcher knows how a run ended; and its new starts."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import ExitCode, RankLostError, ShoalError, from_json
from shoal.launch.environment import REPORT_FILE, RESTARTS
from shoal.launch.launchers.base import Submission
from shoal.launch.recovery import Recovery
from shoal.launch.signals import Signals
from shoal.runs.address import RunAddress
from shoal.runs.directory import RunDirectory, read_json

_RANK = "%r"  # in the report's path: each rank puts its number there


@dataclass(frozen=True)
class RankStart:
    """One start of all ranks of a run: `number` counts from 0, `reports` is a folder that every host sees."""

    submission: Submission
    number: int
    reports: Path

    def variables(self) -> dict[str, str]:
        """Variables that every rank is started with."""
        found = {REPORT_FILE: str(self.reports / f"rank-{_RANK}.json")}
        return found | ({RESTARTS: str(self.number)} if self.number else {})

    def verdict(self, host: str) -> tuple[int, ShoalError | None]:
        """How it ended, by the ranks' own reports: the exit code, and the error at the root of it.

        `host`: where ranks without a report were lost, as far as it is known.
        """
        size = self.submission.num_processes
        ends = [read_json(self.reports / f"rank-{rank}.json") for rank in range(size)]
        told = [end["error"] for end in ends if end and end.get("error")]
        roots = [error for error in told if error["kind"] != "PeerError"]
        if roots:
            error = from_json(roots[0])
            return int(error.exit_code), error
        lost = [rank for rank, end in enumerate(ends) if end is None]
        if lost:
            return int(ExitCode.RANK_LOST), _lost(lost, size, host)
        if told:
            return int(ExitCode.RANK_LOST), from_json(told[0])
        return max(int(end["exit_code"]) for end in ends if end), None


def _lost(ranks: list[int], size: int, host: str) -> RankLostError:
    names = ", ".join(map(str, ranks[:16]))
    error = RankLostError(
        given=f"rank {names} of {size}",
        conflict="it ended without a word",
        remedy="--resume goes on from the newest checkpoint; look at what the engine says, and at that host's memory",
    )
    error.rank, error.host = ranks[0], host
    return error


def until_done(
    submission: Submission, signals: Signals, once: Callable[[RankStart], tuple[int, ShoalError | None]]
) -> int:
    """Starts all ranks by `once`, again where one was lost, as on one host; prints the error, and gives its code."""

    def start(number: int) -> tuple[int, ShoalError | None]:
        with _folder(submission.out) as folder:
            code, error = once(RankStart(submission, number, folder))
        if signals.twice and isinstance(error, RankLostError):
            return int(ExitCode.INTERRUPTED), None  # as on one host
        return code, error

    return restarted(submission, signals, start)


def restarted(submission: Submission, signals: Signals, once: Callable[[int], tuple[int, ShoalError | None]]) -> int:
    """As `until_done`, of an engine that knows how its ranks end; `once` is given how often they were started."""
    recovery = Recovery(submission.max_restarts, RunDirectory(submission.out))
    address = RunAddress(submission.address) if submission.address is not None else None

    def start(number: int, _: float) -> tuple[int, ShoalError | None, float]:
        if address is not None:
            address.send(submission.out)  # what this launcher has noted, before ranks add to it
        code, error = once(number)
        if address is not None:
            address.fetch(submission.out)
        return code, error, time.time()

    code, error = recovery.until_done(signals, start)
    if error is not None:
        print(error.render(), file=sys.stderr)
    return code


@contextlib.contextmanager
def _folder(out: Path) -> Iterator[Path]:
    out.mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix=".reports-", dir=out))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
