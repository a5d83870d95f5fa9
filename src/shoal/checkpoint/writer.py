"""Asynchronous checkpoint writer: a thread writes while the training goes on, at most one checkpoint at a time."""

from __future__ import annotations

import time
import warnings
from concurrent.futures import Future, ThreadPoolExecutor

from shoal.checkpoint.store import Snapshot, Store

# By default a checkpoint may take about 1 % of the time between two, within these limits.
_SHARE, _SOONEST_SECONDS, _LATEST_SECONDS = 0.01, 5.0, 600.0


class CheckpointWriter:
    """Writer thread of a store. A disk that refuses is a warning, not the end of the training."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[float] | None = None
        self._cost_seconds = 0.0
        self._last = time.monotonic()
        self.failure: OSError | None = None

    def due(self) -> bool:
        """Whether enough time has passed since the last one for the next to cost little."""
        interval = min(_LATEST_SECONDS, max(_SOONEST_SECONDS, self._cost_seconds / _SHARE))
        return time.monotonic() - self._last >= interval

    def write(self, snapshot: Snapshot) -> None:
        """Starts writing; waits first for the one before."""
        self.wait()
        self._pending = self._thread.submit(self._timed_write, snapshot)
        self._last = time.monotonic()

    def _timed_write(self, snapshot: Snapshot) -> float:
        began = time.monotonic()
        self._store.write(snapshot)
        return time.monotonic() - began

    def wait(self) -> None:
        """Waits until nothing is on its way; warns where it failed, and keeps the reason in `failure`."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            self._cost_seconds = pending.result()
            self.failure = None
        except OSError as error:
            self.failure = error
            _warn(error)

    def wrote(self, failure: str | None, seconds: float) -> None:
        """Notes what came of a checkpoint that the ranks wrote together."""
        self._last, self._cost_seconds = time.monotonic(), seconds
        self.failure = None if failure is None else OSError(failure)
        if failure is not None:
            _warn(failure)

    def close(self) -> None:
        """Waits and ends the thread."""
        self.wait()
        self._thread.shutdown()


def _warn(reason: object) -> None:
    warnings.warn(f"no checkpoint written: {reason}; the last good one stays", RuntimeWarning, stacklevel=3)
