"""Writer of checkpoints: a background thread, and the interval between two checkpoints."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotDoneError

import torch
from torch import Tensor

from shoal.checkpoint.store import Snapshot, Store

# By default, writing takes about 1 % of the time between two checkpoints, within these limits of the interval.
_SHARE, _SOONEST_SECONDS, _LATEST_SECONDS = 0.01, 5.0, 600.0
# If ranks are lost often, writing may take more of the time.
_MOST_SHARE, _SOONEST_WITH_LOSSES_SECONDS = 0.1, 0.5
# How long to wait for the previous write before training continues without a new checkpoint.
_PATIENCE_SECONDS = 5.0


class SnapshotMemory:
    """Host memory that snapshots are copied into. It is reused, since fresh pages cost five times as much.

    On a host with a GPU the memory is pinned, so that the device copies into it directly.
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[str, str], Tensor] = {}

    def copied(self, group: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return contiguous CPU copies of tensors, valid until the group is copied again."""
        copies = {}
        for name, tensor in tensors.items():
            own = self._copies.get((group, name))
            if own is None or own.shape != tensor.shape or own.dtype != tensor.dtype:
                own = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
                self._copies[group, name] = own
            with torch.no_grad():
                copies[name] = own.copy_(tensor)
        return copies


def interval_seconds(cost_seconds: float, mtbf_seconds: float | None) -> float:
    """Return the interval between checkpoints from the cost of one and the mean time between failures, if known.

    Source: Young, A First Order Approximation to the Optimum Checkpoint Interval (CACM, 1974): sqrt(2 * cost * MTBF).
    """
    by_cost = min(_LATEST_SECONDS, max(_SOONEST_SECONDS, cost_seconds / _SHARE))
    if mtbf_seconds is None:
        return by_cost
    best = max(math.sqrt(2.0 * cost_seconds * mtbf_seconds), _SOONEST_WITH_LOSSES_SECONDS)
    return max(cost_seconds / _MOST_SHARE, min(by_cost, best))


class CheckpointWriter:
    """Writer thread of a store. A disk that fails or hangs causes a warning and does not end the training.

    `report`: function called with the reason when a checkpoint could not be written.
    """

    def __init__(
        self, store: Store, mtbf_seconds: float | None = None, patience_seconds: float = _PATIENCE_SECONDS
    ) -> None:
        self._store, self.mtbf_seconds, self._patience = store, mtbf_seconds, patience_seconds
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[float] | None = None
        self._given_up: Future[float] | None = None
        self._cost_seconds = 0.0
        self._last = time.monotonic()
        self.cpu_seconds: list[float] = []  # CPU seconds of the writer thread for each checkpoint
        self.failure: OSError | None = None
        self.report: Callable[[str], None] = lambda reason: None

    def mean_cpu_seconds(self) -> float | None:
        """Return the mean CPU seconds that the thread takes for a checkpoint; None before the first one."""
        seconds = self.cpu_seconds
        return round(sum(seconds) / len(seconds), 6) if seconds else None

    def due(self) -> bool:
        """Return True if the last write is done and long enough ago for a new checkpoint."""
        if self._pending is not None and not self._pending.done():
            return False
        return time.monotonic() - self._last >= interval_seconds(self._cost_seconds, self.mtbf_seconds)

    def write(self, snapshot: Snapshot) -> None:
        """Wait for the previous write, then start writing a snapshot."""
        self.wait()

        def timed_write() -> float:
            began, cpu = time.monotonic(), time.thread_time()
            self._store.write(snapshot)
            self.cpu_seconds.append(time.thread_time() - cpu)
            return time.monotonic() - began

        self._pending = self._thread.submit(timed_write)
        self._last = time.monotonic()

    def is_free(self) -> bool:
        """Return True if the last write is done. Wait a few seconds for it, but only once for each write."""
        pending = self._pending
        if pending is None:
            return True
        if pending is self._given_up and not pending.done():
            return False
        try:
            pending.exception(self._patience)
        except NotDoneError:
            self._given_up = pending
            self._warn(f"the one before is still being written after {time.monotonic() - self._last:.0f} s")
            return False
        return True

    def wait(self) -> None:
        """Wait until no write is pending. A failed write causes a warning and sets `failure`."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            self._cost_seconds = pending.result()
            self.failure = None
        except OSError as error:
            self.failure = error
            self._warn(error)

    def wrote(self, failure: str | None, seconds: float) -> None:
        """Record the outcome of a checkpoint that all ranks wrote together."""
        self._last, self._cost_seconds = time.monotonic(), seconds
        self.failure = None if failure is None else OSError(failure)
        if failure is not None:
            self._warn(failure)

    def close(self) -> None:
        """Wait for the current write and end the thread."""
        self.wait()
        self._thread.shutdown()

    def _warn(self, reason: object) -> None:
        self.report(str(reason))
        text = f"no checkpoint written: {reason}; the last good one stays"
        warnings.warn(text, RuntimeWarning, stacklevel=4)
