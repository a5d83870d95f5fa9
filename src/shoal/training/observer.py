"""Observer hooks of a step, for tracing and verification."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shoal.data.microbatch import Microbatch


class Observer:
    """Interface of a step's hooks, called on every rank; this class does nothing. An observer must change nothing.

    A step that has to be computed again begins again. Gradients are read off the parameters' `.grad`.
    """

    def begin(self, step: int, factor: float) -> None:
        """A step's computation starts; loss totals are multiplied by `factor` before the backward."""

    def microbatch(self, microbatch: Microbatch, batch: Any) -> None:
        """The forward of a microbatch comes next; `batch` is on the device."""

    def forwarded(self) -> None:
        """The forward of that microbatch is done as far as this rank's stage of the model goes, which has no loss."""

    def loss(self, total: Tensor, weight: Tensor | float) -> None:
        """The loss of that microbatch; its backward comes next."""

    def computed(self) -> None:
        """The backward of that microbatch is done."""

    def reduced(self, loss: float, weight: float, scale: float) -> None:
        """Gradients are summed over all ranks; times `scale` they are the mean. `loss` is the mean loss."""

    def clipped(self, norm: float) -> None:
        """Gradients are the mean, clipped; `norm` is theirs before."""

    def updated(self, skipped: str | None) -> None:
        """Parameters, optimizer and buffers are those after the step, or unchanged where it was skipped."""
