"""Fork server of a host's ranks: a process that has loaded torch, and of which each rank is a copy.

It loads no code of the job's, computes nothing and starts no thread, so that a copy is what a fresh interpreter would
be. Where that is not so it says so, and ranks are fresh interpreters: where something that Python loads by itself
(sitecustomize, a preloaded library) has started threads, where CUDA is initialised, and on other systems than Linux.
What libraries read once as they load (OMP_*, LD_*, CUDA_*) is the same in both: the server has the launcher's
environment, and a rank has only names of shoal's and of the rendezvous in addition.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from shoal.hardware.detect import GPU_FOLDER
from shoal.launch.environment import FORK_FD, LAUNCHER_PID
from shoal.launch.process_control import die_with_launcher, name_process
from shoal.launch.signals import stop_signals

_MOST_BYTES = 1 << 16
_MOST_DESCRIPTORS = 8
_LOOK_SECONDS = 0.02


class ForkedProcess:
    """Process that the fork server has started: what its launcher uses of subprocess.Popen."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        self._server.hear()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end; the exit code. Raises: subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0.0:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self._server.hear(left)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """A signal, where it has not ended. The server tells of an end before it frees the process id."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, where it has not ended."""
        self.send_signal(signal.SIGKILL)


Process: TypeAlias = "subprocess.Popen[bytes] | ForkedProcess"


class ForkServer:
    """Launcher's end of a fork server, for ranks with these `shoal` arguments and threads each; to be closed.

    Not thread-safe: the server and its ranks die with the thread that made it.
    """

    def __init__(self, arguments: Sequence[str], num_threads: int) -> None:
        self._processes: dict[int, ForkedProcess] = {}
        self._newest: ForkedProcess | None = None
        self._refused = False
        self._ready: bool | None = None if sys.platform == "linux" else False
        if self._ready is False:
            return
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # With the arguments of its ranks, which `ps` shows of them too.
            threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(num_threads))}
            self._process = fresh_interpreter(arguments, threads, {FORK_FD: theirs.fileno()}, None)

    def until_loaded(self, stop: Callable[[], bool]) -> bool:
        """Waits until it has loaded torch, or cannot; False where `stop` says so before."""
        while self._ready is None:
            if stop():
                return False
            self.hear(_LOOK_SECONDS)
        return True

    def start(
        self, variables: Mapping[str, str], descriptors: Mapping[str, int], output: int | None
    ) -> ForkedProcess | None:
        """A process with these variables in addition; None where a fresh interpreter has to be taken.

        `descriptors`: of this process, which it inherits, by the variable that gives their number there.
        `output`: a descriptor for what it prints, if not this process's own.
        """
        if not self._ready:
            return None
        asked = {"variables": dict(variables), "descriptors": list(descriptors), "output": output is not None}
        handed = [*descriptors.values(), *([output] if output is not None else [])]
        self._newest, self._refused = None, False
        try:
            socket.send_fds(self._requests, [json.dumps(asked).encode()], handed)
        except OSError:
            self._lose()
        while self._ready and self._newest is None and not self._refused:
            self.hear(None)
        return self._newest

    def hear(self, seconds: float | None = 0.0) -> None:
        """Takes note of what the server tells; waits so long for the first of it, None: without end."""
        while self._ready is not False and self._has_told(seconds):
            text = b""
            with contextlib.suppress(OSError):  # it may have died with a request unread
                text = self._requests.recv(_MOST_BYTES)
            if not text:
                self._lose()
                return
            self._take(json.loads(text))
            seconds = 0.0

    def _has_told(self, seconds: float | None) -> bool:
        """Whether there is something to hear within so long; with poll, since a user's process may have many files."""
        look = select.poll()  # its own: a handler of Ctrl-Z may come here in the midst of another's
        look.register(self._requests, select.POLLIN)
        return bool(look.poll(None if seconds is None else math.ceil(seconds * 1000)))

    def close(self) -> None:
        """Ends it, and its ranks."""
        if sys.platform == "linux":
            self._lose()
            self._requests.close()

    def _take(self, told: dict[str, Any]) -> None:
        if "ready" in told:
            self._ready = True
        elif "status" in told:
            self._processes.pop(told["pid"]).returncode = told["status"]
        elif told["pid"] is None:
            self._refused = True
        else:
            self._newest = self._processes[told["pid"]] = ForkedProcess(self, told["pid"])

    def _lose(self) -> None:
        """Ends it and what is left of its ranks, of whose ends nobody would tell."""
        self._ready = False
        self._process.kill()
        self._process.wait()
        for pid, process in self._processes.items():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            process.returncode = -signal.SIGKILL
        self._processes.clear()


