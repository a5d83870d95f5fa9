"""Signal handling: requests to stop, from a command's first moment to its last, and to pause."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType

from shoal.errors import ExitCode
from shoal.launch.environment import LAUNCHER_PID

# A scheduler signals the whole process group, and so does the launcher it signals: this counts as one request.
SAME_SECONDS = 1.0


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask to stop: SIGTERM, SIGUSR1, and SIGINT and SIGHUP unless they are ignored.

    A shell ignores SIGINT for the background commands of a script, and nohup ignores SIGHUP. Schedulers can send
    SIGUSR1 before a time limit, and Open MPI's mpirun forwards SIGUSR1.
    """
    ignorable = (signal.SIGINT, signal.SIGHUP)
    return (signal.SIGTERM, signal.SIGUSR1, *(n for n in ignorable if signal.getsignal(n) is not signal.SIG_IGN))


@dataclass
class Signals:
    """Signals that arrived. If `impatient`, a second signal of one kind ends this process at once.

    Deliveries of one kind within a second count once. A signal of another kind does not count as a second one: a
    scheduler may send SIGTERM after the terminal has sent SIGINT.
    """

    impatient: bool
    received: list[int] = field(default_factory=list)
    clock: Callable[[], float] = time.monotonic
    _taken: dict[int, float] = field(default_factory=dict, repr=False)

    @property
    def twice(self) -> bool:
        """Whether one kind of signal has arrived again."""
        return len(set(self.received)) < len(self.received)

    def takes(self, number: int) -> bool:
        """Record a delivery. Return whether it is a separate request."""
        now = self.clock()
        if now - self._taken.get(number, -math.inf) < SAME_SECONDS:
            return False
        self._taken[number] = now
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
        if not _in_main_thread():
            yield
            return
        before = {n: signal.signal(n, self._handle) for n in stop_signals()}
        if LAUNCHER_PID in os.environ:  # in a rank of a fork server, the signals are blocked until here
            signal.pthread_sigmask(signal.SIG_UNBLOCK, before)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


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

    if signal.getsignal(signal.SIGTSTP) is signal.SIG_IGN or not _in_main_thread():
        yield
        return
    before = signal.signal(signal.SIGTSTP, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, before)


def how_it_ended(code: int) -> str:
    """Describe the end of a process: "was killed by SIGKILL" for code -9, else "ended with code N"."""
    with contextlib.suppress(ValueError):
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
    return f"ended with code {code}"
