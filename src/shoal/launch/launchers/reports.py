"""Reports of ranks that an engine has started, by which their launcher knows how a run ended; and its new starts."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import RankLostError, ShoalError, StorageError
from shoal.launch.environment import REPORT_FILE, RESTARTS
from shoal.launch.launchers.base import Submission
from shoal.launch.recovery import Recovery
from shoal.launch.signals import Signals
from shoal.runs.address import RunAddress, is_address
from shoal.runs.directory import RunDirectory, read_json

_TRIES, _PAUSE_SECONDS = 3, 2.0
_RANK = "%r"  # in the report's path: each rank puts its number there


@dataclass(frozen=True)
class RankStart:
    """One start of all ranks of a run: `number` counts from 0, `reports` is a folder or address for all hosts."""

    submission: Submission
    number: int
    reports: str

    def variables(self) -> dict[str, str]:
        """Variables that every rank is started with."""
        found = {REPORT_FILE: f"{self.reports}/{_name(_RANK)}"}
        return found | ({RESTARTS: str(self.number)} if self.number else {})

    def ends(self, host: str) -> list[ReportedRank]:
        """How the ranks ended, by their own reports. `host`: where those without one were lost, as far as is known."""
        size = self.submission.num_processes
        reports = [self._read(_name(str(rank))) for rank in range(size)]
        lost = tuple(rank for rank, report in enumerate(reports) if report is None)
        return [ReportedRank(report, lost, size, host) for report in reports]

    def _read(self, name: str) -> dict[str, Any] | None:
        """A report; None where there is none. Raises: StorageError where an address does not answer, three times."""
        if not is_address(self.reports):
            return read_json(Path(self.reports, name))
        at = RunAddress(self.reports)
        for _ in range(_TRIES - 1):
            with contextlib.suppress(OSError):
                return at.read_json(name)
            time.sleep(_PAUSE_SECONDS)
        try:
            return at.read_json(name)
        except OSError as error:
            raise StorageError(
                given=f"{self.reports}/{name}",
                conflict=f"how the ranks ended cannot be read there: {error}",
                remedy="look at the run's records there; --resume goes on from its newest checkpoint",
            ) from error


@dataclass(frozen=True)
class ReportedRank:
    """End of a rank of which there is only its report; `lost`: all ranks of the run that have none."""

    report: dict[str, Any] | None
    lost: tuple[int, ...]
    size: int
    host: str
    code: int | None = None
    given_up: bool = False

    def how_it_ended(self) -> dict[str, Any] | None:
        """Its report."""
        return self.report

    def error(self, _: Mapping[int, str]) -> RankLostError:
        """The loss of all that are lost."""
        names = ", ".join(map(str, self.lost[:16]))
        error = RankLostError(
            given=f"rank {names} of {self.size}",
            conflict="it ended without a word",
            remedy="--resume goes on from the newest checkpoint; look at the engine's own log and the host's memory",
        )
        error.rank, error.host = self.lost[0], self.host
        return error


def until_done(
    submission: Submission, signals: Signals, once: Callable[[RankStart], tuple[int, ShoalError | None]]
) -> int:
    """Starts all ranks by `once`, again where one was lost, as on one host; prints the error, and gives its code."""

    def start(number: int) -> tuple[int, ShoalError | None]:
        with _folder(submission) as folder:
            return once(RankStart(submission, number, folder))

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


def _name(rank: str) -> str:
    return f"rank-{rank}.json"


@contextlib.contextmanager
def _folder(submission: Submission) -> Iterator[str]:
    """A place for reports in the run directory, for a context: beside the ranks' files, which every host reaches."""
    if submission.address is not None:
        at = f"{submission.address.rstrip('/')}/.reports-{uuid.uuid4().hex[:8]}"
        try:
            yield at
        finally:
            for rank in range(submission.num_processes):
                RunAddress(at).remove(_name(str(rank)))
        return
    submission.out.mkdir(parents=True, exist_ok=True)
    path = tempfile.mkdtemp(prefix=".reports-", dir=submission.out)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
