"""Agreement of a Session's ranks before each pass, and when a rank leaves the loop or a signal requests a stop."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from shoal.distributed.mesh import Agreement, Mesh, from_rows
from shoal.errors import ExitCode, JobError, PeerError
from shoal.launch.environments.detect import has_launcher
from shoal.launch.signals import Signals

_DEFAULTS: dict[signal.Signals, Callable[[int, FrameType | None], Any] | signal.Handlers] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
    signal.SIGHUP: signal.SIG_DFL,
}


class StopRequests:
    """Signals that have arrived. The second signal of a kind has its default effect, unless a launcher sends them.

    A launcher kills a rank that has to end at once. What it hands on may have arrived from a scheduler before.
    """

    def __init__(self) -> None:
        self._signals, self._launched = Signals(impatient=False), has_launcher(os.environ)
        self.received = self._signals.received
        self.elsewhere = False  # whether any rank was requested to stop before all left the loop
        self._ended = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._signals.takes(number):
            return
        if self._signals.twice and self._launched:
            return
        if self._signals.twice:
            self._ended = True
            signal.signal(number, _DEFAULTS[signal.Signals(number)])
            signal.raise_signal(number)
            return
        name = signal.Signals(number).name
        # Write to the descriptor: a signal may interrupt a print.
        again = "" if self._launched else "; again to stop at once"
        with contextlib.suppress(OSError):
            os.write(2, f"shoal: {name}: stops before the next step, with a checkpoint{again}\n".encode())

    @contextlib.contextmanager
    def noted(self, wanted: bool) -> Iterator[None]:
        """Return a context that records signals, if `wanted` and nobody else handles them."""
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
            left = [n for n in self.received if n != signal.SIGINT]
            if left and not self._ended:  # the loop was left for another reason
                signal.raise_signal(left[0])

    def insist(self, error: BaseException | None = None) -> None:
        """Raise the exception that ends this rank, once, if a stop was requested but the loop ended otherwise.

        A generator that a break closes cannot raise by itself. With an `error` under way, only Ctrl-C raises: a silent
        exit would hide the error.
        """
        interrupted = signal.SIGINT in self.received
        if not self._ended and (interrupted or (self.elsewhere and error is None)):
            raise self.end()

    def end(self) -> BaseException:
        """Return the exception that ends this rank's loop, whichever rank got the signal."""
        self._ended = True
        if signal.SIGINT in self.received:
            return KeyboardInterrupt()
        print("shoal: stopped on request; Session(resume=True) goes on", file=sys.stderr)
        return SystemExit(int(ExitCode.PREEMPTED))


@dataclass(frozen=True)
class Word:
    """One rank's contribution to a meeting, as numbers; flags are 0 or 1.

    `leaves`: the rank's loop has ended. `stop_requested`: by a signal. `error`: the rank's data could not be read.
    `step`: number of finished steps. `clean`: the state is exactly the state after these steps.
    `passes`: the optimizers of the pass that begins, one bit each. `groups`: a hash of their groups' values.
    `requests`: the requests of callbacks, one bit each.
    """

    leaves: float = False
    stop_requested: float = False
    error: float = False
    has_data: float = True
    checkpoint: float = False
    clean: float = True
    step: float = 0
    passes: float = 0
    groups: float = 0
    requests: float = 0


@dataclass(frozen=True)
class Meeting:
    """Contributions of all ranks, in rank order. `agreement`: the measures of their last step, if they record steps."""

    words: tuple[Word, ...]
    agreement: Agreement | None = None

    @property
    def ends(self) -> bool:
        """True if any rank leaves, or was requested to stop."""
        return any(word.leaves or word.stop_requested for word in self.words)

    @property
    def requests(self) -> int:
        """The requests of any rank's callbacks, one bit each."""
        return functools.reduce(operator.or_, (int(word.requests) for word in self.words))

    @property
    def clean(self) -> bool:
        """True if all ranks have the same state, after a finished step."""
        return all(word.clean and word.step == self.words[0].step for word in self.words)

    def differ(self, name: str) -> bool:
        """Return True if ranks have different values of the field `name`."""
        return len({getattr(word, name) for word in self.words}) > 1

    def left(self, step: int) -> PeerError:
        """Return the error for the ranks that have not left."""
        gone = [rank for rank, word in enumerate(self.words) if word.leaves]
        return PeerError(
            given=f"rank {', '.join(map(str, gone))} left the loop after {step} steps (break, return or exception)",
            conflict="the ranks of a Session take every step together",
            remedy="leave the loop on all ranks after the same step: decide by what is the same on all of them, as "
            "step.loss and session.evaluate() are",
        )

    def behind(self, step: int) -> PeerError:
        """Return the error for ranks that have finished the last step if another rank has not."""
        others = [rank for rank, word in enumerate(self.words) if not word.clean or word.step != step]
        return PeerError(
            given=f"rank {', '.join(map(str, others))} between two updates of a step that is finished elsewhere",
            conflict="the ranks of a Session take every step together",
            remedy="make the same updates on all ranks, and look at what that rank said",
        )


def meet(mesh: Mesh, word: Word, row: list[float]) -> Meeting:
    """Gather the words of all ranks, and a `row` of the same length from each: a report on the last step, or nothing.

    Collective: all ranks, one all-gather of 10 numbers and the row per rank.
    """
    said = [float(number) for number in vars(word).values()]
    table = mesh.all_gather([*said, *row])
    agreement = from_rows(table[:, len(said) :]) if row else None
    return Meeting(tuple(Word(*own) for own in table[:, : len(said)].tolist()), agreement)


def groups_differ(mesh: Mesh, values: list[dict[str, str]], step: int) -> JobError:
    """Return the error for parameter groups that differ between ranks. Collective: all ranks, a JSON gather."""
    rows = mesh.gather_json(values)
    difference = "their number"
    for rank, other in enumerate(rows):
        for number, (mine, theirs) in enumerate(zip(rows[0], other, strict=False)):
            key = next((k for k in mine if mine[k] != theirs.get(k)), None)
            if key is not None:
                difference = f"group {number}: {key} = {mine[key]} on rank 0 and {theirs.get(key)} on rank {rank}"
                break
    return JobError(
        given=f"parameter groups that differ between the ranks before step {step}: {difference}",
        conflict="every rank makes the same update, or the models drift apart",
        remedy="change groups, and step schedulers, by what is the same on all ranks: step.loss, session.evaluate()",
    )
