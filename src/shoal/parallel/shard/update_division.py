"""Division of an update over ranks by whole parameters, so that an optimizer sees the same as on one process.

An optimizer may use a parameter's shape, its groups and whole matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.distributed.failures import as_shoal_error
from shoal.errors import ShoalError
from shoal.numerics.gradient_norm import is_settled, rounded
from shoal.parallel.model.sharded_model import ShardedModel
from shoal.plans.accounting.partition import divide

# For each parameter with a divided update, this rank's part of it, or None.
Parts = dict[nn.Parameter, nn.Parameter | None]


class UpdateDivision:
    """Division of one optimizer's update over the ranks. This class divides nothing: every rank updates everything.

    A step calls `begin` before its first backward. Its update calls `own_gradients` and `norm`, scales and clips the
    gradients, and calls `update`.
    """

    # Whether an update may follow another one before the host reads any of its results.
    queues = True

    def __init__(self, model: ShardedModel) -> None:
        """Set the model, which other axes may divide."""
        self._model = model

    def updates(self, parameter: Tensor) -> bool:
        """Return True if this rank updates the parameter and so has its optimizer state."""
        return True

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


def owners(parameters: Sequence[Tensor], ranks: Sequence[int]) -> dict[int, int]:
    """Return the rank that updates each parameter, by the parameter's id."""
    numbers = divide([p.numel() * p.itemsize for p in parameters], len(ranks))
    return {id(p): ranks[number] for p, number in zip(parameters, numbers, strict=True)}


def error_of(step: Callable[[], None]) -> ShoalError | None:
    """Run an optimizer's `step`; return its error for an exchange with other ranks, or None."""
    try:
        step()
    except Exception as caught:
        return as_shoal_error(caught)
    return None
