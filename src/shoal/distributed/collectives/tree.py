"""Double binary tree all-reduce: a tree for each half of the tensor; sums go up, the result down, in pieces.

Messages: for each piece one to the parent and one to each child. Bytes: at most 2 N a rank, and about N where a rank
passes on in neither tree. It wins for small and middling tensors on many ranks: 2 log2 P steps deep where a ring is
2 (P - 1). Each sum is made on one rank, so that all have the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.distributed.collectives.base import Operation, combine
from shoal.distributed.collectives.messages import ByMessages, Message
from shoal.plans.accounting.all_reduce import place_in_tree, segments

_UP, _DOWN = 0, 1


class Tree(ByMessages):
    """Collectives over two trees."""

    name = "tree"

    def _reduce(self, flat: Tensor, op: Operation) -> None:
        if self.world_size == 1:
            return
        half = flat.numel() // 2
        pieces = [
            list(part.split(segments(part.numel(), part.itemsize))) if part.numel() else []
            for part in (flat[:half], flat[half:])
        ]
        most = max(map(len, pieces))
        rounds = [(tree, pieces[tree][n]) for n in range(most) for tree in (0, 1) if n < len(pieces[tree])]
        sent: list[Message] = []
        for tree, piece in rounds:
            sent += self._up(tree, piece, op)
        for tree, piece in rounds:
            sent += self._down(tree, piece)
        for message in sent:
            message.wait()

    def _up(self, tree: int, piece: Tensor, op: Operation) -> list[Message]:
        place = place_in_tree(self.rank, self.world_size, tree)
        rooms = [torch.empty_like(piece) for _ in place.children]
        arriving = [self._messages.receive(r, c, _tag(tree, _UP)) for r, c in zip(rooms, place.children, strict=True)]
        for message, room in zip(arriving, rooms, strict=True):
            message.wait()
            combine(op, room, piece, piece)
        if place.parent is None:
            return []
        # The parent's answer arrives in the piece itself: it may only be sent from a copy, or waited for.
        self._messages.send(piece, place.parent, _tag(tree, _UP)).wait()
        return []

    def _down(self, tree: int, piece: Tensor) -> list[Message]:
        place = place_in_tree(self.rank, self.world_size, tree)
        if place.parent is not None:
            self._messages.receive(piece, place.parent, _tag(tree, _DOWN)).wait()
        return [self._messages.send(piece, child, _tag(tree, _DOWN)) for child in place.children]


def _tag(tree: int, direction: int) -> int:
    """Of two ranks one may be above the other in both trees, in either direction."""
    return 1 + 2 * tree + direction
