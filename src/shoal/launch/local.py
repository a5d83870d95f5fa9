"""Local launcher: starts worker processes on this host and waits until all have ended."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from shoal.errors import ExitCode, LaunchError, RankLostError, ShoalError, from_json
from shoal.launch import heartbeat
from shoal.launch.environment import LAUNCHER_PID, LOCK_FD, REPORT_FILE, REQUEST_FILE, Environment
from shoal.launch.output import OutputRelay
from shoal.launch.signals import Signals, pausing
from shoal.launch.watch import Stuck, Watch
from shoal.runs.directory import read_json
from shoal.runs.directory_lock import NAME

_POLL_SECONDS = 0.02
# After one rank has died the others find out by themselves, as an error of their next collective, or are ended.
_GRACE_SECONDS = 3.0
# After an agreed end with an error, the last rank may still be writing a checkpoint and the result.
_PATIENCE_SECONDS = 60.0
_REQUEST = "request.json"
# A place in a run whose processes die so often will not be filled by another.
_MOST_REPLACED = 3


@dataclass(frozen=True)
class LocalRun:
    """Processes to start: the `shoal` arguments of each worker, how many, and the threads of each."""

    arguments: Sequence[str]
    num_processes: int
    num_threads: int
    logs: Path  # what ranks other than 0 print, where that is anything and the folder's parent has anything
    request: str | None = None  # a text that is handed over to each of them as a file
    replaceable: range = range(0)  # ranks that are started again, a few times, where they die without a word
    unsaved: Callable[[], float] = lambda: 0.0  # the seconds since the newest checkpoint
    excused: dict[str, float] = field(default_factory=dict)  # as `Watch`'s, of starts before this one
    stream: TextIO | None = None  # where rank 0's output goes; None: to this process's own
    lock: int | None = None  # a descriptor that all workers inherit: what it locks is locked until the last is gone
    key: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)


@dataclass
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    report: Path
    log: Path | None
    heartbeat: Path
    relay: OutputRelay | None = None
    given_up: bool = False  # killed from here, or asked to end, after another had died
    stuck: str | None = None  # why it was killed from here while it lived

    def how_it_ended(self) -> dict[str, Any] | None:
        return read_json(self.report)


class LaunchEnd(NamedTuple):
    """End of a launch: the run's exit code, the root error if there is one, and when the first failure was noticed."""

    code: int
    error: ShoalError | None
    failed_at: float  # seconds since the epoch; of the end, where nothing failed


def launch(run: LocalRun, signals: Signals | None = None) -> LaunchEnd:
    """Starts the workers and waits for them.

    Raises: LaunchError where the port that MASTER_PORT names is taken.
    """
    signals = signals or Signals(impatient=False)
    workers: list[_Worker] = []
    with (
        tempfile.TemporaryDirectory(prefix="shoal-") as folder,
        _listener() as listener,
        signals.handled(),
        pausing(lambda number: _tell_groups(workers, number)),
    ):
        if run.request is not None:
            (Path(folder) / _REQUEST).write_text(run.request, encoding="utf-8")
        try:
            for rank in range(run.num_processes):
                workers.append(_start(run, rank, listener, Path(folder)))
            replaced: Counter[int] = Counter()

            def replace(worker: _Worker) -> bool:
                """Starts the worker's place anew, where that may help; True where nobody need miss it."""
                rank = worker.rank
                if rank not in run.replaceable or replaced[rank] == _MOST_REPLACED or signals.twice:
                    return False
                if not _is_well(workers[0]):
                    replaced[rank] += 1
                    _keep_log(worker, run.logs)
                    workers[rank] = _start(run, rank, listener, Path(folder))
                return True

            judged = {w.rank: w.heartbeat for w in workers if w.rank not in run.replaceable}
            first = _watch(workers, signals, run.replaceable, replace, Watch(judged, run.unsaved, excused=run.excused))
            failed_at = time.time() - max(0.0, time.monotonic() - first)
            cut_short = workers[0].given_up and workers[0].process.returncode == ExitCode.PREEMPTED
            if run.replaceable and _is_well(workers[0]) and not cut_short:  # who is left over had been given up
                return LaunchEnd(workers[0].process.returncode, None, failed_at)
            return LaunchEnd(*_verdict(workers, signals), failed_at)
        finally:
            _end(workers, signal.SIGKILL)
            for worker in workers:
                worker.process.wait()
                _keep_log(worker, run.logs)
                if worker.relay is not None:
                    worker.relay.close()


