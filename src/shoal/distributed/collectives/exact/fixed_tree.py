"""Fixed-tree sum over grains: the same binary tree of additions, and so the same bits, on any number of ranks.

The tree over positions [0, G) splits [lo, hi) at lo + the largest power of two below hi - lo. A grain that is not
there is the identity: its sibling's sum passes through unchanged. Additions are elementwise, so that the vector may be
divided over the ranks for the last levels without changing a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.plans.accounting.partition import Range, halves, pieces

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
        self._nodes: dict[Range, Tensor] = {}
        self._spare: list[Tensor] = []

    def clear(self) -> None:
        """Forgets the sums and keeps their memory: fresh pages for every grain cost more than the additions."""
        self._spare += self._nodes.values()
        self._nodes = {}

    def empty(self) -> Tensor:
        """A vector to fill and `add`."""
        return self._spare.pop() if self._spare else torch.empty_like(self._like)

    @property
    def nodes(self) -> dict[Range, Tensor]:
        """This rank's own sums, by the ranges of grains that they are over."""
        return self._nodes

    def buffers(self) -> list[Tensor]:
        """All the vectors that are allocated."""
        return [self._like, *self._nodes.values(), *self._spare]

    def add(self, grain: int, value: Tensor) -> None:
        """Takes the value (a flat tensor, from now on owned and changed here) of one grain."""
        self._nodes[grain, grain + 1] = value
        self._merge(0, self.num_grains, grain)

    def _merge(self, lo: int, hi: int, grain: int) -> None:
        if hi - lo == 1:
            return
        left, right = halves(lo, hi)
        self._merge(*(left if grain < left[1] else right), grain)
        if left in self._nodes and right in self._nodes:
            added = self._nodes.pop(right)
            self._nodes[lo, hi] = self._nodes.pop(left).add_(added)
            self._spare.append(added)

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
            found = evaluate(self._nodes, self.num_grains, torch.Tensor.add_)
            return torch.zeros_like(self._like) if found is None else found
        world, length = len(holders), self._like.numel()
        cuts = [length * part // world for part in range(world + 1)]
        lengths = [cuts[r + 1] - cuts[r] for r in range(world)]
        nodes = [pieces(held, self.num_grains) for held in holders]
        mine = [self._nodes[node] for node in nodes[rank]]
        sent = [vector[cuts[r] : cuts[r + 1]] for r in range(world) for vector in mine]
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
