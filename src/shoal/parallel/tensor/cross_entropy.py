"""Vocabulary-parallel cross entropy: two small sums over the tensor axis, no gathering of logits.

The method follows Megatron-LM (Shoeybi et al., arXiv 1909.08053, section 3). Ranks exchange the largest logit of each
row and then the row's sums; the backward is local. The result is that of torch's F.cross_entropy for class indices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.numerics import device_reads
from shoal.parallel.axis_collectives import TensorAxis


@dataclass(frozen=True)
class Classes:
    """Classes [start, stop) of `size` on a rank."""

    start: int
    stop: int
    size: int


@dataclass(frozen=True)
class Rows:
    """Targets int64 [N] with F.cross_entropy's options: class `weights` [C] or None, and label `smoothing`."""

    targets: Tensor
    ignored: int
    smoothing: float = 0.0
    weights: Tensor | None = None

    @property
    def counts(self) -> Tensor:
        """Whether each row counts, bool [N]."""
        return self.targets != self.ignored

    def row_weights(self, dtype: torch.dtype) -> Tensor:
        """Return the weight of each row's target, [N]; zero for a row that does not count."""
        if self.weights is None:
            return self.counts.to(dtype)
        known = self.targets.masked_fill(~self.counts, 0)
        return torch.where(self.counts, self.weights.to(dtype)[known], 0.0)

    def class_weights(self, classes: Classes, dtype: torch.dtype) -> tuple[Tensor | float, float]:
        """Return the weights of a rank's classes, [C of the rank], and the sum over all classes."""
        if self.weights is None:
            return 1.0, float(classes.size)
        wide = self.weights.to(dtype)
        return wide[classes.start : classes.stop], float(wide.sum())

    def own(self, classes: Classes) -> tuple[Tensor, Tensor]:
        """Return whether each row's target is among a rank's classes, and its index in them, else 0."""
        here = self.counts & (self.targets >= classes.start) & (self.targets < classes.stop)
        return here, torch.where(here, self.targets - classes.start, 0)

    def check(self, size: int) -> None:
        """Raise IndexError for a target that is no class, as torch does."""
        right = ~self.counts | ((self.targets >= 0) & (self.targets < size))
        if self.targets.is_meta or type(self.targets) is not Tensor:  # or fake
            return
        if device_reads.waits(self.targets.device):
            torch._assert_async(right.all())  # does not wait for the device
        elif not bool(right.all()):
            raise IndexError(f"Target {int(self.targets[~right][0])} is out of bounds.")


def wide(logits: Tensor) -> Tensor:
    """Convert the logits to float32 unless they are float64."""
    return logits if logits.dtype == torch.float64 else logits.float()


def highest(logits: Tensor) -> Tensor:
    """Return the largest of a rank's logits [N, C of the rank] per row, for a maximum over ranks."""
    return wide(logits).amax(1)


def row_sums(logits: Tensor, largest: Tensor, rows: Rows, classes: Classes) -> Tensor:
    """Return a rank's terms, [2 or 3, N], of the sums over exponentials, target logits and weighted logits."""
    values = wide(logits)
    here, place = rows.own(classes)
    exponentials = (values - largest.unsqueeze(1)).exp_().sum(1)
    target = values.gather(1, place.unsqueeze(1)).squeeze(1).masked_fill(~here, 0.0)
    sums = [exponentials, target]
    if rows.smoothing:
        weights, _ = rows.class_weights(classes, values.dtype)
        sums.append((values * weights).sum(1))
    return torch.stack(sums)


def losses(sums: Tensor, largest: Tensor, rows: Rows, classes: Classes) -> tuple[Tensor, Tensor]:
    """Return the loss of each row [N], and the logarithm of its sum of exponentials."""
    logarithm = sums[0].log() + largest
    loss = (logarithm - sums[1]) * rows.row_weights(sums.dtype)
    if rows.smoothing:
        _, total = rows.class_weights(classes, sums.dtype)
        smooth = (total * logarithm - sums[2]).masked_fill(~rows.counts, 0.0)
        loss = (1 - rows.smoothing) * loss + rows.smoothing / classes.size * smooth
    return loss.masked_fill(~rows.counts, 0.0), logarithm


def gradient(logits: Tensor, logarithm: Tensor, given: Tensor, rows: Rows, classes: Classes) -> Tensor:
    """Return the gradient of a rank's logits, [N, C of the rank], from `given` [N], the losses' gradient."""
    result = (wide(logits) - logarithm.unsqueeze(1)).exp_()
    dtype = result.dtype
    here, place = rows.own(classes)
    scale = (1 - rows.smoothing) * rows.row_weights(dtype) * given
    factor = scale
    if rows.smoothing:
        weights, total = rows.class_weights(classes, dtype)
        smooth = (rows.smoothing / classes.size * given).masked_fill(~rows.counts, 0.0)
        factor = scale + total * smooth
    result.mul_(factor.unsqueeze(1))
    if rows.smoothing:
        result.sub_(smooth.unsqueeze(1) * weights)
    result.scatter_add_(1, place.unsqueeze(1), -torch.where(here, scale, 0.0).unsqueeze(1))
    # A row that does not count may contain infinities, which would be multiplied by zero.
    return result.masked_fill_(~rows.counts.unsqueeze(1), 0.0).to(logits.dtype)


class _Losses(torch.autograd.Function):
    """Autograd function of the rows' losses, identical on every rank; the backward is local."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: Rows, classes: Classes, axis: TensorAxis) -> Tensor:
        largest = axis.all_reduce(highest(logits), dist.ReduceOp.MAX)
        sums = axis.all_reduce(row_sums(logits, largest, rows, classes))
        loss, logarithm = losses(sums, largest, rows, classes)
        ctx.save_for_backward(logits, logarithm)
        ctx.rest = rows, classes
        return loss

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, None, None, None]:
        logits, logarithm = ctx.saved_tensors
        return gradient(logits, logarithm, given, *ctx.rest), None, None, None


def cross_entropy(logits: Tensor, rows: Rows, classes: Classes, axis: TensorAxis, reduction: str) -> Tensor:
    """Return F.cross_entropy of [N, C of the rank] and targets [N], in float32 at least: a scalar, or [N] unreduced.

    Collective: the axis, an all-reduce of N numbers and one of 2 N (3 N with label smoothing).
    Raises: IndexError for a target that is no class.
    """
    rows.check(classes.size)
    loss: Tensor = _Losses.apply(logits, rows, classes, axis)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / rows.row_weights(loss.dtype).sum()
