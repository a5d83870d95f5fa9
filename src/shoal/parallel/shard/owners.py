"""Division of an update over ranks by whole parameters, so that an optimizer sees the same as on one process.

An optimizer may use a parameter's shape, its groups and whole matrices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from shoal.distributed.failures import as_shoal_error
from shoal.errors import ShoalError
from shoal.plans.accounting.partition import divide

# For each parameter with a divided update, this rank's part of it, or None.
Parts = dict[nn.Parameter, nn.Parameter | None]


class DividedUpdate(ABC):
    """Update that ranks divide: each rank steps the job's optimizer for the parameters that it owns."""

    def __init__(
        self, parameters: Sequence[Tensor], divided: Sequence[Tensor], ranks: Sequence[int], rank: int
    ) -> None:
        """Set the `parameters` updated here, and `divided`: all those divided over `ranks`, which include `rank`."""
        self._parameters, self._ranks, self._rank = list(parameters), list(ranks), rank
        owners = divide([p.numel() * p.itemsize for p in divided], len(ranks))
        self._root = {id(p): ranks[owner] for p, owner in zip(divided, owners, strict=True)}

    @abstractmethod
    def updates(self, parameter: Tensor) -> bool:
        """Check whether this rank owns the parameter."""

    @abstractmethod
    def update(self, step: Callable[[], None], *, queued: bool = False) -> None:
        """Call the optimizer's `step` for this rank's parameters, so that every rank ends with all new values.

        `queued`, for an update that `queues`: the ranks do not exchange whether `step` raised.
        """

    def divide(self, optimizer: torch.optim.Optimizer) -> Parts:
        """Return the parts of parameters that this rank's optimizer steps instead of the whole; none by default."""
        return {}

    def gradients_settle(self) -> None:
        """Wait until other ranks have scaled and clipped their parts of gradients; nothing by default."""
        return

    @property
    def queues(self) -> bool:
        """Whether an update may follow another one before the host reads any of its results; True by default."""
        return True

    def begin(self) -> None:
        """Begin a step, before its first backward; nothing by default."""
        return

    def own_gradients(self) -> None:
        """Keep only the gradients that this rank scales, clips and counts in the norm; all by default."""
        return

    def norm(self, own: float) -> float:
        """Return the norm over all gradients from the norm over what `own_gradients` keeps; the same by default."""
        return own

    def own_part(self, num_bytes: int) -> int:
        """Return how many of `num_bytes` parameter bytes count on this rank; all by default."""
        return num_bytes

    def _drop_others(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None and not self.updates(parameter):
                parameter.grad = None


def error_of(step: Callable[[], None]) -> ShoalError | None:
    """Run an optimizer's `step`; return its error for an exchange with other ranks, or None."""
    try:
        step()
    except Exception as caught:
        return as_shoal_error(caught)
    return None
