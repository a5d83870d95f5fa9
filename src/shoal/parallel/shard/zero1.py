"""ZeRO stage 1: optimizer states divided among the ranks of the shard axis.

Rajbhandari et al., arXiv 1910.02054. Ranks divide whole parameters, not slices of them: see update_division.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.distributed.agreement import raise_together
from shoal.numerics.flat import views_of
from shoal.parallel.model.sharded_model import ShardedModel
from shoal.parallel.shard.update_division import UpdateDivision, error_of, owners
from shoal.plans.accounting.partition import PIECE_BYTES, pack

# Number of concurrent broadcasts. Their buffers are the only memory that the exchange adds.
PIECES_AT_ONCE = 4


@dataclass(frozen=True)
class _Piece:
    """Parameters that one broadcast sends: as a flat copy, or directly if there is only one."""

    parameters: list[Tensor]
    root: int
    sent: Tensor


class ShardedOptimizer(UpdateDivision):
    """Update of ZeRO stage 1: each rank of a shard group updates the parameters that it owns.

    After the update the owners broadcast the new values within the group.
    """

    def __init__(
        self,
        model: ShardedModel,
        parameters: Sequence[Tensor],
        mark: Callable[[str], None],
        among: Sequence[Tensor] | None = None,
    ) -> None:
        """Set the parameters. `among`: all parameters divided over the ranks, if other strategies update the rest."""
        super().__init__(model)
        self._mesh, self._mark, self._rank, self._parameters = model.mesh, mark, model.mesh.rank, list(parameters)
        self._ranks = next(ranks for ranks in self._mesh.layout.groups("shard") if self._rank in ranks)
        self._owners = owners(parameters if among is None else among, self._ranks)

    def update(self, step: Callable[[], None], *, queued: bool = False) -> None:
        """Call the optimizer's `step` for this rank's parameters, then exchange the new values.

        Collective: all ranks, a JSON gather; the shard group, a broadcast of each owner's parameters, all their bytes
        once.
        Raises: on every rank, if `step` raised on any. `queued` skips the gather, and only the failed rank raises.
        """
        updated = [p for p in self._parameters if p.grad is not None]
        for parameter in updated:
            if not self.updates(parameter):
                parameter.grad = None
        error = error_of(step)
        self._mark("exposed_communication")
        if not queued:
            raise_together(self._mesh, error)
        elif error is not None:
            raise error
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
            owned = [p.detach() for p in parameters if self._owners[id(p)] == root]
            sizes = [p.numel() * p.itemsize for p in owned]
            alone = [p.is_contiguous() and size >= PIECE_BYTES for p, size in zip(owned, sizes, strict=True)]
            for members in pack(sizes, alone, [p.dtype for p in owned]):
                together = [owned[i] for i in members]
                if alone[members[0]]:
                    yield _Piece(together, root, together[0])
                    continue
                flat = together[0].new_empty(sum(p.numel() for p in together))
                if root == self._rank:
                    for parameter, view in zip(together, views_of(flat, together), strict=True):
                        view.copy_(parameter)
                yield _Piece(together, root, flat)

    def updates(self, parameter: Tensor) -> bool:
        """Return True if this rank owns the parameter.

        Every rank owns untrained parameters that have optimizer state.
        """
        return self._owners.get(id(parameter), self._rank) == self._rank


def _arrive(piece: _Piece, work: dist.Work) -> None:
    work.wait()
    if piece.sent is not piece.parameters[0]:
        for parameter, view in zip(piece.parameters, views_of(piece.sent, piece.parameters), strict=True):
            parameter.copy_(view)