@contextlib.contextmanager
def _listener() -> Iterator[socket.socket]:
    """A socket that listens on loopback for rank 0's store; on MASTER_PORT where that is set, else on a free port."""
    port = os.environ.get("MASTER_PORT", "0")
    if not port.isdecimal() or int(port) > 65535:
        raise LaunchError(
            given=f"MASTER_PORT={port}",
            conflict="a port is a number up to 65535",
            remedy="unset it: a free one is taken",
        )
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", int(port)))
        except OSError as error:
            raise LaunchError(
                given=f"MASTER_PORT={port}",
                conflict=f"that port cannot be used: {error.strerror}",
                remedy="unset MASTER_PORT: a free port is taken",
            ) from None
        listener.listen()
        yield listener


def _start(run: LocalRun, rank: int, listener: socket.socket, folder: Path) -> _Worker:
    report, said = folder / f"report-{rank}.json", folder / f"heartbeat-{rank}"
    heartbeat.make(said)
    threads = str(run.num_threads)
    number, port = run.num_processes, listener.getsockname()[1]
    descriptor = listener.fileno() if rank == 0 else None
    key = run.key if run.replaceable else None
    environment = Environment(rank, number, rank, number, port=port, listen_fd=descriptor, key=key)
    inherited = (*((descriptor,) if descriptor is not None else ()), *((run.lock,) if run.lock is not None else ()))
    variables = {
        **os.environ,
        **environment.variables(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
        REPORT_FILE: str(report),
        heartbeat.HEARTBEAT_FILE: str(said),
        LAUNCHER_PID: str(os.getpid()),
        **({LOCK_FD: str(run.lock)} if run.lock is not None else {}),
        **({REQUEST_FILE: str(folder / _REQUEST)} if run.request is not None else {}),
    }
    log = None if rank == 0 else folder / f"log-{rank}.txt"
    relay = OutputRelay(run.stream) if rank == 0 and run.stream is not None else None
    output = relay.writer if relay is not None else None if log is None else log.open("wb")
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "shoal", *run.arguments],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=inherited,
            start_new_session=True,  # a Ctrl-C in the terminal reaches the launcher only, which tells the workers once
        )
    finally:
        if output is not None:
            output.close()
    return _Worker(rank, process, report, log, said, relay)


def _is_well(worker: _Worker) -> bool:
    return worker.process.poll() in (ExitCode.DONE, ExitCode.PREEMPTED)


def _ended_well(worker: _Worker, serves: bool) -> bool:
    """Whether a worker is done: by its exit code, and its report, without which it ended in the midst of its work."""
    return _is_well(worker) and (serves or worker.how_it_ended() is not None)


