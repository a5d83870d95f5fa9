"""Start and supervision of a run's ranks on this host, for the command and for Python."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TextIO

from shoal.errors import ExitCode, ShoalError, from_json
from shoal.hardware.detect import visible_gpus
from shoal.launch.signals import Signals
from shoal.launch.supervise.fork_server import ForkServer
from shoal.launch.supervise.ranks import LaunchEnd, LocalRun, launch
from shoal.launch.supervise.recovery import Recovery
from shoal.runs.directory import RunDirectory, read_json
from shoal.runs.directory_lock import DirectoryLock
from shoal.runs.events import Events
from shoal.runs.generation import withdraw
from shoal.runs.request import RunRequest, claim_directory, devices_here, dumped, loaded
from shoal.runs.resize import granted, wished


@dataclass(frozen=True)
class RunEnd:
    """End of a run's ranks: the exit code, the error if there is one, and the signals that this process received."""

    code: int
    error: ShoalError | None = None
    signals: tuple[int, ...] = ()


@contextlib.contextmanager
def claimed(request: RunRequest) -> Iterator[tuple[RunRequest, DirectoryLock]]:
    """Yield a request for ranks on this host, with its plan checked and its directory locked."""
    request = request.with_devices(devices_here()).with_own_sums()
    request.check_plan()
    with claim_directory(request) as lock:
        granted(RunDirectory(lock.folder))  # a leftover resize request belongs to another call
        # A process that trains alone occupies its GPU until it exits.
        alone = request.what.plan.num_processes == 1 and visible_gpus() > 0
        try:
            resizable = not (request.what.plan.serves or alone)
            yield replace(request, where=replace(request.where, out=lock.folder, resizable=resizable)), lock
        finally:
            withdraw(lock.folder)


def tell_notes(request: RunRequest) -> None:
    """Print the chosen defaults and the reasons."""
    for note in request.notes():
        print(f"note: {note}", file=sys.stderr)


def judged_request(request: RunRequest, found: dict[str, object]) -> RunRequest:
    """Return the request completed by a probe of its job. Raises: the error of the probe, with its traceback stored."""
    if "error" not in found:
        return loaded(RunRequest, str(found["request"]))
    error = from_json(found["error"])  # type: ignore[arg-type]
    RunDirectory(request.where.out).keep_traceback("launcher", error)
    raise error


def trained(
    request: RunRequest,
    lock: DirectoryLock,
    signals: Signals,
    stream: TextIO | None = None,
) -> RunEnd:
    """Train with ranks on this host. If a rank is lost, all restart from the newest checkpoint.

    `stream`: destination of rank 0's output, default this process's output. The caller handles signals.
    """
    recovery = Recovery(request.course.max_restarts, RunDirectory(request.where.out))
    arguments = ["run", request.what.job.target]

    def launched(restarts: int, lost_at: float, server: ForkServer) -> LaunchEnd:
        nonlocal request
        request = request.again(restarts, lost_at) if lost_at else request
        request = request.begun("lost ranks" if lost_at else "")
        if not lost_at:
            granted(RunDirectory(request.where.out))  # after a loss, a pending resize request stays
        recovery.events.fence = request.where.fence
        run = LocalRun(
            arguments,
            request.what.plan.num_processes,
            request.what.threads_per_process,
            request.where.out / "logs",
            request=dumped(request),
            replaceable=request.what.plan.worker_ranks,
            unsaved=recovery.unsaved_seconds,
            stream=stream,
            lock=lock.descriptor,
        )
        return launch(run, signals, server)

    while True:
        with contextlib.closing(ForkServer(arguments, request.what.threads_per_process)) as server:
            code, error = recovery.until_done(signals, functools.partial(launched, server=server))
        following = resized(request, code, signals)
        if error is not None or following is None:
            return RunEnd(code, error, tuple(signals.received))
        request = following


def resized(request: RunRequest, code: int, signals: Signals) -> RunRequest | None:
    """Return the request that continues with the requested number of processes, or None if the run has ended.

    If the number does not fit the run, a note says why and the run continues with its previous number.
    """
    directory = RunDirectory(request.where.out)
    devices = wished(directory) if code == ExitCode.PREEMPTED and not signals.received else None
    if devices is None:
        return None
    ended_at, before = time.time(), request.what.plan.num_processes
    events = Events(directory.events, request.where.fence)
    try:
        following = request.resized(devices, ended_at)
    except ShoalError as error:
        print(f"note: not resized\n{error.render()}", file=sys.stderr)
        return replace(request, course=replace(request.course, resume=True), lost_at=ended_at)
    step = int((read_json(directory.saved) or {}).get("step", 0))
    events.add("resized", after_step=step, processes=devices, done=f"from {before} to {devices} processes")
    now = f"{devices} process{'es' if devices > 1 else ''} in place of {before}"
    print(f"note: the run goes on with {now}, from step {step}", file=sys.stderr)
    return following
