"""Local launcher: starts a run's ranks on this host, watches them, and returns how the run has ended."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import math
import os
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, TextIO

from shoal.errors import ExitCode, LaunchError, RankLostError, ShoalError
from shoal.launch.environment import LISTEN_FD, LOCK_FD, REPORT_FILE, REQUEST_FILE, Environment
from shoal.launch.signals import Signals, pausing
from shoal.launch.supervise import heartbeat
from shoal.launch.supervise.child import OutputRelay, how_it_ended, kill, last_lines, rank_lost
from shoal.launch.supervise.fork_server import ForkServer, Process, fresh_interpreter
from shoal.launch.supervise.heartbeat import Watch, different_calls
from shoal.launch.supervise.recovery import EndedRank, verdict
from shoal.runs.directory import FOLDER as GENERATIONS
from shoal.runs.directory import NAME, read_json

_REQUEST = "request.json"
_NAME_SECONDS, _LOOK_SECONDS = 40.0, 0.5
_PREFIX, _LOCK = "shoal-", "launcher.lock"
_POLL_SECONDS = 0.02
# After a rank has died, the others notice an error in their next collective or are ended.
_GRACE_SECONDS = 3.0
# After an agreed end with an error, the last rank may still be writing a checkpoint and the result.
_PATIENCE_SECONDS = 60.0
# A rank that dies more often than this is not replaced again.
_MOST_REPLACED = 3


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
    announce: Callable[[bool], None] = lambda paused: None  # called before this process pauses (True) and afterwards
    stream: TextIO | None = None  # stream for rank 0's output; None: this process's own output
    lock: int | None = None  # a descriptor that all workers inherit; its lock lasts until the last worker has ended
    share: Environment | None = None  # the first rank's, if other hosts have ranks too; None: all are here
    listener: socket.socket | None = None  # for rank 0's store, if the caller needs its port; None: a new one
    key: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)


class LaunchEnd(NamedTuple):
    """End of a launch: the run's exit code, the root error if there is one, and the time of the first failure."""

    code: int
    error: ShoalError | None
    failed_at: float  # by `time.monotonic`; the time of the end if nothing failed


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

    @property
    def is_well(self) -> bool:
        """True if the process has ended with an exit code that means success."""
        return self.process.poll() in (ExitCode.DONE, ExitCode.PREEMPTED)

    def loss(self, others: Mapping[int, str]) -> RankLostError:
        """Describe the rank's loss. `others`: stacks of the ranks that noticed the loss, by rank."""
        how, shown = self.stuck or f"it {how_it_ended(self.process.wait())}", ""
        if self.stuck is None:
            shown, output = heartbeat.last_stacks(self.heartbeat), ""
            calls = different_calls({self.rank: shown, **others})
            if self.log is not None:
                with contextlib.suppress(OSError):
                    output = last_lines(self.log.read_text(errors="replace"))
            ended = "the launcher ended it" if self.given_up else f"{how} without a word"
            how = "; ".join(filter(None, (calls, f"{ended}{output}")))
        return rank_lost(
            f"rank {self.rank} (process {self.process.pid})",
            how + (f"\nIt was in\n{shown}" if shown else ""),
            rank=self.rank,
            host=socket.gethostname(),
        )


def launch(run: LocalRun, signals: Signals | None = None, server: ForkServer | None = None) -> LaunchEnd:
    """Start the workers and wait for them. `server`: the fork server of a run that may be launched again.

    Raises: LaunchError if the port in MASTER_PORT is in use.
    """
    signals = signals or Signals(impatient=False)
    with contextlib.ExitStack() as until_end:
        server = server or until_end.enter_context(contextlib.closing(ForkServer(run.arguments, run.num_threads)))
        start = Start(run, server)
        until_end.callback(start.close)
        until_end.enter_context(signals.handled())
        until_end.enter_context(pausing(start.pause))
        if not server.until_loaded(lambda: signals.twice):
            return LaunchEnd(int(ExitCode.INTERRUPTED), None, time.monotonic())
        start.begin()
        workers = start.workers
        judged = {w.rank: w.heartbeat for w in workers if w.rank not in run.replaceable}
        watch = Watch(judged, run.unsaved, excused=run.excused, all_here=run.share is None)
        failed_at = min(_watch(start, signals, watch), time.monotonic())
        code = workers[0].process.returncode
        cut_short = workers[0].given_up and code == ExitCode.PREEMPTED
        if run.replaceable and workers[0].is_well and code is not None and not cut_short:  # the others were given up
            return LaunchEnd(code, None, failed_at)
        ends = [EndedRank(read_json(w.report), w.loss, w.process.returncode, w.given_up) for w in workers]
        return LaunchEnd(*verdict(ends, signals, elsewhere=run.share is not None), failed_at)


