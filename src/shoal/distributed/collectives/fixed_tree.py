"""Fixed-tree sum over grains: the same binary tree of additions, and so the same bits, on any number of ranks.

The tree over positions [0, G) splits [lo, hi) at lo + the largest power of two below hi - lo. A missing grain is the
identity: its sibling's sum passes through unchanged. Additions are elementwise, so dividing the vector over the ranks
for the last levels does not change a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.distributed.collectives.shared_memory.staging import CHUNK_BYTES, LINE_BYTES, cut
from shoal.plans.accounting.collectives import Range, cuts, halves, pieces

if TYPE_CHECKING:
    from shoal.distributed.collectives.shared_memory.all_reduce import SharedMemory

T = TypeVar("T")


def evaluate(values: Mapping[Range, T], num_grains: int, add: Callable[[T, T], T]) -> T | None:
    """Return the sum at the root, given the values at any set of disjoint nodes; None if there are none."""

    def visit(lo: int, hi: int) -> T | None:
        if (lo, hi) in values:
            return values[lo, hi]
        if hi - lo == 1:
            return None
        left, right = (visit(*child) for child in halves(lo, hi))
        return add(left, right) if left is not None and right is not None else left if right is None else right

    return visit(0, num_grains) if values else None


class TreeSum:
    """Partial sums of this rank's grains, added in any order; about log2(G) sums at most for neighbouring grains."""

    def __init__(self, num_grains: int, like: Tensor, group: dist.ProcessGroup | None = None) -> None:
        """Prepare the sum of vectors as `like` over the ranks of a group, by default over all ranks."""
        self.num_grains, self._like, self._group = num_grains, like, group
        self.nodes: dict[Range, Tensor] = {}  # this rank's own sums, by their ranges of grains
        self._spare: list[Tensor] = []

    def clear(self) -> None:
        """Discard the sums and reuse their memory: fresh pages for every grain cost more than the additions."""
        self._spare += self.nodes.values()
        self.nodes = {}

    def empty(self) -> Tensor:
        """Return a vector to fill and `add`."""
        return self._spare.pop() if self._spare else torch.empty_like(self._like)

    def buffers(self) -> list[Tensor]:
        """Return all allocated vectors."""
        return [self._like, *self.nodes.values(), *self._spare]

    def add(self, grain: int, value: Tensor) -> None:
        """Add the value of one grain, a flat tensor that this object owns and changes from now on."""
        self.nodes[grain, grain + 1] = value
        self._merge(0, self.num_grains, grain)

    def _merge(self, lo: int, hi: int, grain: int) -> None:
        if hi - lo == 1:
            return
        left, right = halves(lo, hi)
        self._merge(*(left if grain < left[1] else right), grain)
        if left in self.nodes and right in self.nodes:
            added = self.nodes.pop(right)
            self.nodes[lo, hi] = self.nodes.pop(left).add_(added)
            self._spare.append(added)

    def borrowed(self) -> list[Tensor]:
        """Return memory of other ranks that `total` may return; here none."""
        return []

    def move(self, numbers: Tensor) -> None:
        """Sum numbers in place; each is nonzero on one rank at most. Collective: every rank of the world."""
        dist.all_reduce(numbers)

    def close(self) -> None:
        """Do nothing, since this class has nothing to close."""
        return

    def total(self, holders: list[list[int]], rank: int) -> Tensor:
        """Return the sum over all grains of all ranks: a flat tensor as `like`, the same bits on every rank.

        `holders` lists the grains of each rank of the group. Collective: the group, one all-to-all in which a rank
        sends its pieces (one or a few vectors) once, and one all-gather of the vector.
        """
        if len(holders) == 1:
            total = evaluate(self.nodes, self.num_grains, torch.Tensor.add_)
            return torch.zeros_like(self._like) if total is None else total
        world, length = len(holders), self._like.numel()
        places = cuts(length, world)
        lengths = [stop - start for start, stop in pairwise(places)]
        nodes = [pieces(grains, self.num_grains) for grains in holders]
        mine = [self.nodes[node] for node in nodes[rank]]
        sent = [vector[start:stop] for start, stop in pairwise(places) for vector in mine]
        outgoing = torch.cat(sent) if sent else self._like.new_empty(0)
        incoming = self._like.new_empty(sum(map(len, nodes)) * lengths[rank])
        dist.all_to_all_single(
            incoming,
            outgoing,
            [len(n) * lengths[rank] for n in nodes],
            [len(mine) * lengths[r] for r in range(world)],
            group=self._group,
        )
        parts = incoming.split(lengths[rank]) if incoming.numel() else [incoming] * sum(map(len, nodes))
        values = dict(zip((node for group in nodes for node in group), parts, strict=True))
        own = evaluate(values, self.num_grains, torch.Tensor.add_)
        padded = self._like.new_zeros(max(lengths))
        if own is not None:
            padded[: lengths[rank]] = own
        gathered = [torch.empty_like(padded) for _ in range(world)]
        dist.all_gather(gathered, padded, group=self._group)
        return torch.cat([g[:n] for g, n in zip(gathered, lengths, strict=True)])


