"""Reports of ranks on an engine, from which the launcher learns how a run ended; and restarts of the run."""

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
from shoal.launch.signals import Signals
from shoal.launch.supervise.child import rank_lost
from shoal.launch.supervise.recovery import EndedRank, Recovery
from shoal.runs.address import RunAddress, is_address
from shoal.runs.directory import RunDirectory, read_json

_TRIES, _PAUSE_SECONDS = 3, 2.0
_REPORT = "rank-{}.json"


@dataclass(frozen=True)
class RankStart:
    """One start of all ranks of a run: `number` counts from 0, `reports` is a folder or address for all hosts."""

    submission: Submission
    number: int
    reports: str

    def variables(self) -> dict[str, str]:
        """Return the environment variables of every rank."""
        report = {REPORT_FILE: f"{self.reports}/{_REPORT.format('%r')}"}  # each rank inserts its number
        return report | ({RESTARTS: str(self.number)} if self.number else {})

    def ends(self, host: str) -> list[EndedRank]:
        """Return how the ranks ended, from their reports. `host`: named in the error of ranks without a report."""
        size = self.submission.num_processes
        reports = [self._read(_REPORT.format(rank)) for rank in range(size)]
        lost = [rank for rank, report in enumerate(reports) if report is None]

        def loss(_: Mapping[int, str]) -> RankLostError:
            return rank_lost(
                f"rank {', '.join(map(str, lost[:16]))} of {size}",
                "it ended without a word",
                host=host,
                rank=lost[0],
                remedy="--resume continues from the newest checkpoint; look at the engine's own log and the host's "
                "memory",
            )

        return [EndedRank(report, loss) for report in reports]

    def _read(self, name: str) -> dict[str, Any] | None:
        """Read a report; None if there is none. Raises: StorageError if an address fails three times."""
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
                conflict=f"the launcher cannot read there how the ranks ended: {error}",
                remedy="look at the run's records there; --resume continues from its newest checkpoint",
            ) from error


def until_done(
    submission: Submission, signals: Signals, once: Callable[[RankStart], tuple[int, ShoalError | None]]
) -> int:
    """Start all ranks with `once`, and again after the loss of a rank. Print the error and return its exit code."""

    def start(number: int) -> tuple[int, ShoalError | None]:
        with _folder(submission) as folder:
            return once(RankStart(submission, number, folder))

    return restarted(submission, signals, start)


def restarted(submission: Submission, signals: Signals, once: Callable[[int], tuple[int, ShoalError | None]]) -> int:
    """Run `until_done` for an engine that knows how its ranks end; `once` receives the number of earlier starts."""
    recovery = Recovery(submission.max_restarts, RunDirectory(submission.out))
    address = RunAddress(submission.address) if submission.address is not None else None

    def start(number: int, _: float) -> tuple[int, ShoalError | None, float]:
        if address is not None:
            address.send(submission.out)  # this launcher's events, before ranks add to them
        code, error = once(number)
        if address is not None:
            address.fetch(submission.out)
        return code, error, time.monotonic()

    code, error = recovery.until_done(signals, start)
    if error is not None:
        print(error.render(), file=sys.stderr)
    return code


@contextlib.contextmanager
def _folder(submission: Submission) -> Iterator[str]:
    """Provide a place for reports in the run directory, which every host reaches, and remove it after the context."""
    if submission.address is not None:
        at = f"{submission.address.rstrip('/')}/.reports-{uuid.uuid4().hex[:8]}"
        try:
            yield at
        finally:
            for rank in range(submission.num_processes):
                RunAddress(at).remove(_REPORT.format(rank))
        return
    submission.out.mkdir(parents=True, exist_ok=True)
    path = tempfile.mkdtemp(prefix=".reports-", dir=submission.out)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
