"""Division of an update over ranks by whole parameters, so that an optimizer sees what it sees on one process.

Shapes, groups, and the whole of a matrix.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from shoal.distributed.failures import as_shoal_error
from shoal.errors import ShoalError
from shoal.plans.accounting.partition import divide

# By parameter whose update is divided this rank's part of it; None where it has none.
Parts = dict[nn.Parameter, nn.Parameter | None]


class DividedUpdate(ABC):
    """An update that ranks divide: each steps the job's optimizer for the parameters that it owns."""

    def __init__(
        self, parameters: Sequence[Tensor], divided: Sequence[Tensor], ranks: Sequence[int], rank: int
    ) -> None:
        """`parameters` are updated here; `divided` all that are divided over `ranks`, of which `rank` is one."""
        self._parameters, self._ranks, self._rank = list(parameters), list(ranks), rank
        owners = divide([p.numel() * p.itemsize for p in divided], len(ranks))
        self._root = {id(p): ranks[owner] for p, owner in zip(divided, owners, strict=True)}

    @abstractmethod
    def updates(self, parameter: Tensor) -> bool:
        """Whether this rank is its owner."""

    @abstractmethod
    def update(self, step: Callable[[], None], *, queued: bool = False) -> None:
        """Calls the optimizer's `step` for this rank's parameters, so that every rank ends with all new values.

        `queued`, where the update `queues`: the ranks do not ask each other whether it has raised.
        """

    def divide(self, optimizer: torch.optim.Optimizer) -> Parts:
        """Parts of single parameters that the optimizer steps on this rank in place of the whole ones; here none."""
        return {}

    def gradients_settle(self) -> None:
        """Waits until others have scaled and clipped their parts of gradients; here there are none."""
        return

    @property
    def queues(self) -> bool:
        """Whether an update may follow another one before anything of it is read: here it may."""
        return True

    def begin(self) -> None:
        """Begins a step, before its first backward; nothing here."""
        return

    def own_gradients(self) -> None:
        """Leaves a rank the gradients that it is to scale, clip and count in the norm: here all of them."""
        return

    def norm(self, own: float) -> float:
        """The norm over all gradients from that over those that `own_gradients` has left: here the same."""
        return own

    def own_part(self, num_bytes: int) -> int:
        """Of so many bytes of parameters those that count on this rank: here all."""
        return num_bytes

    def _drop_others(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None and not self.updates(parameter):
                parameter.grad = None


def error_of(step: Callable[[], None]) -> ShoalError | None:
    """Error of an optimizer's `step` on this rank, for the others to be told; None where it has stepped."""
    try:
        step()
    except Exception as caught:
        return as_shoal_error(caught)
    return None
