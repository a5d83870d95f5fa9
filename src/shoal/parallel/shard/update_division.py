"""Division of an update over ranks by whole parameters, so that an optimizer sees the same as on one process.

An optimizer may use a parameter's shape, its groups and whole matrices. ZeRO stage 1 divides the optimizer states among
the ranks of the shard axis (Rajbhandari et al., arXiv 1910.02054), here by whole parameters, not by slices of them. For
one copy on each host see one_copy.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.distributed.failures import as_shoal_error
from shoal.distributed.mesh import EXPERT_COPIES, raise_together
from shoal.errors import ShoalError
from shoal.numerics.gradient_norm import is_settled, rounded
from shoal.parallel.model.sharded_model import ShardedModel
from shoal.plans.accounting.collectives import PIECE_BYTES, divide, pack

# Number of concurrent broadcasts. Their buffers are the only memory that an exchange of new values adds.
PIECES_AT_ONCE = 4

# For each parameter with a divided update, this rank's part of it, or None.
Parts = dict[nn.Parameter, nn.Parameter | None]


class UpdateDivision:
    """Division of one optimizer's update over the ranks. This class divides nothing: every rank updates everything.

    A step calls `begin` before its first backward. Its update calls `own_gradients` and `norm`, scales and clips the
    gradients, and calls `update`.
    """

    # Whether an update may follow another one before the host reads any of its results.
    queues = True
    # Whether ranks with the same experts divide the update of these.
    divides_experts = False

    def __init__(self, model: ShardedModel) -> None:
        """Set the model, which other axes may divide."""
        self._model, self._rank, owners = model, model.mesh.rank, model.division.owners
        # Ranks that update whole matrices; the exchange with them is in `MatrixOwners`.
        self._matrix_owners = {id(p): owners[name] for name, p in model.parameters() if name in owners}

    def updates(self, parameter: Tensor) -> bool:
        """Return True if this rank updates the parameter and so has its optimizer state."""
        return self._matrix_owners.get(id(parameter), self._rank) == self._rank

    def own_bytes(self, num_bytes: int) -> int:
        """Return how many of `num_bytes` parameter bytes count on this rank: all, unless ranks share one copy."""
        return num_bytes

    def divide(self, optimizer: torch.optim.Optimizer) -> Parts:
        """Return, for each parameter with a divided update, the part that this rank's optimizer steps in its place.

        It is called once, when the optimizer exists.
        """
        return {}

    def begin(self) -> None:
        """Begin a step, before its first backward. Collective: see OneCopyUpdate."""
        return

    def own_gradients(self) -> None:
        """Keep on this rank only the gradients that the rank scales, clips and counts in `norm`."""
        return

    def norm(self, own: float) -> float:
        """Return the Euclidean norm of the whole gradient, `rounded`, from the norm `own` over what each rank `counts`.

        Collective: all ranks, one all-reduce of a number, if the model is divided.
        """
        if self._model.divided:
            squared = torch.tensor(own, dtype=torch.float64).square()
            dist.all_reduce(squared)
            own = float(squared.sqrt().numpy())  # it is on the host
        return rounded(own, self._model.dtypes)

    def queued_norm(self, own: Tensor | None) -> Tensor:
        """Return `norm` as float64 [] on the device, not rounded; NaN if a rank must compute its part on the host.

        `own`: `norm_tensor` of the gradients that this rank `counts`. Collective: all ranks, as `norm`, of two numbers.
        """
        device = self._model.mesh.device
        if not self._model.divided:
            return torch.zeros((), dtype=torch.float64, device=device) if own is None else own
        squared = torch.zeros(2, dtype=torch.float64, device=device)
        if own is not None:
            squared[0], squared[1] = own.square(), ~is_settled(own) & (own != 0)  # a missing gradient adds nothing
        dist.all_reduce(squared)
        return torch.where(squared[1] > 0, torch.nan, squared[0].sqrt())

    def gradients_settle(self) -> None:
        """Wait until every gradient of this rank is scaled and clipped. Collective: see OneCopyUpdate."""
        return

    def update(self, step: Callable[[], None], *, queued: bool = False) -> None:
        """Call the optimizer's `step` so that every rank ends with every parameter's new value.

        `queued`, if the division `queues`: the ranks do not exchange whether `step` raised. Collective: the ranks that
        divide the update. Raises: what `step` raises.
        """
        step()


class _Piece(NamedTuple):
    """One broadcast of new values."""

    root: int
    group: dist.ProcessGroup | None
    members: list[Tensor]


class ShardedOptimizer(UpdateDivision):
    """Update of ZeRO stage 1: each rank of a shard group updates the parameters that it owns.

    After the update the owners broadcast the new values within the group. Experts that an expert axis divides have
    owners among the ranks with the same ones.
    """

    def __init__(
        self,
        model: ShardedModel,
        parameters: Sequence[Tensor],
        mark: Callable[[str], None],
        among: Sequence[Tensor] | None = None,
        room: Sequence[int] = (),
        *,
        experts: Sequence[Tensor] = (),
    ) -> None:
        """Set the parameters. `among`: all parameters divided over the ranks, if other strategies update the rest.

        `room`: relative sizes of the ranks' shards; empty for equal ones. `experts`: all parameters of this rank's
        experts, if an expert axis divides them.
        """
        super().__init__(model)
        self._mesh, self._mark = model.mesh, mark
        self._parameters = [p for p in parameters if id(p) not in self._matrix_owners]
        ranks = next(ranks for ranks in self._mesh.layout.groups("shard") if self._rank in ranks)
        self._owners = owners(parameters if among is None else among, ranks, room) | self._matrix_owners
        # Ranks and group of the usual parameters, then of the experts: one order on all ranks.
        self._groups = [(ranks, self._mesh.group("shard"))]
        self._own_experts = set(map(id, experts))
        copies = next(ranks for ranks in self._mesh.layout.expert_copies() if self._rank in ranks)
        if experts and len(copies) > 1:
            self.divides_experts = True
            self._groups.append((copies, self._mesh.group(EXPERT_COPIES)))
            self._owners |= owners(experts, copies)
        self._divided: tuple[list[int], list[_Piece]] = [], []  # the last result of `_pieces`

    def update(self, step: Callable[[], None], *, queued: bool = False) -> None:
        """Call the optimizer's `step` for this rank's parameters, then exchange the new values.

        Collective: all ranks, a JSON gather; the shard group, and that of the ranks with the same experts, a broadcast
        of each owner's parameters, all their bytes once.
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
        waiting = deque(self._pieces(updated))
        under_way: deque[tuple[dist.Work, Tensor, list[Tensor]]] = deque()
        with torch.no_grad():
            while waiting or under_way:
                if waiting and len(under_way) <= PIECES_AT_ONCE:
                    root, group, members = waiting.popleft()
                    if len(members) == 1 and members[0].is_contiguous():
                        sent = members[0].detach()
                    elif root == self._rank:
                        sent = torch.cat([parameter.reshape(-1) for parameter in members])
                    else:
                        sent = members[0].new_empty(sum(map(Tensor.numel, members)))
                    under_way.append((dist.broadcast(sent, root, group=group, async_op=True), sent, members))
                    continue
                work, sent, members = under_way.popleft()
                work.wait()
                if sent.data_ptr() != members[0].data_ptr():
                    for parameter, part in zip(members, sent.split(list(map(Tensor.numel, members))), strict=True):
                        parameter.copy_(part.view(parameter.shape))
        self._mark("optimizer")

    def _pieces(self, parameters: list[Tensor]) -> list[_Piece]:
        """Return the broadcasts of these parameters."""
        key = list(map(id, parameters))
        if key != self._divided[0]:  # mostly each step updates the same parameters
            broadcasts = []
            for number, (ranks, group) in enumerate(self._groups):
                divided = [p for p in parameters if (id(p) in self._own_experts) == (number > 0)]
                for root in ranks:
                    owned = [p for p in divided if self._owners[id(p)] == root]
                    sizes = [p.nbytes for p in owned]
                    alone = [p.is_contiguous() and size >= PIECE_BYTES for p, size in zip(owned, sizes, strict=True)]
                    messages = pack(sizes, alone, [p.dtype for p in owned])
                    broadcasts += [_Piece(root, group, [owned[i] for i in members]) for members in messages]
            self._divided = key, broadcasts
        return self._divided[1]

    def updates(self, parameter: Tensor) -> bool:
        """Return True if this rank owns the parameter.

        Every rank owns untrained parameters that have optimizer state.
        """
        return self._owners.get(id(parameter), self._rank) == self._rank


def owners(parameters: Sequence[Tensor], ranks: Sequence[int], room: Sequence[int] = ()) -> dict[int, int]:
    """Return the rank that updates each parameter, by the parameter's id. `room`: as in `divide`."""
    numbers = divide([p.numel() * p.itemsize for p in parameters], len(ranks), room)
    return {id(p): ranks[number] for p, number in zip(parameters, numbers, strict=True)}


def error_of(step: Callable[[], None]) -> ShoalError | None:
    """Run an optimizer's `step`; return its error for an exchange with other ranks, or None."""
    try:
        step()
    except Exception as caught:
        return as_shoal_error(caught)
    return None
