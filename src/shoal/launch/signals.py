"""Signal handling: SIGTERM and Ctrl-C as requests to stop, from a command's first moment to its last."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType

from shoal.errors import ExitCode


@dataclass
class Signals:
    """Signals that arrived. `impatient`: the second of a kind ends this process at once.

    One of each kind is no impatience: a scheduler may send SIGTERM where the terminal has sent SIGINT.
    """

    impatient: bool
    received: list[int] = field(default_factory=list)

    @property
    def twice(self) -> bool:
        """Whether one kind has arrived again."""
        return len(set(self.received)) < len(self.received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        if self.impatient and self.twice:
            os._exit(ExitCode.INTERRUPTED)

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """A context in which they are noted and end nothing."""
        before = {n: signal.signal(n, self._handle) for n in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
