"""Processes of one start of a run's ranks on this host: their environment, and the folder and socket they share."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import shutil
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from shoal.errors import ExitCode, LaunchError, RankLostError
from shoal.launch import heartbeat
from shoal.launch.environment import LISTEN_FD, LOCK_FD, REPORT_FILE, REQUEST_FILE, Environment
from shoal.launch.fork_server import ForkServer, Process, fresh_interpreter
from shoal.launch.output import OutputRelay
from shoal.launch.signals import how_it_ended
from shoal.launch.stacks import different_calls
from shoal.launch.start_folder import StartFolder
from shoal.runs.directory import read_json
from shoal.runs.directory_lock import NAME
from shoal.runs.generation import FOLDER as GENERATIONS

_REQUEST = "request.json"
_NAME_SECONDS, _LOOK_SECONDS = 40.0, 0.5


@dataclass(frozen=True)
class LocalRun:
    """Processes to start: the `shoal` arguments of each worker, the number of workers, and the threads of each."""

    arguments: Sequence[str]
    num_processes: int
    num_threads: int
    logs: Path  # folder for the output of ranks other than 0; created only if they print text and the run stores files
    request: str | None = None  # a text that each worker receives as a file
    replaceable: range = range(0)  # ranks that are restarted, a few times, if they die without a report
    unsaved: Callable[[], float] = lambda: 0.0  # returns the seconds since the newest checkpoint
    excused: dict[str, float] = field(default_factory=dict)  # as in `Watch`, from earlier starts
    stream: TextIO | None = None  # stream for rank 0's output; None: this process's own output
    lock: int | None = None  # a descriptor that all workers inherit; its lock lasts until the last worker has ended
    share: Environment | None = None  # the first rank's, if other hosts have ranks too; None: all are here
    listener: socket.socket | None = None  # for rank 0's store, if the caller needs its port; None: a new one
    key: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)


@dataclass
class RankProcess:
    """Process of a rank, from its launcher's point of view."""

    rank: int
    process: Process
    report: Path
    log: Path | None
    heartbeat: Path
    relay: OutputRelay | None = None
    given_up: bool = False  # this launcher killed it or asked it to end, after another rank had died
    stuck: str | None = None  # why this launcher killed it while it was alive

    def how_it_ended(self) -> dict[str, Any] | None:
        """Return the rank's report, or None if it ended without a report."""
        return read_json(self.report)

    @property
    def is_well(self) -> bool:
        """Whether the process has ended with an exit code that means success."""
        return self.process.poll() in (ExitCode.DONE, ExitCode.PREEMPTED)

    @property
    def code(self) -> int | None:
        """Exit code of the process, negative for a signal."""
        return self.process.returncode

    def error(self, others: Mapping[int, str]) -> RankLostError:
        """Describe the rank's loss. `others`: stacks of the ranks that noticed the loss, by rank."""
        how, shown = self.stuck or f"it {how_it_ended(self.process.wait())}", ""
        if self.stuck is None:
            shown = heartbeat.last_stacks(self.heartbeat)
            calls = different_calls({self.rank: shown, **others})
            how = "; ".join(filter(None, (calls, f"{how} without a word{self.last_words()}")))
        error = RankLostError(
            given=f"rank {self.rank} (process {self.process.pid})",
            conflict=how + (f"\nIt was in\n{shown}" if shown else ""),
            remedy="--resume goes on from the newest checkpoint; SIGKILL by the system often means out of memory",
        )
        error.rank, error.host = self.rank, socket.gethostname()
        return error

    def last_words(self) -> str:
        """Return the last lines of its output, each after a newline."""
        if self.log is None:
            return ""
        with contextlib.suppress(OSError):
            lines = self.log.read_text(errors="replace").strip().splitlines()[-5:]
            return "".join(f"\n{line[:200]}" for line in lines)
        return ""


