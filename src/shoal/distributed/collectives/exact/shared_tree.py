"""Fixed-tree sum through shared memory: the same additions as `TreeSum`'s, each rank's own part of them in place.

A rank puts its partial sums, one or a few vectors, into its slot. Once all have, each rank adds up its part of the
vector over all slots along the tree and writes it to everyone's result. Additions are elementwise and those of
`fixed_tree`, so that the bits are those of every other way. Messages: none. Bytes that a rank writes: its pieces, and
N.
"""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor

from shoal.distributed.collectives.exact.fixed_tree import TreeSum, evaluate
from shoal.distributed.collectives.shared_memory.all_reduce import SharedMemory
from shoal.distributed.collectives.shared_memory.staging import CHUNK_BYTES, LINE_BYTES, cut
from shoal.plans.accounting.partition import Range, pieces


class SharedTreeSum(TreeSum):
    """Fixed-tree sum among the ranks of one host."""

    def __init__(self, num_grains: int, like: Tensor, collective: SharedMemory) -> None:
        """`like` is on the CPU; `collective` is over all the ranks that `total` is told of."""
        super().__init__(num_grains, like)
        self._collective = collective
        self._own: Tensor | None = None
        # Per rank, the result and then its pieces.
        self._slots: list[list[Tensor]] = []

    def buffers(self) -> list[Tensor]:
        own = [] if self._own is None else [self._own]
        return [*super().buffers(), *own, *self._collective.buffers()]

    def move(self, numbers: Tensor) -> None:
        self._collective.all_reduce(numbers)

    def close(self) -> None:
        self._collective.close()

    def total(self, holders: list[list[int]], rank: int) -> Tensor:
        """The sum over all grains of all ranks, in memory that the next call overwrites.

        `holders` lists each rank's grains. Collective: every rank of the world; two barriers, and new memory where a
        rank has more pieces than any had before.
        """
        if len(holders) == 1:
            return super().total(holders, rank)
        nodes = [pieces(held, self.num_grains) for held in holders]
        self._reserve(max(map(len, nodes)))
        result, *own = self._slots[rank]
        for node, slot in zip(nodes[rank], own, strict=False):
            slot.copy_(self._nodes[node])
        self._collective.barrier()
        self._add(nodes, rank)
        self._collective.barrier()
        return result

    def _reserve(self, num_pieces: int) -> None:
        if self._slots and len(self._slots[0]) > num_pieces:
            return
        if self._own is not None:
            self._collective.release(self._own)
        length = self._like.numel()
        stride = length + -length % (LINE_BYTES // self._like.itemsize)  # no two ranks write to one cache line
        self._own = self._collective.allocate(stride * (num_pieces + 1), self._like.dtype)
        slots = self._collective.slots_like(self._own)
        self._slots = [[vector[:length] for vector in whole.split(stride)] for whole in slots]

    def _add(self, nodes: list[list[Range]], rank: int) -> None:
        """This rank's part, a chunk that stays in the cache at a time. The slots' own values are lost there."""
        places = cut(self._like.numel(), self._like.itemsize, len(nodes))
        step = CHUNK_BYTES // self._like.itemsize
        held = zip(nodes, self._slots, strict=True)
        named = list(chain.from_iterable(zip(own, slots[1:], strict=False) for own, slots in held))
        for begin in range(places[rank], places[rank + 1], step):
            end = min(begin + step, places[rank + 1])
            found = evaluate({node: slot[begin:end] for node, slot in named}, self.num_grains, torch.Tensor.add_)
            for slots in self._slots:
                out = slots[0][begin:end]
                out.zero_() if found is None else out.copy_(found)
