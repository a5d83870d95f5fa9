"""Interface of a step's observers, which verification and measurements implement."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shoal.data.loader import Microbatch
from shoal.parallel.base import Strategy
from shoal.parallel.model.sharded_model import ShardedModel


class Observer:
    """Interface of a step's hooks, called on every rank. This class does nothing. An observer must change nothing.

    If a step is computed again, its hooks are called again, from `begin`. Gradients are in `parameter.grad`.
    """

    @property
    def has_hooks(self) -> bool:
        """True if the hooks may do anything."""
        return type(self) is not Observer

    @property
    def looks(self) -> bool:
        """True if each coming step must be read before the next step is queued. Identical on all ranks."""
        return self.has_hooks

    @property
    def always_looks(self) -> bool:
        """True if the observer looks at every coming step, not only at the next few."""
        return self.looks

    def attach(self, sharded_model: ShardedModel, optimizer: Optimizer, strategy: Strategy) -> None:
        """Receive a run's parts before the first step. The code that builds the engine calls this, not the engine."""

    def begin(self, step: int, factor: float) -> None:
        """Handle the start of a step. Loss totals are multiplied by `factor` before the backward."""

    def microbatch(self, microbatch: Microbatch, batch: Any) -> None:
        """Handle a microbatch before its forward. `batch` is on the device."""

    def forwarded(self) -> None:
        """Handle the end of the microbatch's forward on a pipeline stage that computes no loss."""

    def loss(self, total: Tensor, weight: Tensor | float) -> None:
        """Handle the loss of the microbatch before its backward."""

    def computed(self) -> None:
        """Handle the end of the microbatch's backward."""

    def reduced(self, loss: float, weight: float, scale: float) -> None:
        """Handle the gradients' sums over all ranks. Times `scale` they are the mean. `loss` is the mean loss."""

    def clipped(self, norm: float) -> None:
        """Handle the mean gradients after clipping. `norm`: their norm before clipping."""

    def updated(self, skipped: str | None) -> None:
        """Handle the end of a step. `skipped`: why the step changed nothing, None after an update."""

    def pulled(self, version: int) -> None:
        """Handle the parameters after `version` steps, which a worker pulled from parameter servers."""

    def part_begins(self, part: int) -> None:
        """Handle the start of a part of a step, on a worker with parameter servers."""

    def part_computed(self) -> None:
        """Handle the end of a worker's part of a step. In fast mode its gradients are in `parameter.grad`."""
