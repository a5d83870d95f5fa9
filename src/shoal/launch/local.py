"""Local launcher: starts worker processes on this host and waits until all have ended."""

from __future__ import annotations

import contextlib
import json
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
from typing import Any

from shoal.errors import ExitCode, LaunchError, RankLostError, ShoalError, from_json
from shoal.launch.environment import LAUNCHER_PID, LOCK_FD, REPORT_FILE, REQUEST_FILE, Environment
from shoal.launch.signals import Signals
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
    """Processes to start: the `shoal` arguments of each worker, how many, and the threads of each.

    `request`: a text that is handed over to each of them as a file. A rank in `replaceable` that dies without a word is
    started again, a few times. `lock`: a descriptor that every worker inherits, so that what it locks is locked until
    the last of them is gone.
    """

    arguments: Sequence[str]
    num_processes: int
    num_threads: int
    logs: Path  # what ranks other than 0 print, where that is anything and the folder's parent has anything
    request: str | None = None
    replaceable: range = range(0)
    lock: int | None = None
    key: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)


@dataclass
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    report: Path
    log: Path | None
    given_up: bool = False  # killed from here, or asked to end, after another had died

    def how_it_ended(self) -> dict[str, Any] | None:
        with contextlib.suppress(OSError, ValueError):
            document: dict[str, Any] = json.loads(self.report.read_text(encoding="utf-8"))
            return document
        return None


def launch(run: LocalRun) -> tuple[int, ShoalError | None]:
    """Starts the workers and waits for them: the run's exit code, and the root error if there is one.

    Raises: LaunchError where the port that MASTER_PORT names is taken.
    """
    signals = Signals(impatient=False)
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder, _listener() as listener, signals.handled():
        workers: list[_Worker] = []
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

            _watch(workers, signals, run.replaceable, replace)
            cut_short = workers[0].given_up and workers[0].process.returncode == ExitCode.PREEMPTED
            if run.replaceable and _is_well(workers[0]) and not cut_short:  # who is left over had been given up
                return workers[0].process.returncode, None
            return _verdict(workers, signals)
        finally:
            _end(workers, signal.SIGKILL)
            for worker in workers:
                worker.process.wait()
                _keep_log(worker, run.logs)


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
    report = folder / f"report-{rank}.json"
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
        LAUNCHER_PID: str(os.getpid()),
        **({LOCK_FD: str(run.lock)} if run.lock is not None else {}),
        **({REQUEST_FILE: str(folder / _REQUEST)} if run.request is not None else {}),
    }
    log = None if rank == 0 else folder / f"log-{rank}.txt"
    output = None if log is None else log.open("wb")
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
    return _Worker(rank, process, report, log)


def _is_well(worker: _Worker) -> bool:
    """Whether it has ended, and as it should."""
    return worker.process.poll() in (ExitCode.DONE, ExitCode.PREEMPTED)


def _watch(workers: list[_Worker], signals: Signals, replaceable: range, replace: Callable[[_Worker], bool]) -> None:
    """Waits until all have ended; hands signals on, and ends the rest once one has died without a word for good.

    Where some are replaced, by `replace`, rank 0 leads the others, and none of them outlives it by long; before it is
    ended it is asked to, since it may be well without those that failed and can save what was computed.
    """
    leader = workers[0]
    handed_on: signal.Signals | None = None
    since, asked = math.inf, False
    while any(w.process.poll() is None for w in workers):
        wanted = signal.SIGKILL if signals.twice else signal.SIGTERM if signals.received else None
        if wanted is not None and wanted != handed_on:
            handed_on = wanted
            _end(workers, wanted)
        failed = [w for w in workers if w.process.poll() not in (None, 0, ExitCode.PREEMPTED)]
        if replaceable:
            failed = [w for w in failed if w.how_it_ended() is not None or not replace(w)]
            failed += [leader] if _is_well(leader) else []
        if failed:
            now, leads = time.monotonic(), leader.process.poll() is None
            since = min(since, now)
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
        conflict=f"it {how} without a word{_last_words(worker)}",
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


def _end(workers: list[_Worker], number: int) -> None:
    for worker in workers:
        if worker.process.poll() is None:
            worker.given_up = number == signal.SIGKILL
            with contextlib.suppress(ProcessLookupError):
                worker.process.send_signal(number)
