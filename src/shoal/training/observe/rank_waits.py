"""Sums of the time that ranks wait for each other, from the numbers that each agreement carries anyway."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shoal.distributed.agreement import Agreement
from shoal.runs.records import RankTimes

_EVERY = 10
# Maximum slowest ranks per record, so that a record has only a few numbers per rank.
_MOST_AWAITED = 4
_OTHERS = -1


class RankWaits:
    """Sums over as many steps as there are ranks, but at least ten, to bound a record's size per step."""

    def __init__(self, world_size: int) -> None:
        self._every = max(_EVERY, world_size)
        self._alone = world_size == 1
        self.clear()

    def clear(self) -> None:
        """Reset the sums before steps are trained again."""
        self._steps = 0
        self._busy: npt.NDArray[np.float64] | float = 0.0
        self._waits: dict[int, npt.NDArray[np.float64]] = {}

    def add(self, agreement: Agreement) -> RankTimes | None:
        """Add a step, and return the sums if it completes them."""
        if self._alone:
            return None
        busy, last = agreement.busy_seconds, agreement.slowest_rank
        self._busy = self._busy + busy
        self._waits[last] = self._waits.get(last, 0.0) + (busy[last] - busy)
        self._steps += 1
        if self._steps < self._every:
            return None
        ordered = sorted(self._waits, key=lambda rank: -float(self._waits[rank].sum()))
        waits = {rank: _rounded(self._waits[rank]) for rank in ordered[:_MOST_AWAITED]}
        if rest := ordered[_MOST_AWAITED:]:
            waits[_OTHERS] = _rounded(np.sum([self._waits[rank] for rank in rest], axis=0))
        times = RankTimes(self._steps, _rounded(np.asarray(self._busy)), waits)
        self.clear()
        return times


def _rounded(seconds: npt.NDArray[np.float64]) -> list[float]:
    return [round(value, 6) for value in seconds.tolist()]
