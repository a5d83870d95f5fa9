"""Worker processes of torch's DataLoader that read a rank's samples. Dead or stuck ones are replaced."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from shoal.data.source import SHARED_MEMORY
from shoal.errors import DataError, text_of
from shoal.launch.supervise.child import standstill, waits_for_disk

# Time to notice a death. torch itself would check every 5 s, or raise at an arbitrary place in the rank.
_LOOK_SECONDS = 0.25
# Time limit for a batch: this, or three times the longest wait. It is below the launcher's limit for a waiting rank.
_LEAST_SECONDS, _TIMES = 4.0, 3.0
_FIRST_SECONDS = 300.0  # for the first batch, including the dataset's imports
_TIMES_AGAIN = 4.0  # factor of the limit after each failure
_MOST_IN_A_ROW = 3
_OWN_MESSAGE = "look for its own message above; data.workers = 0 reads in the rank itself"


class SampleWorkers:
    """Worker processes that return one batch per request.

    `load`: creates torch's DataLoader for the requests from a given one on.
    `report`: receives a sentence and the lost seconds when the processes were restarted.
    `limit_seconds`: time limit for one batch from the user's own loader.
    """

    def __init__(
        self,
        load: Callable[[Any], DataLoader[Any]],
        report: Callable[[str, float], None],
        limit_seconds: float = 0.0,
    ) -> None:
        self._load, self._report, self._limit_seconds = load, report, limit_seconds
        self._batches: Iterator[Any] | None = None
        self._watch: _Watch | None = None
        self._longest = 0.0
        self._in_a_row = 0

    def next(self, request: Any) -> Any:
        """Return the batch of the next request. Raises: DataError if workers repeatedly die or hang."""
        while True:
            began = time.monotonic()
            if self._batches is None:
                here = threading.current_thread() is threading.main_thread()
                handler = signal.getsignal(signal.SIGCHLD) if here else None
                self._batches = iter(self._load(request))
                self._watch = _Watch(self._kill, lambda: getattr(self._batches, "_workers", ()))
                if here:  # torch's handler raises at an arbitrary place in the rank
                    signal.signal(signal.SIGCHLD, handler)
            why, dead = self._wait(began)
            if why is None:
                self._in_a_row, self._longest = 0, max(self._longest, time.monotonic() - began)
                return self._batch
            self._kill()
            self.close()
            self._in_a_row += 1
            if self._in_a_row > _MOST_IN_A_ROW:
                raise _failed(f"{why}, {self._in_a_row} times in a row", dead)
            self._report(why, time.monotonic() - began)

    def _wait(self, began: float) -> tuple[str | None, int | None]:
        """Wait for the next batch. Return the reason if there is none, and the exit code of a dead worker."""
        batches, watch = self._batches, self._watch
        assert batches is not None
        assert watch is not None
        learned = max(_LEAST_SECONDS, _TIMES * self._longest) if self._longest else _FIRST_SECONDS
        watch.until = began + max(learned, self._limit_seconds) * _TIMES_AGAIN**self._in_a_row
        batches._timeout = _LOOK_SECONDS  # type: ignore[attr-defined]  # torch's iterator has no public setter
        while True:
            try:
                self._batch = next(batches)
            except (RuntimeError, EOFError, OSError) as error:
                if "in DataLoader worker process" in text_of(error):  # raised outside of reading: a user's init
                    raise _failed(text_of(error).strip().splitlines()[-1]) from error
                if isinstance(error, RuntimeError) and not text_of(error).startswith("DataLoader "):
                    raise
                workers = getattr(batches, "_workers", ())
                if watch.reason:
                    return f"a worker process {watch.reason} for {time.monotonic() - began:.0f} s", None
                codes = [worker.exitcode for worker in workers if not worker.is_alive()]
                if codes:
                    how = f"signal {signal.Signals(-codes[0]).name}" if (codes[0] or 0) < 0 else f"code {codes[0]}"
                    return f"a worker process that reads samples ended with {how}", codes[0]
            else:
                watch.until = math.inf
                return None, None

    def _kill(self) -> None:
        """Kill the processes, since stopped or deadlocked ones ignore other signals."""
        for worker in getattr(self._batches, "_workers", ()):
            worker.kill()

    def close(self) -> None:
        """End the processes."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        shutdown = getattr(self._batches, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()
            for worker in getattr(self._batches, "_workers", ()):
                if worker.is_alive():  # torch's last resort is SIGTERM, which the worker ignores
                    worker.kill()
                    worker.join()
        self._batches = None


class _Watch:
    """Thread that calls `kill` after `until`, or once a worker is stopped: a rank that reads from such a worker blocks.

    A worker that waits for a disk has as long as it takes.
    `until`: instant of `time.monotonic`; infinite while nobody waits for a batch.
    `reason`: why it has called `kill`.
    """

    def __init__(self, kill: Callable[[], None], workers: Callable[[], Iterable[Any]]) -> None:
        self.until, self.reason = math.inf, ""
        self._kill, self._workers, self._ended = kill, workers, threading.Event()
        self._thread = threading.Thread(target=self._look, name="sample-workers", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        stopped = 0.0
        while not self._ended.wait(_LOOK_SECONDS):
            why = ""
            if self.until < math.inf:
                pids = [worker.pid for worker in self._workers()]
                why = next(filter(None, map(standstill, pids)), "")
                if any(map(waits_for_disk, pids)):
                    self.until = max(self.until, time.monotonic() + _LEAST_SECONDS)
            stopped = stopped + _LOOK_SECONDS if why else 0.0
            if stopped > _LEAST_SECONDS:
                self.reason = f"was {why}, and gave no sample"
            elif time.monotonic() > self.until:
                self.reason = "gave no sample"
            if self.reason:
                self._kill()
                return

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()


def _failed(why: str, exit_code: int | None = None) -> DataError:
    return DataError(
        given="data.workers, processes that read samples for this rank",
        conflict=f"a worker process died or was stuck: {why}",
        remedy=SHARED_MEMORY if exit_code == -signal.SIGBUS else _OWN_MESSAGE,
    )