def _watch(start: Start, signals: Signals, watch: Watch) -> float:
    """Wait until all workers have ended. Return the monotonic time of the first failure, infinite if there was none.

    Tells the workers to stop, once, when a signal has arrived; a second one of its kind kills them, so that workers
    need not tell the two apart. Kills the remaining workers once one has died for good without a report.

    If ranks are replaceable, rank 0 leads the others, and none outlives it by long. Rank 0 first gets a request to
    stop: it may be well without the failed ranks and can save what was computed.
    """
    workers, replaceable = start.workers, start.run.replaceable
    leader = workers[0]
    handed_on: signal.Signals | None = None
    replaced: Counter[int] = Counter()
    since, first, is_asked = math.inf, math.inf, False
    while any(w.process.poll() is None for w in workers):
        wanted = signal.SIGKILL if signals.twice else signal.SIGTERM if signals.received else None
        if wanted is not None and wanted != handed_on:
            handed_on = wanted
            _tell(workers, wanted)
        lost = watch.look({w.rank: w.process.pid for w in workers if w.process.poll() is None})
        if lost:
            waiting = [worker for worker in workers if worker.rank not in lost and worker.process.poll() is None]
            shown = {worker.rank: heartbeat.show(worker.heartbeat, worker.process) for worker in waiting}
            stuck = [worker for worker in workers if worker.rank in lost]
            shown |= {worker.rank: heartbeat.end(worker.heartbeat, worker.process) for worker in stuck}
            calls = different_calls(shown)
            for worker in stuck:
                stacks = f"\nIt was in\n{shown[worker.rank]}" if shown[worker.rank] else ""
                worker.stuck = "; ".join(filter(None, (calls, f"it {lost[worker.rank]}, and was killed"))) + stacks
        failed = []
        for worker in [w for w in workers if w.process.poll() is not None]:
            spoke = read_json(worker.report) is not None
            if worker.is_well and (spoke or replaceable):  # without a report, an only run was interrupted
                continue
            may_help = worker.rank in replaceable and replaced[worker.rank] < _MOST_REPLACED and not signals.twice
            if spoke or not may_help:
                failed.append(worker)
            elif not leader.is_well:
                replaced[worker.rank] += 1
                start.again(worker.rank)
        if replaceable and leader.is_well:
            failed.append(leader)
        if failed:
            now, leads = time.monotonic(), leader.process.poll() is None
            since, first = min(since, now), min(first, now)
            if is_asked and not leads:
                since, is_asked = now, False
            agreed = not replaceable and all(read_json(w.report) is not None for w in failed)
            if now - since > (_PATIENCE_SECONDS if is_asked or agreed else _GRACE_SECONDS):
                if leads and not leader.given_up and all(w.rank in replaceable for w in failed):
                    since, is_asked, leader.given_up = now, True, True
                    leader.process.send_signal(signal.SIGTERM)
                else:
                    _tell(workers, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    return first


def _tell(workers: Sequence[RankProcess], number: int) -> None:
    """Send a signal to each worker that is alive. SIGKILL marks the worker as given up."""
    for worker in workers:
        if worker.process.poll() is None:
            worker.given_up = number == signal.SIGKILL
            if worker.given_up:
                kill(worker.process)
            else:
                worker.process.send_signal(number)


class Start:
    """Processes of one start of a run's ranks, forked by the fork server or, if it refuses, fresh interpreters.

    Raises: LaunchError if the port in MASTER_PORT cannot be used.
    """

    def __init__(self, run: LocalRun, server: ForkServer) -> None:
        self.run, self._server = run, server
        self.workers: list[RankProcess] = []
        self._listener = run.listener or (_listener() if run.share is None else listener_at(run.share))
        self._folder = StartFolder()

    def begin(self) -> None:
        """Start the processes."""
        if self.run.request is not None:
            (self._folder.path / _REQUEST).write_text(self.run.request, encoding="utf-8")
        for place in range(self.run.num_processes):
            self.workers.append(self._started(place))

    def again(self, rank: int) -> None:
        """Restart a rank whose process has ended."""
        ended = self.workers[rank]
        self._keep_log(ended)
        if ended.relay is not None:
            ended.relay.close()
        self.workers[rank] = self._started(rank)

    def pause(self, number: int) -> None:
        """Send a signal to all processes and their child processes. The terminal signals only the launcher's group."""
        self.run.announce(number == signal.SIGSTOP)
        for worker in self.workers:
            if worker.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker.process.pid, number)

    def close(self) -> None:
        """Kill the processes that still run, store the logs, and remove the folder."""
        for worker in self.workers:
            kill(worker.process)
        for worker in self.workers:
            worker.process.wait()
            self._keep_log(worker)
            if worker.relay is not None:
                worker.relay.close()
        if self._listener is not None:
            self._listener.close()
        self._folder.close()

    def _started(self, place: int) -> RankProcess:
        """Start the rank at index `place` among the ranks of this start."""
        run, folder, size = self.run, self._folder.path, self.run.num_processes
        listening = self._listener.fileno() if self._listener is not None and place == 0 else None
        if run.share is None:
            assert self._listener is not None, "all ranks are here"
            port, key = self._listener.getsockname()[1], run.key if run.replaceable else None
            environment = Environment(place, size, place, size, port=port, listen_fd=listening, key=key)
        else:
            rank, local_rank = run.share.rank + place, run.share.local_rank + place
            environment = replace(run.share, rank=rank, local_rank=local_rank, listen_fd=listening, num_to_start=0)
        rank = environment.rank
        report, beat = folder / f"report-{rank}.json", folder / f"heartbeat-{rank}"
        heartbeat.make(beat)
        variables = {
            **environment.variables(),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(run.num_threads)),
            REPORT_FILE: str(report),
            heartbeat.HEARTBEAT_FILE: str(beat),
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
        return RankProcess(rank, process, report, log, beat, relay)

    def _keep_log(self, worker: RankProcess) -> None:
        folder = self.run.logs
        if worker.log is None or not folder.parent.is_dir():
            return
        with contextlib.suppress(OSError):
            began = any(path.name not in (NAME, GENERATIONS) for path in folder.parent.iterdir())
            if began and worker.log.stat().st_size:
                folder.mkdir(exist_ok=True)
                shutil.copyfile(worker.log, folder / f"rank-{worker.rank}.txt")


