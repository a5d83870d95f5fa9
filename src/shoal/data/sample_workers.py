"""Worker processes that read samples for a rank, of torch's DataLoader, and new ones where they die or hang."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from shoal.data.source import SHARED_MEMORY
from shoal.errors import DataError, text_of

# A death is noticed after so long. torch would look every 5 s, or raise wherever the rank happens to be by then.
_LOOK_SECONDS = 0.25
# A batch is waited for so long, or three times the longest wait: less than a rank that waits is given by its launcher.
_LEAST_SECONDS, _TIMES = 4.0, 3.0
_FIRST_SECONDS = 300.0  # for the first batch of all, with the import of whatever a dataset needs
_TIMES_AGAIN = 4.0  # a batch that was waited for in vain may take so much longer the next time
_MOST_IN_A_ROW = 3
_OWN_MESSAGE = "look for its own message above; data.workers = 0 reads in the rank itself"


class SampleWorkers:
    """Worker processes that give one batch a request.

    `load` makes torch's DataLoader from a request on; `told` takes a sentence and the seconds that were lost where the
    processes had to be started anew. `given_seconds`: for one batch, where the user's own loader says it.
    """

    def __init__(
        self,
        load: Callable[[Any], DataLoader[Any]],
        told: Callable[[str, float], None],
        given_seconds: float = 0.0,
    ) -> None:
        self._load, self._told, self._given = load, told, given_seconds
        self._batches: Iterator[Any] | None = None
        self._watch: _Watch | None = None
        self._longest = 0.0
        self._in_a_row = 0

    def next(self, request: Any) -> Any:
        """The batch of a request, which is the one after the last. Raises: DataError where workers die or hang."""
        while True:
            began = time.monotonic()
            if self._batches is None:
                self._start(request)
            why, dead = self._wait(began)
            if why is None:
                self._in_a_row, self._longest = 0, max(self._longest, time.monotonic() - began)
                return self._batch
            self._kill()
            self.close()
            self._in_a_row += 1
            if self._in_a_row > _MOST_IN_A_ROW:
                raise _failed(f"{why}, {self._in_a_row} times in a row", dead)
            self._told(why, time.monotonic() - began)

    def _start(self, request: Any) -> None:
        here = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGCHLD) if here else None
        self._batches = iter(self._load(request))
        self._watch = _Watch(self._kill)
        if here:  # torch's own raises in the midst of whatever the rank does when a worker dies
            signal.signal(signal.SIGCHLD, handler)

    def _wait(self, began: float) -> tuple[str | None, int | None]:
        """Waits for the next batch; why there is none, and the exit code of a worker that died."""
        batches, watch = self._batches, self._watch
        assert batches is not None
        assert watch is not None
        watch.until = began + self._limit()
        batches._timeout = _LOOK_SECONDS  # type: ignore[attr-defined]  # torch's iterator has no other way to set it
        while True:
            try:
                self._batch = next(batches)
            except (RuntimeError, EOFError, OSError) as error:
                if "in DataLoader worker process" in text_of(error):  # raised there, outside of reading: a user's init
                    raise _failed(text_of(error).strip().splitlines()[-1]) from error
                if isinstance(error, RuntimeError) and not text_of(error).startswith("DataLoader "):
                    raise
                workers = getattr(batches, "_workers", ())
                if watch.has_killed:
                    return f"a worker process gave no sample for {time.monotonic() - began:.0f} s", None
                codes = [worker.exitcode for worker in workers if not worker.is_alive()]
                if codes:
                    how = f"signal {signal.Signals(-codes[0]).name}" if (codes[0] or 0) < 0 else f"code {codes[0]}"
                    return f"a worker process that reads samples ended with {how}", codes[0]
            else:
                watch.until = math.inf
                return None, None

    def _limit(self) -> float:
        learned = max(_LEAST_SECONDS, _TIMES * self._longest) if self._longest else _FIRST_SECONDS
        return max(learned, self._given) * _TIMES_AGAIN**self._in_a_row

    def _kill(self) -> None:
        """Kills the processes: to one that is stopped, or waits for a lock of a dead one, nothing else gets through."""
        for worker in getattr(self._batches, "_workers", ()):
            worker.kill()

    def close(self) -> None:
        """Ends the processes."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        shutdown = getattr(self._batches, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()
            for worker in getattr(self._batches, "_workers", ()):
                if worker.is_alive():  # torch's own last resort is SIGTERM, which it ignores
                    worker.kill()
                    worker.join()
        self._batches = None


class _Watch:
    """Thread that calls `kill` once `until` is past: a rank that takes a batch from a stopped process hears nothing.

    `until` is on the clock of `time.monotonic`.
    """

    def __init__(self, kill: Callable[[], None]) -> None:
        self.until, self.has_killed = math.inf, False
        self._kill, self._ended = kill, threading.Event()
        self._thread = threading.Thread(target=self._look, name="sample-workers", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            if time.monotonic() > self.until:
                self.has_killed = True
                self._kill()
                return

    def close(self) -> None:
        """Ends the thread."""
        self._ended.set()
        self._thread.join()


def _failed(why: str, exit_code: int | None = None) -> DataError:
    return DataError(
        given="data.workers, processes that read samples for this rank",
        conflict=f"a worker process died or was stuck: {why}",
        remedy=SHARED_MEMORY if exit_code == -signal.SIGBUS else _OWN_MESSAGE,
    )
