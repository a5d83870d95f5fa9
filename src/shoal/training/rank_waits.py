"""Sums of what ranks waited for each other over some steps, from what travels with each agreement anyway."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shoal.distributed.agreement import Agreement
from shoal.runs.records import RankTimes

_EVERY = 10
# Ranks that are told of in one sum: on many ranks the record stays a few numbers a rank.
_MOST_AWAITED = 4
_OTHERS = -1


class RankWaits:
    """Sums over as many steps as there are ranks, ten at least, so that a step's share of a record does not grow."""

    def __init__(self, world_size: int) -> None:
        self._every = max(_EVERY, world_size)
        self._alone = world_size == 1
        self.clear()

    def clear(self) -> None:
        """Begins anew: steps are about to be trained again."""
        self._steps = 0
        self._busy: npt.NDArray[np.float64] | float = 0.0
        self._waits: dict[int, npt.NDArray[np.float64]] = {}

    def add(self, agreement: Agreement) -> RankTimes | None:
        """Adds a step; the sums where it is the last of them."""
        if self._alone:
            return None
        busy, last = agreement.busy_seconds, agreement.slowest_rank
        self._busy = self._busy + busy
        self._waits[last] = self._waits.get(last, 0.0) + (busy[last] - busy)
        self._steps += 1
        if self._steps < self._every:
            return None
        found = RankTimes(self._steps, _rounded(np.asarray(self._busy)), self._told())
        self.clear()
        return found

    def _told(self) -> dict[int, list[float]]:
        ordered = sorted(self._waits, key=lambda rank: -float(self._waits[rank].sum()))
        found = {rank: _rounded(self._waits[rank]) for rank in ordered[:_MOST_AWAITED]}
        if rest := ordered[_MOST_AWAITED:]:
            found[_OTHERS] = _rounded(np.sum([self._waits[rank] for rank in rest], axis=0))
        return found


def _rounded(seconds: npt.NDArray[np.float64]) -> list[float]:
    return [round(value, 6) for value in seconds.tolist()]
