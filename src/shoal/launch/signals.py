"""Signal handling: requests to stop, from a command's first moment to its last, and to pause."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType

from shoal.errors import ExitCode
from shoal.launch.environment import LAUNCHER_PID

# `timeout` signals a command and then the command's group, and so do a shell's traps: this counts as one request.
BURST_SECONDS = 1.0


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask to stop: SIGTERM, SIGUSR1, and SIGINT and SIGHUP unless they are ignored.

    A shell ignores SIGINT for the background commands of a script, and nohup ignores SIGHUP. Schedulers can send
    SIGUSR1 before a time limit, and Open MPI's mpirun forwards SIGUSR1.
    """
    ignorable = (signal.SIGINT, signal.SIGHUP)
    return (signal.SIGTERM, signal.SIGUSR1, *(n for n in ignorable if signal.getsignal(n) is not signal.SIG_IGN))


@contextlib.contextmanager
def handling(numbers: Iterable[int], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle signals during the context, and restore their handlers afterwards."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, known in before.items():
            signal.signal(number, known)


@dataclass
class Signals:
    """Requests to stop, by the numbers of their signals. If `impatient`, a second one of a kind ends this process.

    A signal of another kind is not a second request: a scheduler may send SIGTERM after the terminal has sent SIGINT.
    Nor is one that a launcher hands on, which may have arrived from the scheduler too. Launchers therefore tell it
    apart by a message of their own (`from_launcher`), and the ranks that a launcher has started are never impatient:
    a launcher that wants a rank to end at once sends SIGKILL.
    """

    impatient: bool
    received: list[int] = field(default_factory=list)
    clock: Callable[[], float] = time.monotonic
    _directly: Counter[int] = field(default_factory=Counter, repr=False)
    _handed_on: Counter[int] = field(default_factory=Counter, repr=False)
    _newest: dict[int, float] = field(default_factory=dict, repr=False)

    @property
    def twice(self) -> bool:
        """True if one kind of signal has been requested again."""
        return len(set(self.received)) < len(self.received)

    def takes(self, number: int, *, from_launcher: bool = False) -> bool:
        """Record a delivery, by a signal or by a launcher's message. Return True if it is a request of its own."""
        if not from_launcher:
            now = self.clock()
            if now - self._newest.get(number, -math.inf) < BURST_SECONDS:
                return False
            self._newest[number] = now
        deliveries = self._handed_on if from_launcher else self._directly
        deliveries[number] += 1
        if deliveries[number] <= self.received.count(number):  # it has arrived the other way
            return False
        self.received.append(number)
        return True

    def wait(self, seconds: float) -> bool:
        """Wait for `seconds` or until a signal arrives. Return whether one has arrived."""
        deadline = self.clock() + seconds
        while not self.received and self.clock() < deadline:
            time.sleep(0.05)
        return bool(self.received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.takes(number) and self.impatient and self.twice:
            os._exit(ExitCode.INTERRUPTED)

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Record signals during the context, without any other effect. Outside the main thread, nothing changes."""
        numbers = stop_signals() if _in_main_thread() else ()
        with handling(numbers, self._handle):
            if LAUNCHER_PID in os.environ:  # in a rank of a fork server, the signals are blocked until here
                signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
            yield


def _in_main_thread() -> bool:
    """Check whether this thread may set handlers."""
    return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def pausing(tell: Callable[[int], None]) -> Iterator[None]:
    """Handle Ctrl-Z: other processes get SIGSTOP before this process stops, and SIGCONT after it continues."""

    def handle(number: int, frame: FrameType | None) -> None:
        tell(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        tell(signal.SIGCONT)

    is_ignored = signal.getsignal(signal.SIGTSTP) is signal.SIG_IGN
    with handling(() if is_ignored or not _in_main_thread() else (signal.SIGTSTP,), handle):
        yield


# -------------------------------------------------------------------------------------- without a record of requests


@contextlib.contextmanager
def exiting(numbers: Iterable[int], code: int | None = None) -> Iterator[None]:
    """Make signals that are not ignored raise SystemExit, which removes temporary folders. Later ones are ignored.

    `code`: the exit code; default: 128 and the signal's number, as of a shell.
    """
    received: list[int] = []

    def leave(number: int, frame: FrameType | None) -> None:
        for again in handled:
            signal.signal(again, signal.SIG_IGN)
        received.append(number)
        sys.exit(128 + number if code is None else code)

    def repeat(dropped: sys.UnraisableHookArgs) -> None:
        """Raise it again, a moment later, where a finalizer or a callback of C was running and dropped it."""
        if dropped.exc_type is not SystemExit or not received:
            hook(dropped)
            return
        signal.signal(received[0], leave)
        threading.Timer(0.05, os.kill, (os.getpid(), received[0])).start()

    handled = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    hook = sys.unraisablehook
    with handling(handled, leave):
        sys.unraisablehook = repeat
        try:
            yield
        finally:
            sys.unraisablehook = hook


def handle_stop_signals(handler: signal.Handlers) -> None:
    """Set what this process does at requests to stop.

    SIG_IGN is for a process that ends with the process that started it. SIG_DFL, which ends this process, is for a fork
    of a process that records the requests.
    """
    for number in stop_signals():
        signal.signal(number, handler)
