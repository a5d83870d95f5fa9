"""Start of a run's ranks on this host, and their watch to the end, for the command and for Python alike."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TextIO

from shoal.errors import ShoalError, from_json
from shoal.launch.local import LaunchEnd, launch
from shoal.launch.rank_processes import LocalRun
from shoal.launch.recovery import Recovery
from shoal.launch.signals import Signals
from shoal.launch.spares import Spares
from shoal.runs.directory import RunDirectory
from shoal.runs.directory_lock import DirectoryLock
from shoal.runs.request import RunRequest, devices_here, dumped, loaded


@dataclass(frozen=True)
class RunEnd:
    """End of a run's ranks: the exit code, the error if there is one, and the signals that this process got."""

    code: int
    error: ShoalError | None = None
    signals: tuple[int, ...] = ()


@contextlib.contextmanager
def claimed(request: RunRequest) -> Iterator[tuple[RunRequest, DirectoryLock]]:
    """A request for ranks on this host, its plan judged by itself and its directory taken for the context."""
    request = request.with_devices(devices_here()).with_own_sums()
    request.check_plan()
    with request.claim() as lock:
        yield replace(request, out=lock.folder), lock


def tell_notes(request: RunRequest) -> None:
    """Prints which defaults were chosen, and why."""
    for note in request.notes():
        print(f"note: {note}", file=sys.stderr)


def judged_request(request: RunRequest, found: dict[str, object]) -> RunRequest:
    """The request as a look at its job has judged it. Raises: the error that was found, its traceback kept."""
    if "error" not in found:
        return loaded(RunRequest, str(found["request"]))
    error = from_json(found["error"])  # type: ignore[arg-type]
    RunDirectory(request.out).keep_traceback("launcher", error)
    raise error


def trained(
    request: RunRequest,
    lock: DirectoryLock,
    signals: Signals,
    stream: TextIO | None = None,
) -> RunEnd:
    """Trains with ranks of this host, which are started again from the newest checkpoint where one was lost.

    `stream`: where rank 0's output goes, if not to this process's own. Handlers of signals are the caller's.
    """
    recovery = Recovery(request.max_restarts, RunDirectory(request.out))
    run = LocalRun(
        ["run", str(request.job.path)],
        request.plan.num_processes,
        request.threads_per_process,
        request.out / "logs",
        request=dumped(request),
        replaceable=request.plan.worker_ranks,
        unsaved=recovery.unsaved_seconds,
        stream=stream,
        lock=lock.descriptor,
    )
    with contextlib.closing(Spares(request.max_restarts > 0)) as spares:

        def once(restarts: int, lost_at: float) -> LaunchEnd:
            nonlocal request
            request = request.again(restarts, lost_at).begun("lost ranks") if restarts else request.begun()
            recovery.events.fence = request.fence
            return launch(replace(run, request=dumped(request)), signals, spares)

        code, error = recovery.until_done(signals, once)
        return RunEnd(code, error, tuple(signals.received))
