"""Batch normalisation over the global batch of a step, for ranks that each compute one microbatch.

In the forward the ranks gather the count, the mean and the variance of each channel, and merge them in the order of
ranks. In the backward they add the two sums by channel that each input's gradient depends on.
Sources: Ioffe and Szegedy (arXiv 1502.03167) for the gradients, Chan et al. (1979) for the merge of variances.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.distributed.mesh import Mesh, new_group
from shoal.errors import JobError
from shoal.numerics.batch_statistics import normalised_by_grain


class GlobalNorm:
    """Batch normalisation of one rank's rows with the statistics of the rows of all ranks."""

    def __init__(self, mesh: Mesh) -> None:
        """Open a group of its own, whose messages never meet those of gradients. Collective: all ranks."""
        self._group, self._mesh = new_group([range(mesh.world_size)]), mesh

    def __call__(self, given: Mapping[str, Any], counts: bool) -> Tensor:
        """Return the normalised input, and update the running statistics.

        `given`: the arguments of torch's function, with an input [rows, channels, ...]. `counts`: False for a filler,
        whose rows add nothing to the statistics. Raises: JobError if the global batch has one value per channel.
        Collective: all ranks. A rank sends 8 * (2 * channels + 1) bytes, and in the backward 16 * channels bytes.
        """
        input: Tensor = given["input"]
        wide = input if input.itemsize >= torch.float32.itemsize else input.float()
        count = input.numel() // input.size(1)
        with torch.no_grad():
            own, center = torch.var_mean(wide, [dim for dim in range(input.ndim) if dim != 1], correction=0)
            row = torch.cat([own.new_tensor([count]).double(), center.double(), own.double()])
            rows = torch.stack(self.exchange(row if counts else torch.zeros_like(row)))
            sizes, (means, variances) = rows[:, :1], rows[:, 1:].chunk(2, 1)
            total = sizes.sum()
            if not (counts and count > 1) and float(total) <= 1.0:  # a read of the device in this rare case alone
                raise no_variance()
            mean = (sizes * means).sum(0) / total
            variance = (sizes * (variances + (means - mean).square())).sum(0) / total
            for name, value in (("running_mean", mean), ("running_var", variance * (total / (total - 1.0)))):
                if given.get(name) is not None:
                    given[name].lerp_(value.to(given[name].dtype), given.get("momentum", 0.1))
        weight, bias = given.get("weight"), given.get("bias")
        weight = torch.ones_like(center) if weight is None else weight.to(wide.dtype)
        bias = torch.zeros_like(center) if bias is None else bias.to(wide.dtype)
        shared = _Shared(mean.to(wide.dtype), variance.to(wide.dtype), total, given.get("eps", 1e-5), self, counts)
        output: Tensor = _Normalise.apply(input, weight, bias, shared)  # type: ignore[no-untyped-call]
        return output

    def exchange(self, row: Tensor) -> list[Tensor]:
        """Return the rows of all ranks, in the order of ranks. Collective: all ranks."""
        sent = row.cpu() if self._mesh.through_host else row
        rows = [torch.empty_like(sent) for _ in range(self._mesh.world_size)]
        dist.all_gather(rows, sent, group=self._group)
        return [one.to(row.device) for one in rows]


def normalised_whole(given: Mapping[str, Any]) -> Tensor:
    """Return the normalised input of one process that has the whole global batch. Raises: as `GlobalNorm`."""
    if given["input"].numel() == given["input"].size(1):
        raise no_variance()
    return normalised_by_grain([given["input"]], given)


def no_variance() -> JobError:
    """Return the error for a step of one sample, with one value per channel of a batch norm over the global batch."""
    return JobError(
        given='a step of one sample with Job(batch_norm="batch"): a batch norm has one value per channel',
        conflict="a single value has no variance",
        remedy="give a global_batch that does not leave one sample for the last step, or leave a sample out",
    )


class _Shared(NamedTuple):
    """Statistics of the inputs of all ranks, each float [channels], their count, and whether this rank's rows count."""

    mean: Tensor
    variance: Tensor
    total: Tensor
    eps: float
    norm: GlobalNorm
    counts: bool


class _Normalise(torch.autograd.Function):
    """Normalisation with statistics that are functions of the inputs of all ranks.

    torch's function for evaluation computes both directions: in the backward, its gradient takes the statistics as
    constants, and its output for other weights is the part of the gradient through them.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor, shared: _Shared) -> Tensor:
        """Return the normalised input."""
        ctx.save_for_backward(input, weight)
        ctx.shared = shared
        return F.batch_norm(input, shared.mean, shared.variance, weight, bias, False, 0.0, shared.eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradients by input, weight and bias. Collective: all ranks."""
        (input, weight), (mean, variance, total, eps, norm, counts) = ctx.saved_tensors, ctx.shared
        known, every = (mean, variance, None, None, False, eps), [True, True, True]
        by_input, by_weight, by_bias = torch.ops.aten.native_batch_norm_backward(gradient, input, weight, *known, every)
        of_weight, of_bias = sum(norm.exchange(torch.cat([by_weight, by_bias]).double())).chunk(2)
        if counts:
            scale = -weight * torch.rsqrt(variance + eps) / total
            factors = (scale * of_weight).to(weight.dtype), (scale * of_bias).to(weight.dtype)
            by_input = by_input + F.batch_norm(input, mean, variance, *factors, False, 0.0, eps)
        return by_input, by_weight, by_bias, None
