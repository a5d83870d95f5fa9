"""Recursive halving and doubling: partners at half the distance each time exchange half of their common part.

Messages: 2 log2 P. Bytes: 2 N (P - 1) / P for a power of two; else the ranks beyond it fold into others first, N more
each. Small tensors are exchanged whole: log2 P messages of N. It wins for small tensors on a power of two of ranks.
Partners that both add add the same two numbers, and other sums are made on one rank: all have the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.distributed.collectives.base import Operation, combine
from shoal.distributed.collectives.messages import ByMessages
from shoal.plans.accounting.all_reduce import Halving, doubles, halving


class RecursiveDoubling(ByMessages):
    """Collectives by halving and doubling."""

    name = "recursive_doubling"

    def _reduce(self, flat: Tensor, op: Operation) -> None:
        if self.world_size == 1:
            return
        way = halving(flat.numel(), self.rank, self.world_size)
        if way.folds_into is not None:
            self._messages.send(flat, way.folds_into).wait()
            self._messages.receive(flat, way.folds_into).wait()
            return
        room = torch.empty_like(flat)
        if way.folded is not None:
            self._messages.receive(room, way.folded).wait()
            combine(op, room, flat, flat)
        if doubles(flat.numel(), flat.itemsize):
            self._exchange_whole(way, flat, room, op)
        else:
            self._halve_and_double(way, flat, room, op)
        if way.folded is not None:
            self._messages.send(flat, way.folded).wait()

    def _exchange_whole(self, way: Halving, flat: Tensor, room: Tensor, op: Operation) -> None:
        for step in way.exchanges:
            self._messages.exchange(flat, step.partner, room, step.partner)
            pair = (room, flat) if step.partner < self.rank else (flat, room)
            combine(op, *pair, flat)

    def _halve_and_double(self, way: Halving, flat: Tensor, room: Tensor, op: Operation) -> None:
        for step in way.exchanges:
            arrived, kept = room[slice(*step.kept)], flat[slice(*step.kept)]
            self._messages.exchange(flat[slice(*step.given)], step.partner, arrived, step.partner)
            combine(op, arrived, kept, kept)
        for step in reversed(way.exchanges):
            out, into = flat[slice(*step.kept)], flat[slice(*step.given)]
            self._messages.exchange(out, step.partner, into, step.partner)