def fresh_interpreter(
    arguments: Sequence[str], variables: Mapping[str, str], descriptors: Mapping[str, int], output: int | None
) -> subprocess.Popen[bytes]:
    """An interpreter with these `shoal` arguments; the others as of `ForkServer.start`."""
    numbers = {name: str(descriptor) for name, descriptor in descriptors.items()}
    return subprocess.Popen(
        [sys.executable, "-m", "shoal", *arguments],
        env={**os.environ, **variables, **numbers, LAUNCHER_PID: str(os.getpid())},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=list(descriptors.values()),
        start_new_session=True,  # a Ctrl-C in the terminal reaches the launcher only, which tells them once
    )


# ---------------------------------------------------------------------------------------------------- in the server


@dataclass(frozen=True)
class _Rank:
    """What a forked process becomes."""

    variables: dict[str, str]
    inherited: dict[str, int]
    output: int | None


def become_rank(load: Callable[[], object], *, holds_signals: bool) -> None:
    """Makes this process a fork server that has called `load`; returns in each process that it forks alone.

    `holds_signals`: whether what asks a rank to stop waits until `Signals.handled` takes it; else it ends the rank.
    """
    descriptor = int(os.environ.pop(FORK_FD))
    # They are for the ranks alone; threads of numpy take them too.
    handlers = {number: signal.signal(number, lambda *_: None) for number in stop_signals()}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, handlers)
    die_with_launcher()
    name_process("shoal-forks")
    with socket.socket(fileno=descriptor) as requests:
        try:
            if not _loaded(load):
                os._exit(0)
            requests.send(b'{"ready": true}')
            rank = _forked(requests)
        except BaseException:  # of an import, say: fresh interpreters will tell it
            os._exit(1)
    if rank is None:
        os._exit(0)
    _take_on(rank)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if not holds_signals:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _loaded(load: Callable[[], object]) -> bool:
    """Loads what ranks need; whether this process may be copied.

    numpy's own threads are no hindrance: OpenBLAS ends them before a fork, and starts them again where it needs them.
    """
    alone = _num_threads() == 1 or "numpy" in sys.modules  # before this: nobody can tell its threads from others
    with contextlib.suppress(ImportError):
        importlib.import_module("numpy.random")
    threads = _num_threads()
    load()
    gc.collect()
    gc.freeze()  # or a collection in a rank would copy every page
    still = _num_threads() == threads and threading.active_count() == 1
    return alone and still and _tells_of_ends() and not _has_used_a_gpu()


def _tells_of_ends() -> bool:
    """Whether the end of a process can be waited for here: old kernels and some containers have no pidfd_open."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def _has_used_a_gpu() -> bool:
    """Whether torch would refuse GPUs in a copy, as after torch.cuda.is_available(); only a copy can tell."""
    cuda = sys.modules["torch"].cuda
    if cuda.is_initialized():
        return True
    if not GPU_FOLDER.exists():
        return False
    pid = os.fork()
    if not pid:
        os._exit(cuda._is_in_bad_fork())
    return os.waitpid(pid, 0)[1] != 0


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _forked(requests: socket.socket) -> _Rank | None:
    """Forks as it is asked to: what a child is to become, in the child; None once nobody can ask any more."""
    running: dict[int, int] = {}  # process id by a descriptor that can be read once it has ended
    while True:
        ready = select.select([requests.fileno(), *running], [], [])[0]
        for descriptor in set(ready) & set(running):
            pid = running.pop(descriptor)
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            assert ended is not None
            status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            requests.send(json.dumps({"pid": pid, "status": status}).encode())
            os.waitpid(pid, 0)
            os.close(descriptor)
        if requests.fileno() in ready:
            text, descriptors, _, _ = socket.recv_fds(requests, _MOST_BYTES, _MOST_DESCRIPTORS)
            if not text:
                return None
            asked, server = json.loads(text), str(os.getpid())
            sys.stdout.flush()  # what is buffered is not the child's to write
            sys.stderr.flush()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of threads: there are none but numpy's
                child = _fork()
            if child == 0:
                for descriptor in running:
                    os.close(descriptor)
                output = descriptors.pop() if asked["output"] else None
                inherited = dict(zip(asked["descriptors"], descriptors, strict=True))
                return _Rank({**asked["variables"], LAUNCHER_PID: server}, inherited, output)
            requests.send(json.dumps({"pid": child}).encode())
            if child is not None:
                running[os.pidfd_open(child)] = child
            for descriptor in descriptors:
                os.close(descriptor)


def _fork() -> int | None:
    """As os.fork; None where the system has no more processes."""
    with contextlib.suppress(OSError):
        return os.fork()
    return None


def _take_on(rank: _Rank) -> None:
    """Makes this process, a copy of the server, what a fresh interpreter would be that the launcher starts."""
    os.setsid()
    if rank.output is not None:
        for standard in (1, 2):
            os.dup2(rank.output, standard)
        os.close(rank.output)
    os.environ.update(rank.variables)
    os.environ.update({name: str(descriptor) for name, descriptor in rank.inherited.items()})
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # or all ranks would draw the same where nobody seeds; `random` does itself