def _watch(
    workers: list[_Worker],
    signals: Signals,
    replaceable: range,
    replace: Callable[[_Worker], bool],
    watch: Watch,
) -> float:
    """Time of the first failure that was seen, on the monotonic clock; infinite where there was none.

    Waits until all have ended; hands signals on, and ends the rest once one has died without a word for good.

    Where some are replaced, by `replace`, rank 0 leads the others, and none of them outlives it by long; before it is
    ended it is asked to, since it may be well without those that failed and can save what was computed.
    """
    leader = workers[0]
    handed_on: signal.Signals | None = None
    since, first, asked = math.inf, math.inf, False
    while any(w.process.poll() is None for w in workers):
        wanted = signal.SIGKILL if signals.twice else signal.SIGTERM if signals.received else None
        if wanted is not None and wanted != handed_on:
            handed_on = wanted
            _end(workers, wanted)
        stuck = watch.look({w.rank: w.process.pid for w in workers if w.process.poll() is None})
        watch.excuse(stuck)
        _end_stuck(workers, stuck)
        failed = [w for w in workers if w.process.poll() is not None and not _ended_well(w, bool(replaceable))]
        if replaceable:
            failed = [w for w in failed if w.how_it_ended() is not None or not replace(w)]
            failed += [leader] if _is_well(leader) else []
        if failed:
            now, leads = time.monotonic(), leader.process.poll() is None
            since, first = min(since, now), min(first, now)
            if asked and not leads:
                since, asked = now, False
            told = not replaceable and all(w.how_it_ended() is not None for w in failed)
            if now - since > (_PATIENCE_SECONDS if asked or told else _GRACE_SECONDS):
                if leads and not leader.given_up and all(w.rank in replaceable for w in failed):
                    since, asked, leader.given_up = now, True, True
                    leader.process.send_signal(signal.SIGTERM)
                else:
                    _end(workers, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    return first


def _end_stuck(workers: list[_Worker], found: list[Stuck]) -> None:
    """Kills ranks that are taken for lost, once they have shown where they are."""
    for rank, reason in ((stuck.rank, stuck.reason) for stuck in found):
        worker = workers[rank]
        shown = heartbeat.end(worker.heartbeat, worker.process)
        worker.stuck = f"{reason}, and was killed" + (f"; it was in\n{shown}" if shown else "")


def _verdict(workers: list[_Worker], signals: Signals) -> tuple[int, ShoalError | None]:
    ends = [(worker, worker.how_it_ended()) for worker in workers]
    if signals.twice and not all(end for _, end in ends):
        return ExitCode.INTERRUPTED, None
    told = [end["error"] for _, end in ends if end and end.get("error")]
    roots = [error for error in told if error["kind"] != "PeerError"]
    if roots:
        code = next(end["exit_code"] for _, end in ends if end and end.get("error") == roots[0])
        return code, from_json(roots[0])
    lost = sorted((worker for worker, end in ends if end is None), key=lambda worker: worker.given_up)
    if signals.received and any(w.process.returncode == -signal.SIGTERM for w in lost):
        return ExitCode.INTERRUPTED, None  # told to stop before it could listen: nothing had begun
    if lost:
        return ExitCode.RANK_LOST, _lost(lost[0])
    if told:
        return ExitCode.FAILED, from_json(told[0])
    return max(end["exit_code"] for _, end in ends if end), None


def _lost(worker: _Worker) -> RankLostError:
    code = worker.process.returncode
    try:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    except ValueError:
        how = f"ended with code {code}"
    error = RankLostError(
        given=f"rank {worker.rank} (process {worker.process.pid})",
        conflict=f"it {worker.stuck or f'{how} without a word{_last_words(worker)}'}",
        remedy="--resume goes on from the newest checkpoint; SIGKILL by the system often means out of memory",
    )
    error.rank, error.host = worker.rank, socket.gethostname()
    return error


def _keep_log(worker: _Worker, folder: Path) -> None:
    if worker.log is None or not folder.parent.is_dir():
        return
    with contextlib.suppress(OSError):
        began = any(path.name != NAME for path in folder.parent.iterdir())
        if began and worker.log.stat().st_size:
            folder.mkdir(exist_ok=True)
            shutil.copyfile(worker.log, folder / f"rank-{worker.rank}.txt")


def _last_words(worker: _Worker) -> str:
    if worker.log is None:
        return ""
    with contextlib.suppress(OSError):
        lines = worker.log.read_text(errors="replace").strip().splitlines()[-5:]
        return "".join(f"\n{line[:200]}" for line in lines)
    return ""


def _tell_groups(workers: list[_Worker], number: int) -> None:
    """A signal to each worker and the processes that it has started: the terminal's own reaches this group only."""
    for worker in workers:
        if worker.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.process.pid, number)


def _end(workers: list[_Worker], number: int) -> None:
    for worker in workers:
        if worker.process.poll() is None:
            worker.given_up = number == signal.SIGKILL
            with contextlib.suppress(ProcessLookupError):
                worker.process.send_signal(number)
