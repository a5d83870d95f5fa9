"""Fixed-tree sum over grains: the same binary tree of additions, and so the same bits, on any number of ranks.

The tree over positions [0, G) splits [lo, hi) at lo + the largest power of two below hi - lo. A grain that is not
there is the identity: its sibling's sum passes through unchanged. Additions are elementwise, so that the vector may be
divided over the ranks for the last levels without changing a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.distributed.collectives.shared_memory.staging import CHUNK_BYTES, LINE_BYTES, cut
from shoal.plans.accounting.partition import Range, cuts, halves, pieces

if TYPE_CHECKING:
    from shoal.distributed.collectives.shared_memory.all_reduce import SharedMemory

T = TypeVar("T")


def evaluate(values: Mapping[Range, T], num_grains: int, add: Callable[[T, T], T]) -> T | None:
    """The sum at the root, from the values at any set of disjoint nodes; None where there are none."""

    def visit(lo: int, hi: int) -> T | None:
        if (lo, hi) in values:
            return values[lo, hi]
        if hi - lo == 1:
            return None
        left, right = (visit(*child) for child in halves(lo, hi))
        return add(left, right) if left is not None and right is not None else left if right is None else right

    return visit(0, num_grains) if values else None


class TreeSum:
    """Partial sums of this rank, grain by grain in any order; at most about log2(G) of them for neighbours."""

    def __init__(self, num_grains: int, like: Tensor) -> None:
        self.num_grains, self._like = num_grains, like
        self.nodes: dict[Range, Tensor] = {}  # this rank's own sums, by the ranges of grains that they are over
        self._spare: list[Tensor] = []

    def clear(self) -> None:
        """Forgets the sums and keeps their memory: fresh pages for every grain cost more than the additions."""
        self._spare += self.nodes.values()
        self.nodes = {}

    def empty(self) -> Tensor:
        """A vector to fill and `add`."""
        return self._spare.pop() if self._spare else torch.empty_like(self._like)

    def buffers(self) -> list[Tensor]:
        """All the vectors that are allocated."""
        return [self._like, *self.nodes.values(), *self._spare]

    def add(self, grain: int, value: Tensor) -> None:
        """Takes the value (a flat tensor, from now on owned and changed here) of one grain."""
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
        """Memory of other ranks that `total` may give; none."""
        return []

    def move(self, numbers: Tensor) -> None:
        """Numbers of which each is zero on all ranks but one, in place on all. Collective: every rank of the world."""
        dist.all_reduce(numbers)

    def close(self) -> None:
        """Holds nothing open."""
        return

    def total(self, holders: list[list[int]], rank: int) -> Tensor:
        """The sum over all grains of all ranks: a flat tensor as `like`, the same bits on every rank.

        `holders` lists each rank's grains. Collective: every rank of the world, one all-to-all in which a rank sends
        its pieces (one or a few vectors) once, and one all-gather of the vector.
        """
        if len(holders) == 1:
            found = evaluate(self.nodes, self.num_grains, torch.Tensor.add_)
            return torch.zeros_like(self._like) if found is None else found
        world, length = len(holders), self._like.numel()
        places = cuts(length, world)
        lengths = [stop - start for start, stop in pairwise(places)]
        nodes = [pieces(held, self.num_grains) for held in holders]
        mine = [self.nodes[node] for node in nodes[rank]]
        sent = [vector[start:stop] for start, stop in pairwise(places) for vector in mine]
        outgoing = torch.cat(sent) if sent else self._like.new_empty(0)
        incoming = self._like.new_empty(sum(map(len, nodes)) * lengths[rank])
        dist.all_to_all_single(
            incoming,
            outgoing,
            [len(n) * lengths[rank] for n in nodes],
            [len(mine) * lengths[r] for r in range(world)],
        )
        parts = incoming.split(lengths[rank]) if incoming.numel() else [incoming] * sum(map(len, nodes))
        values = dict(zip((node for group in nodes for node in group), parts, strict=True))
        own = evaluate(values, self.num_grains, torch.Tensor.add_)
        padded = self._like.new_zeros(max(lengths))
        if own is not None:
            padded[: lengths[rank]] = own
        gathered = [torch.empty_like(padded) for _ in range(world)]
        dist.all_gather(gathered, padded)
        return torch.cat([g[:n] for g, n in zip(gathered, lengths, strict=True)])


class SharedTreeSum(TreeSum):
    """Fixed-tree sum through the shared memory of one host: each rank's own part of the additions, in place.

    A rank puts its partial sums, one or a few vectors, into its slot. Once all have, each rank adds up its part of the
    vector over all slots along the tree and writes it to everyone's result. Messages: none. Bytes that a rank writes:
    its pieces, and N.
    """

    def __init__(self, num_grains: int, like: Tensor, collective: SharedMemory, *, one_sum: bool = False) -> None:
        """`like` is on the CPU; `collective` is over all the ranks that `total` is told of.

        `one_sum`: all ranks are given the same memory, some rank's, and not each its own.
        """
        super().__init__(num_grains, like)
        self._collective = collective
        self._own: Tensor | None = None
        self._num_results = 0 if one_sum else 1
        # Per rank, the result if it has one, and then its pieces.
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
        if not any(nodes):
            return torch.zeros_like(self._like)
        self._reserve(max(map(len, nodes)) + self._num_results)
        for node, slot in zip(nodes[rank], self._slots[rank][self._num_results :], strict=False):
            slot.copy_(self.nodes[node])
        self._collective.barrier()
        self._add(nodes, rank)
        self._collective.barrier()
        if self._num_results:
            return self._slots[rank][0]
        # In the tree every sum is added to its left part in place.
        return min(self._named(nodes), key=lambda named: named[0])[1]

    def borrowed(self) -> list[Tensor]:
        """The memory of all ranks, of which `buffers` has this one's part."""
        return [vector for slots in self._slots for vector in slots]

    def _named(self, nodes: list[list[Range]]) -> list[tuple[Range, Tensor]]:
        """Every rank's nodes and where they lie."""
        held = zip(nodes, self._slots, strict=True)
        return [named for own, slots in held for named in zip(own, slots[self._num_results :], strict=False)]

    def _reserve(self, num_vectors: int) -> None:
        if self._slots and len(self._slots[0]) >= num_vectors:
            return
        if self._own is not None:
            self._collective.release(self._own)
        length = self._like.numel()
        stride = length + -length % (LINE_BYTES // self._like.itemsize)  # no two ranks write to one cache line
        self._own = self._collective.allocate(stride * num_vectors, self._like.dtype)
        slots = self._collective.slots_like(self._own)
        self._slots = [[vector[:length] for vector in whole.split(stride)] for whole in slots]

    def _add(self, nodes: list[list[Range]], rank: int) -> None:
        """This rank's part, a chunk that stays in the cache at a time. The slots' own values are lost there."""
        places = cut(self._like.numel(), self._like.itemsize, len(nodes))
        step = CHUNK_BYTES // self._like.itemsize
        named = self._named(nodes)
        for begin in range(places[rank], places[rank + 1], step):
            end = min(begin + step, places[rank + 1])
            found = evaluate({node: slot[begin:end] for node, slot in named}, self.num_grains, torch.Tensor.add_)
            assert found is not None, "there is a node"
            for slots in self._slots if self._num_results else ():
                slots[0][begin:end].copy_(found)
