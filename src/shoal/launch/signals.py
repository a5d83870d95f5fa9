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

# A scheduler tells the whole process group, and so does the launcher that it told: that is one request.
SAME_SECONDS = 1.0


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask to stop: SIGTERM, SIGUSR1, and of Ctrl-C and the terminal's end those that are not ignored.

    A shell ignores SIGINT for the background commands of a script, and nohup ignores SIGHUP. SIGUSR1 is what schedulers
    are asked to send before a time limit, and what Open MPI's mpirun hands on.
    """
    ignorable = (signal.SIGINT, signal.SIGHUP)
    return (signal.SIGTERM, signal.SIGUSR1, *(n for n in ignorable if signal.getsignal(n) is not signal.SIG_IGN))


@dataclass
class Signals:
    """Signals that arrived. `impatient`: the second of a kind ends this process at once.

    Deliveries of one kind within a second are one. One of each kind is no impatience: a scheduler may send SIGTERM when
    the terminal has sent SIGINT.
    """

    impatient: bool
    received: list[int] = field(default_factory=list)
    clock: Callable[[], float] = time.monotonic
    _taken: dict[int, float] = field(default_factory=dict, repr=False)

    @property
    def twice(self) -> bool:
        """Whether one kind has arrived again."""
        return len(set(self.received)) < len(self.received)

    def takes(self, number: int) -> bool:
        """Notes a delivery; whether it is a request of its own."""
        now = self.clock()
        if now - self._taken.get(number, -math.inf) < SAME_SECONDS:
            return False
        self._taken[number] = now
        self.received.append(number)
        return True

    def wait(self, seconds: float) -> bool:
        """Waits so long, or until one arrives; whether one did."""
        deadline = self.clock() + seconds
        while not self.received and self.clock() < deadline:
            time.sleep(0.05)
        return bool(self.received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.takes(number) and self.impatient and self.twice:
            os._exit(ExitCode.INTERRUPTED)

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """A context in which they are noted and end nothing; in another than the main thread they stay as they are."""
        if not _in_main_thread():
            yield
            return
        before = {n: signal.signal(n, self._handle) for n in stop_signals()}
        if LAUNCHER_PID in os.environ:  # a rank of a fork server has them wait until here
            signal.pthread_sigmask(signal.SIG_UNBLOCK, before)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _in_main_thread() -> bool:
    """Whether this thread may set handlers."""
    return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def pausing(tell: Callable[[int], None]) -> Iterator[None]:
    """A context in which Ctrl-Z tells other processes SIGSTOP before this one stops, and SIGCONT once it goes on."""

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
    """A process's end in words: "was killed by SIGKILL" of code -9, else "ended with code N"."""
    with contextlib.suppress(ValueError):
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
    return f"ended with code {code}"