class StartFolder:
    """Temporary folder of this process until `close`. An OS lock in it, not inherited, shows that the process is alive.

    Folders of launchers that were killed are removed.
    """

    def __init__(self) -> None:
        for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
            with contextlib.suppress(OSError):
                descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
                try:
                    if os.fstat(descriptor).st_uid == os.getuid():
                        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        shutil.rmtree(lock.parent, ignore_errors=True)
                finally:
                    os.close(descriptor)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        aside = self.path / f".{_LOCK}"
        self._lock = os.open(aside, os.O_RDWR | os.O_CREAT, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks: other launchers then do not remove the folder
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            aside.rename(self.path / _LOCK)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _listener() -> socket.socket:
    """Listen on loopback for rank 0's store, on MASTER_PORT if that is set, else on a free port."""
    port = os.environ.get("MASTER_PORT", "0")
    if not port.isdecimal() or int(port) > 65535:
        raise LaunchError(
            given=f"MASTER_PORT={port}",
            conflict="a port is a number up to 65535",
            remedy="unset it: shoal then takes a free port",
        )
    try:
        return socket.create_server(("127.0.0.1", int(port)))
    except OSError as error:
        raise LaunchError(
            given=f"MASTER_PORT={port}",
            conflict=f"that port cannot be used: {os.strerror(error.errno or 0)}",
            remedy="unset MASTER_PORT: shoal then takes a free port",
        ) from None


def listener_at(share: Environment) -> socket.socket | None:
    """Listen on the address of rank 0's store, and on no other, if rank 0 is on this host. Return None if it is not.

    Raises: LaunchError if the address is not of this host, other hosts cannot reach it, or the port is in use.
    """
    if share.rank != 0:
        return None
    given, here = f"rank 0's store at {share.address}:{share.port}", socket.gethostname()
    # The name of a pod resolves only after some seconds.
    deadline = time.monotonic() + (_NAME_SECONDS if share.engine == "kubernetes" else 0.0)
    try:
        while True:
            try:
                family, _, _, _, place = socket.getaddrinfo(share.address, share.port, type=socket.SOCK_STREAM)[0]
                break
            except socket.gaierror:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_LOOK_SECONDS)
        if share.num_hosts > 1 and ipaddress.ip_address(place[0]).is_loopback:
            raise LaunchError(
                given=f"{given}, on host {here}",
                conflict=f"there it is {place[0]}, which no other host reaches",
                remedy="give the address by which the other hosts reach it, or mend /etc/hosts there",
            )
        return socket.create_server(place, family=family)
    except LaunchError:
        raise
    except OSError as error:
        why = str(error.strerror or error).partition(" (while")[0]  # create_server adds the address
        raise LaunchError(
            given=f"{given}, on host {here}",
            conflict=f"nothing can listen there: {why}",
            remedy="check that rank 0 was started on the host of that address, and that the port is free there",
        ) from None
