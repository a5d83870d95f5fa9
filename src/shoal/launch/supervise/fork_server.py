"""Fork server of a host's ranks: a process that has loaded torch and forks each rank.

The server loads none of the job's code, computes nothing and starts no thread. A forked rank therefore equals a fresh
interpreter. In three cases the server refuses, and ranks are fresh interpreters: code that Python loads by itself
(sitecustomize, a preloaded library) has started threads; CUDA is initialised; the system is not Linux.
Variables that libraries read once, when they load (OMP_*, LD_*, CUDA_*), are the same in both cases. The server has the
launcher's environment, to which a rank adds only the variables of shoal and of the rendezvous.
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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from shoal.hardware.detect import GPU_FOLDER
from shoal.launch.environment import FORK_FD, LAUNCHER_PID
from shoal.launch.signals import stop_signals
from shoal.launch.supervise.child import Child, adopting, die_with_launcher, forked, kill, name_process, standstill

_MOST_BYTES = 1 << 16
_MOST_DESCRIPTORS = 8
_LOOK_SECONDS = 0.02
# A server that is stopped for longer is lost.
_STOPPED_SECONDS = 5.0


class ForkedProcess:
    """Child of this process that the fork server has forked, with the methods of subprocess.Popen that are used."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the process runs."""
        if self.returncode is None:
            pid, status = 1, 0
            with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored: the code is lost, as in subprocess
                if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(self.pid, signal.SIGKILL)  # what the job's code has started
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process ends and return its exit code. Raises: subprocess.TimeoutExpired."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(_LOOK_SECONDS / 4)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal if the process has not ended. Its id stays its own until `poll` returns its exit code."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL if the process has not ended."""
        self.send_signal(signal.SIGKILL)


Process: TypeAlias = "subprocess.Popen[Any] | ForkedProcess"


class ForkServer:
    """Launcher's end of a fork server, whose ranks get these `shoal` arguments and threads. Call `close` at the end.

    The ranks are children of this process, so that it notices their ends whatever the server does.
    """

    def __init__(self, arguments: Sequence[str], num_threads: int) -> None:
        self._newest: ForkedProcess | None = None
        self._refused = False
        self._ready: bool | None = None if sys.platform == "linux" else False
        if self._ready is False:
            return
        self._moved_at = time.monotonic()  # when the server was seen to be neither stopped nor frozen
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # `ps` shows the arguments of the ranks for the server and for each rank.
            threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(num_threads))}
            self._process = fresh_interpreter(arguments, threads, {FORK_FD: theirs.fileno()}, None)

    def until_loaded(self, stop: Callable[[], bool]) -> bool:
        """Wait until the server has loaded torch or has refused. Return False if `stop` returns True before."""
        while self._ready is None:
            if stop():
                return False
            self._hear()
        return True

    def start(
        self, variables: Mapping[str, str], descriptors: Mapping[str, int], output: int | None
    ) -> ForkedProcess | None:
        """Start a process with these additional variables; None if the caller has to start a fresh interpreter.

        `descriptors`: descriptors that the process inherits, by the variable that gives their number in the process.
        `output`: a descriptor for its output, if that is not this process's own output.
        """
        if not self._ready:
            return None
        request = {"variables": dict(variables), "descriptors": list(descriptors), "output": output is not None}
        sent = [*descriptors.values(), *([output] if output is not None else [])]
        self._newest, self._refused, self._moved_at = None, False, time.monotonic()
        with adopting():
            try:
                socket.send_fds(self._requests, [json.dumps(request).encode()], sent)
            except OSError:
                self.close()
            while self._ready and self._newest is None and not self._refused:
                self._hear()
        return self._newest

    def _hear(self) -> None:
        """Wait a moment for the server's next message. The server is lost if it ends or is stopped for 5 s."""
        look = select.poll()  # a new object: a handler of Ctrl-Z may interrupt another poll; select has few files
        look.register(self._requests, select.POLLIN)
        if not look.poll(math.ceil(_LOOK_SECONDS * 1000)):
            if not standstill(self._process.pid):
                self._moved_at = time.monotonic()
            elif time.monotonic() - self._moved_at > _STOPPED_SECONDS:
                self.close()
            return
        text = b""
        with contextlib.suppress(OSError):  # the server may have died with a request unread
            text = self._requests.recv(_MOST_BYTES)
        message = json.loads(text or "{}")
        if not message:
            self.close()
        elif "ready" in message:
            self._ready = True
        elif message["pid"] is None:
            self._refused = True
        else:
            self._newest = ForkedProcess(message["pid"])

    def close(self) -> None:
        """End the server. The ranks that it has forked are children of this process and continue."""
        if self._ready is not False or sys.platform == "linux":
            self._ready = False
            kill(self._process)
            self._process.wait()
            self._requests.close()


