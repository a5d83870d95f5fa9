"""ZeRO stage 1: optimizer states divided among the ranks of the shard axis.

Rajbhandari et al., arXiv 1910.02054. Whole parameters are divided, not slices of them, so that an optimizer sees what
it sees on one process: shapes, groups, and the whole of a matrix.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.distributed.agreement import raise_together
from shoal.distributed.failures import as_shoal_error
from shoal.distributed.mesh import Mesh
from shoal.errors import ShoalError
from shoal.numerics.flat import views_of
from shoal.parallel.base import Mark
from shoal.plans.accounting.partition import PIECE_BYTES, divide, pack

# Broadcasts at once: the buffers that they need are all that the exchange adds to memory.
PIECES_AT_ONCE = 4


@dataclass(frozen=True)
class _Piece:
    """Parameters that one broadcast sends; `flat` where it is not the parameter itself."""

    parameters: list[Tensor]
    root: int
    flat: Tensor | None

    @property
    def sent(self) -> Tensor:
        return self.flat if self.flat is not None else self.parameters[0]

    def unpack(self) -> None:
        if self.flat is not None:
            for parameter, view in zip(self.parameters, views_of(self.flat, self.parameters), strict=True):
                parameter.copy_(view)


class ShardedOptimizer:
    """ZeRO stage 1 of an update: each rank of a shard group updates its own parameters.

    After the update their owners broadcast the new values within the group.
    """

    def __init__(
        self, parameters: Sequence[Tensor], mesh: Mesh, mark: Mark, among: Sequence[Tensor] | None = None
    ) -> None:
        """`among`: all that are divided over the ranks, where other strategies update the rest of them."""
        self._parameters, self._mesh, self._mark = list(parameters), mesh, mark
        self._ranks = mesh.ranks("shard")
        divided = self._parameters if among is None else list(among)
        owners = divide([p.numel() * p.itemsize for p in divided], len(self._ranks))
        self._root = {id(p): self._ranks[owner] for p, owner in zip(divided, owners, strict=True)}

    def update(self, step: Callable[[], None]) -> None:
        """Calls the optimizer's `step` for this rank's parameters, then exchanges the new values.

        Collective: all ranks, a JSON gather; the shard group, a broadcast of each owner's parameters: all their bytes
        once. Raises: on every rank, where `step` raised on any.
        """
        updated = [p for p in self._parameters if p.grad is not None]
        for parameter in updated:
            if not self.updates(parameter):
                parameter.grad = None
        error: ShoalError | None = None
        try:
            step()
        except Exception as caught:
            error = as_shoal_error(caught)
        self._mark("exposed_communication")
        raise_together(self._mesh, error)
        group = self._mesh.group("shard")
        under_way: deque[tuple[_Piece, dist.Work]] = deque()
        with torch.no_grad():
            for piece in self._pieces(updated):
                under_way.append((piece, dist.broadcast(piece.sent, piece.root, group=group, async_op=True)))
                if len(under_way) > PIECES_AT_ONCE:
                    _arrive(*under_way.popleft())
            while under_way:
                _arrive(*under_way.popleft())
        self._mark("optimizer")

    def _pieces(self, parameters: list[Tensor]) -> Iterator[_Piece]:
        for root in self._ranks:
            owned = [p.detach() for p in parameters if self._root[id(p)] == root]
            sizes = [p.numel() * p.itemsize for p in owned]
            alone = [p.is_contiguous() and size >= PIECE_BYTES for p, size in zip(owned, sizes, strict=True)]
            for members in pack(sizes, alone, [p.dtype for p in owned]):
                if alone[members[0]]:
                    yield _Piece([owned[members[0]]], root, None)
                else:
                    yield self._packed([owned[i] for i in members], root)

    def _packed(self, parameters: list[Tensor], root: int) -> _Piece:
        flat = parameters[0].new_empty(sum(p.numel() for p in parameters))
        if root == self._mesh.rank:
            for parameter, view in zip(parameters, views_of(flat, parameters), strict=True):
                view.copy_(parameter)
        return _Piece(parameters, root, flat)

    def updates(self, parameter: Tensor) -> bool:
        """Whether this rank is its owner; what is not trained (and has a state all the same) has every rank."""
        return self._root.get(id(parameter), self._mesh.rank) == self._mesh.rank


def _arrive(piece: _Piece, work: dist.Work) -> None:
    work.wait()
    piece.unpack()