class SharedTreeSum(TreeSum):
    """Fixed-tree sum through the shared memory of one host, where each rank does its part of the additions in place.

    A rank copies its partial sums, one or a few vectors, into its slot. After a barrier each rank adds up its part of
    the vector over all slots along the tree and writes the sum to every rank's result. Messages: none. Bytes that a
    rank writes: its pieces, and N.
    """

    def __init__(self, num_grains: int, like: Tensor, collective: SharedMemory, *, one_sum: bool = False) -> None:
        """Prepare the sum of CPU tensors as `like`; `collective` spans all ranks of the `holders` in `total`.

        `one_sum`: all ranks get the same memory, that of some rank, instead of a result each.
        """
        super().__init__(num_grains, like)
        self._collective = collective
        self._own: Tensor | None = None
        self._num_results = 0 if one_sum else 1
        # For each rank: the result, if it has one, and then its pieces.
        self._slots: list[list[Tensor]] = []

    def buffers(self) -> list[Tensor]:
        own = [] if self._own is None else [self._own]
        return [*super().buffers(), *own, *self._collective.buffers()]

    def move(self, numbers: Tensor) -> None:
        self._collective.all_reduce(numbers)

    def close(self) -> None:
        self._collective.close()

    def total(self, holders: list[list[int]], rank: int) -> Tensor:
        """Return the sum over all grains of all ranks, in memory that the next call overwrites.

        `holders` lists each rank's grains. Collective: every rank of the world; two barriers, and new memory if a rank
        has more pieces than any rank had before.
        """
        if len(holders) == 1:
            return super().total(holders, rank)
        nodes = [pieces(grains, self.num_grains) for grains in holders]
        if not any(nodes):
            return torch.zeros_like(self._like)
        num_vectors, length = max(map(len, nodes)) + self._num_results, self._like.numel()
        if not self._slots or len(self._slots[0]) < num_vectors:
            if self._own is not None:
                self._collective.release(self._own)
            stride = length + -length % (LINE_BYTES // self._like.itemsize)  # no two ranks write to one cache line
            self._own = self._collective.allocate(stride * num_vectors, self._like.dtype)
            slots = self._collective.slots_like(self._own)
            self._slots = [[vector[:length] for vector in whole.split(stride)] for whole in slots]
        for node, slot in zip(nodes[rank], self._slots[rank][self._num_results :], strict=False):
            slot.copy_(self.nodes[node])
        self._collective.barrier()
        every = zip(nodes, self._slots, strict=True)
        named = [pair for own, slots in every for pair in zip(own, slots[self._num_results :], strict=False)]
        places = cut(length, self._like.itemsize, len(nodes))
        # This rank's part, one cache-sized chunk at a time. The sums overwrite the slots' own values.
        step = CHUNK_BYTES // self._like.itemsize
        for begin in range(places[rank], places[rank + 1], step):
            end = min(begin + step, places[rank + 1])
            total = evaluate({node: slot[begin:end] for node, slot in named}, self.num_grains, torch.Tensor.add_)
            assert total is not None, "there is a node"
            for slots in self._slots if self._num_results else ():
                slots[0][begin:end].copy_(total)
        self._collective.barrier()
        if self._num_results:
            return self._slots[rank][0]
        # The tree adds every sum to its left part in place.
        return min(named, key=lambda pair: pair[0])[1]

    def borrowed(self) -> list[Tensor]:
        """Return the memory of all ranks, of which `buffers` has this rank's part."""
        return [vector for slots in self._slots for vector in slots]
