"""Stop requests of a Session with checkpoints: SIGTERM and Ctrl-C end its loop after a step."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from shoal.errors import ExitCode

_DEFAULTS: dict[signal.Signals, Callable[[int, FrameType | None], Any] | signal.Handlers] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}


class Asked:
    """Signals that arrived; the second of a kind has its default effect."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._elsewhere = False
        self._ended = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number in self.received:
            self._ended = True
            signal.signal(number, _DEFAULTS[signal.Signals(number)])
            signal.raise_signal(number)
            return
        self.received.append(number)
        name = signal.Signals(number).name
        # By the descriptor: a signal may come in the midst of a print.
        os.write(2, f"shoal: {name}: stops before the next step, with a checkpoint; again to stop at once\n".encode())

    @contextlib.contextmanager
    def noted(self, wanted: bool) -> Iterator[None]:
        """A context in which they are noted, where `wanted` and nobody else handles them."""
        mine = [n for n, handler in _DEFAULTS.items() if signal.getsignal(n) is handler]
        if not wanted or threading.current_thread() is not threading.main_thread():
            mine = []
        for number in mine:
            signal.signal(number, self._handle)
        try:
            yield
        finally:
            for number in mine:
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, _DEFAULTS[number])
            if signal.SIGTERM in self.received and not self._ended:  # the loop was left for another reason
                signal.raise_signal(signal.SIGTERM)

    def tell(self, anywhere: bool) -> None:
        """Notes that the loop was left on all ranks, and that one of them was asked to stop before."""
        self._elsewhere = anywhere

    def insist(self, error: BaseException | None = None) -> None:
        """Raises: what ends a rank, once, where a loop was left by other means than the request to stop.

        A generator that is closed by a break can raise nothing itself. An `error` under way ends the rank too: an exit
        without a word would hide it.
        """
        interrupted = signal.SIGINT in self.received
        if not self._ended and (interrupted or (self._elsewhere and error is None)):
            raise self.end()

    def end(self) -> BaseException:
        """Exception that ends this rank's loop, whichever rank got the signal."""
        self._ended = True
        if signal.SIGINT in self.received:
            return KeyboardInterrupt()
        print("shoal: stopped on request; Session(resume=True) goes on", file=sys.stderr)
        return SystemExit(int(ExitCode.PREEMPTED))
