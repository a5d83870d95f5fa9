"""Ring all-reduce: each rank sends to the next only; a reduce-scatter once around, then an all-gather once around.

Messages: 2 (P - 1) and a header. Bytes: 2 N (P - 1) / P, as few as there can be. It wins for large tensors between
hosts of equal links; its latency grows with P. Sums are made in the order of the ring, of each part on one rank, so
that all ranks have the same bits; 16-bit values are rounded at each hop.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.distributed.collectives.base import Operation, combine
from shoal.distributed.collectives.messages import ByMessages
from shoal.plans.accounting.all_reduce import cuts


class Ring(ByMessages):
    """Collectives around a ring."""

    name = "ring"

    def _reduce(self, flat: Tensor, op: Operation) -> None:
        places = cuts(flat.numel(), self.world_size)
        parts = [flat[places[p] : places[p + 1]] for p in range(self.world_size)]
        room = torch.empty_like(max(parts, key=len))
        for step in range(self.world_size - 1):
            out, into = parts[self._before(1 + step)], parts[self._before(2 + step)]
            arrived = room[: len(into)]
            self._shift(out, arrived)
            combine(op, arrived, into, into)
        self._gather(parts)

    def _gather(self, parts: Sequence[Tensor]) -> None:
        for step in range(self.world_size - 1):
            self._shift(parts[self._before(step)], parts[self._before(1 + step)])

    def _shift(self, out: Tensor, into: Tensor) -> None:
        self._messages.exchange(out, (self.rank + 1) % self.world_size, into, self._before(1))

    def _before(self, steps: int) -> int:
        return (self.rank - steps) % self.world_size