class Start:
    """Processes of one start of a run's ranks, forked by the fork server or, if it refuses, fresh interpreters.

    Raises: LaunchError if the port in MASTER_PORT cannot be used.
    """

    def __init__(self, run: LocalRun, server: ForkServer) -> None:
        self._run, self._server = run, server
        self.workers: list[RankProcess] = []
        self._listener = run.listener or (_listener() if run.share is None else listener_at(run.share))
        self._folder = StartFolder()

    def begin(self) -> None:
        """Start the processes."""
        if self._run.request is not None:
            (self._place / _REQUEST).write_text(self._run.request, encoding="utf-8")
        for place in range(self._run.num_processes):
            self.workers.append(self._started(place))

    def again(self, rank: int) -> None:
        """Restart a rank whose process has ended."""
        ended = self.workers[rank]
        self._keep_log(ended)
        if ended.relay is not None:
            ended.relay.close()
        self.workers[rank] = self._started(rank)

    def close(self) -> None:
        """Kill the processes that still run, store the logs, and remove the folder."""
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.process.kill()
        for worker in self.workers:
            worker.process.wait()
            self._keep_log(worker)
            if worker.relay is not None:
                worker.relay.close()
        if self._listener is not None:
            self._listener.close()
        self._folder.close()

    @property
    def _place(self) -> Path:
        return self._folder.path

    def _environment(self, place: int) -> Environment:
        """Return the environment of the rank at index `place` among the ranks of this start."""
        run, number, share = self._run, self._run.num_processes, self._run.share
        if share is None:
            assert self._listener is not None, "all ranks are here"
            descriptor, port = self._listener.fileno() if place == 0 else None, self._listener.getsockname()[1]
            key = run.key if run.replaceable else None
            return Environment(place, number, place, number, port=port, listen_fd=descriptor, key=key)
        listening = self._listener.fileno() if self._listener is not None and place == 0 else None
        rank, local_rank = share.rank + place, share.local_rank + place
        return replace(share, rank=rank, local_rank=local_rank, listen_fd=listening, num_to_start=0)

    def _started(self, place: int) -> RankProcess:
        run, folder, environment = self._run, self._place, self._environment(place)
        rank = environment.rank
        report, said = folder / f"report-{rank}.json", folder / f"heartbeat-{rank}"
        heartbeat.make(said)
        variables = {
            **environment.variables(),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(run.num_threads)),
            REPORT_FILE: str(report),
            heartbeat.HEARTBEAT_FILE: str(said),
            **({REQUEST_FILE: str(folder / _REQUEST)} if run.request is not None else {}),
        }
        inherited = {LISTEN_FD: environment.listen_fd, LOCK_FD: run.lock}
        descriptors = {name: number for name, number in inherited.items() if number is not None}
        log = None if rank == 0 else folder / f"log-{rank}.txt"
        relay = OutputRelay(run.stream) if rank == 0 and run.stream is not None else None
        output = relay.writer if relay is not None else None if log is None else log.open("wb")
        try:
            printed = output.fileno() if output is not None else None
            process = self._server.start(variables, descriptors, printed) or fresh_interpreter(
                run.arguments, variables, descriptors, printed
            )
        finally:
            if output is not None:
                output.close()
        return RankProcess(rank, process, report, log, said, relay)

    def _keep_log(self, worker: RankProcess) -> None:
        folder = self._run.logs
        if worker.log is None or not folder.parent.is_dir():
            return
        with contextlib.suppress(OSError):
            began = any(path.name not in (NAME, GENERATIONS) for path in folder.parent.iterdir())
            if began and worker.log.stat().st_size:
                folder.mkdir(exist_ok=True)
                shutil.copyfile(worker.log, folder / f"rank-{worker.rank}.txt")


def tell(workers: Sequence[RankProcess], number: int) -> None:
    """Send a signal to each worker that is alive. SIGKILL marks the worker as given up."""
    for worker in workers:
        if worker.process.poll() is None:
            worker.given_up = number == signal.SIGKILL
            with contextlib.suppress(ProcessLookupError):
                worker.process.send_signal(number)


def tell_groups(workers: Sequence[RankProcess], number: int) -> None:
    """Send a signal to each worker and its child processes. The terminal's signals reach only the launcher's group."""
    for worker in workers:
        if worker.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.process.pid, number)


def _listener() -> socket.socket:
    """Listen on loopback for rank 0's store, on MASTER_PORT if that is set, else on a free port."""
    port = os.environ.get("MASTER_PORT", "0")
    if not port.isdecimal() or int(port) > 65535:
        raise LaunchError(
            given=f"MASTER_PORT={port}",
            conflict="a port is a number up to 65535",
            remedy="unset it: a free one is taken",
        )
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", int(port)))
    except OSError as error:
        listener.close()
        raise LaunchError(
            given=f"MASTER_PORT={port}",
            conflict=f"that port cannot be used: {error.strerror}",
            remedy="unset MASTER_PORT: a free port is taken",
        ) from None
    listener.listen()
    return listener


def _resolved(share: Environment) -> Any:
    """Resolve the address and return its first entry. Retry for a pod, whose name resolves only after some seconds."""
    deadline = time.monotonic() + (_NAME_SECONDS if share.engine == "kubernetes" else 0.0)
    while True:
        try:
            return socket.getaddrinfo(share.address, share.port, type=socket.SOCK_STREAM)[0]
        except socket.gaierror:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_LOOK_SECONDS)


def listener_at(share: Environment) -> socket.socket | None:
    """Listen on the address of rank 0's store, and on no other, if rank 0 is on this host. Return None if it is not.

    Raises: LaunchError if the address is not of this host, other hosts cannot reach it, or the port is in use.
    """
    if share.rank != 0:
        return None
    given, here = f"rank 0's store at {share.address}:{share.port}", socket.gethostname()
    listener: socket.socket | None = None
    try:
        family, kind, _, _, place = _resolved(share)
        if share.num_hosts > 1 and ipaddress.ip_address(place[0]).is_loopback:
            raise LaunchError(
                given=f"{given}, on host {here}",
                conflict=f"there it is {place[0]}, which no other host reaches",
                remedy="give the address by which the other hosts reach it, or mend /etc/hosts there",
            )
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen()
        return listener
    except LaunchError:
        raise
    except OSError as error:
        if listener is not None:
            listener.close()
        raise LaunchError(
            given=f"{given}, on host {here}",
            conflict=f"nothing can listen there: {error.strerror or error}",
            remedy="check that rank 0 was started on the host of that address, and that the port is free there",
        ) from None
