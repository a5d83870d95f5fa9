"""Writer of checkpoints: a thread beside the training, and how long to leave between two."""

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

# By default a checkpoint may take about 1 % of the time between two, within these limits.
_SHARE, _SOONEST_SECONDS, _LATEST_SECONDS = 0.01, 5.0, 600.0
# Where ranks are lost often, more of the time.
_MOST_SHARE, _SOONEST_WITH_LOSSES_SECONDS = 0.1, 0.5
# A write before that is not done after so long is left alone, and the training goes on without another.
_PATIENCE_SECONDS = 5.0


class SnapshotMemory:
    """Memory on the host that snapshots are copied into, kept from one to the next: fresh pages cost five times that.

    On a host with a GPU it is pinned, so that the device copies into it directly.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], Tensor] = {}

    def copied(self, group: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of tensors, contiguous and on the CPU, which stay until the group is copied again."""
        return {name: self._copy((group, name), tensor) for name, tensor in tensors.items()}

    def _copy(self, key: tuple[str, str], tensor: Tensor) -> Tensor:
        own = self._kept.get(key)
        if own is None or own.shape != tensor.shape or own.dtype != tensor.dtype:
            own = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
            self._kept[key] = own
        with torch.no_grad():
            return own.copy_(tensor)


def interval_seconds(cost_seconds: float, mtbf_seconds: float | None) -> float:
    """The time to leave between two checkpoints, from what one costs and the mean time between losses, where known.

    Source: Young, A First Order Approximation to the Optimum Checkpoint Interval (CACM, 1974): sqrt(2 * cost * MTBF).
    """
    by_cost = min(_LATEST_SECONDS, max(_SOONEST_SECONDS, cost_seconds / _SHARE))
    if mtbf_seconds is None:
        return by_cost
    best = max(math.sqrt(2.0 * cost_seconds * mtbf_seconds), _SOONEST_WITH_LOSSES_SECONDS)
    return max(cost_seconds / _MOST_SHARE, min(by_cost, best))


class CheckpointWriter:
    """Writer thread of a store. A disk that refuses, or hangs, is a warning, not the end of the training.

    `told` takes the reason why a checkpoint is not there.
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
        self.cpu_seconds: list[float] = []  # of this thread, for each checkpoint
        self.failure: OSError | None = None
        self.told: Callable[[str], None] = lambda reason: None

    def due(self) -> bool:
        """Whether enough time has passed since the last one for the next to cost little, and that one is done."""
        if self._pending is not None and not self._pending.done():
            return False
        return time.monotonic() - self._last >= interval_seconds(self._cost_seconds, self.mtbf_seconds)

    def write(self, snapshot: Snapshot) -> None:
        """Starts writing; waits first for the one before."""
        self.wait()
        self._pending = self._thread.submit(self._timed_write, snapshot)
        self._last = time.monotonic()

    def _timed_write(self, snapshot: Snapshot) -> float:
        began, cpu = time.monotonic(), time.thread_time()
        self._store.write(snapshot)
        self.cpu_seconds.append(time.thread_time() - cpu)
        return time.monotonic() - began

    def is_free(self) -> bool:
        """Whether the last one is done; waits a while for it, but not again for one that was waited for in vain."""
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
        """Waits until nothing is on its way; warns where it failed, and keeps the reason in `failure`."""
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
        """Notes what came of a checkpoint that the ranks wrote together."""
        self._last, self._cost_seconds = time.monotonic(), seconds
        self.failure = None if failure is None else OSError(failure)
        if failure is not None:
            self._warn(failure)

    def close(self) -> None:
        """Waits and ends the thread."""
        self.wait()
        self._thread.shutdown()

    def _warn(self, reason: object) -> None:
        self.told(str(reason))
        text = f"no checkpoint written: {reason}; the last good one stays"
        warnings.warn(text, RuntimeWarning, stacklevel=4)