def fresh_interpreter(
    arguments: Sequence[str], variables: Mapping[str, str], descriptors: Mapping[str, int], output: int | None
) -> subprocess.Popen[str]:
    """Start an interpreter with these `shoal` arguments; the other parameters are those of `ForkServer.start`."""
    numbers = {name: str(descriptor) for name, descriptor in descriptors.items()}
    return Child(
        [sys.executable, "-m", "shoal", *arguments],
        variables={**variables, **numbers, LAUNCHER_PID: str(os.getpid())},
        descriptors=list(descriptors.values()),
        output=output,
        errors=output,
    ).process


# ---------------------------------------------------------------------------------------------------- in the server


def become_rank(load: Callable[[], object], *, holds_signals: bool) -> None:
    """Make this process a fork server that has called `load`. The call returns only in each forked process.

    If `holds_signals`, signals that ask a rank to stop wait until `Signals.handled` unblocks them. Else they end it.
    """
    descriptor = int(os.environ.pop(FORK_FD))
    # Only the ranks handle these signals; the threads of numpy inherit the mask too.
    handlers = {number: signal.signal(number, lambda *_: None) for number in stop_signals()}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, handlers)
    die_with_launcher()
    name_process("shoal-forks")
    with socket.socket(fileno=descriptor) as requests:
        try:
            if not _loaded(load):
                os._exit(0)
            requests.send(b'{"ready": true}')
            is_rank = _serve(requests)
        except BaseException:  # of an import, for example: fresh interpreters will show the error
            os._exit(1)
    if not is_rank:
        os._exit(0)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if not holds_signals:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _loaded(load: Callable[[], object]) -> bool:
    """Load what ranks need and return whether this process may be forked.

    Threads of numpy do not prevent a fork: OpenBLAS ends them before a fork and restarts them on demand.
    """
    alone = _num_threads() == 1 or "numpy" in sys.modules  # first: numpy's threads look like others'
    with contextlib.suppress(ImportError):
        importlib.import_module("numpy.random")
    threads = _num_threads()
    load()
    gc.collect()
    gc.freeze()  # otherwise a collection in a rank would copy every page
    if not alone or _num_threads() != threads or threading.active_count() != 1:
        return False
    # torch refuses GPUs in a fork, as after torch.cuda.is_available(). Only a fork can tell.
    cuda = sys.modules["torch"].cuda
    if cuda.is_initialized():
        return False
    if not GPU_FOLDER.exists():
        return True
    pid = os.fork()
    if not pid:
        os._exit(cuda._is_in_bad_fork())
    return os.waitpid(pid, 0)[1] == 0


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _serve(requests: socket.socket) -> bool:
    """Serve fork requests. Return True in each forked process, which is a rank, and False once the launcher is gone.

    A process between server and rank ends at once, so that the rank becomes a child of the launcher.
    """
    while True:
        text, descriptors, _, _ = socket.recv_fds(requests, _MOST_BYTES, _MOST_DESCRIPTORS)
        if not text:
            return False
        between: int | None = None
        with contextlib.suppress(OSError):  # the system can create no more processes
            between = forked()
        if between == 0:
            between = os.getpid()
            if forked():
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.0005)
            if os.getppid() != int(os.environ[LAUNCHER_PID]):
                os._exit(1)
            requests.send(json.dumps({"pid": os.getpid()}).encode())
            request = json.loads(text)
            output = descriptors.pop() if request["output"] else None
            numbers = {n: str(number) for n, number in zip(request["descriptors"], descriptors, strict=True)}
            _become_fresh({**request["variables"], **numbers}, output)
            return True
        if between is None or os.waitpid(between, 0)[1]:
            requests.send(b'{"pid": null}')
        for descriptor in descriptors:
            os.close(descriptor)


def _become_fresh(variables: Mapping[str, str], output: int | None) -> None:
    """Turn this fork of the server into the process that a fresh interpreter would be."""
    os.setsid()
    if output is not None:
        for standard in (1, 2):
            os.dup2(output, standard)
        os.close(output)
    os.environ.update(variables)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # otherwise ranks draw the same if nobody seeds; `random` reseeds itself
