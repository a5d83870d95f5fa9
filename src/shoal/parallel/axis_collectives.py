"""Differentiable collectives of a model-parallel axis; the backward of each is another of them.

As in Megatron-LM (Shoeybi et al., arXiv 1909.08053). Activations are whole on every rank of the axis, or cut alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.distributed.mesh import Mesh


@dataclass(frozen=True)
class TensorAxis:
    """Process group of the ranks that divide one model, their number, and this rank's index."""

    degree: int
    place: int
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, mesh: Mesh) -> TensorAxis:
        """The axis that a rank of a mesh is on."""
        return cls(mesh.layout.tensor, mesh.layout.coordinate(mesh.rank).tensor, mesh.group("tensor"))

    def __deepcopy__(self, memo: Any) -> TensorAxis:
        """Itself: a copied layer talks to the same ranks."""
        return self

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """A new tensor: the sum over the axis, or what `op` says. Collective: the axis, one all-reduce of its bytes."""
        found = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(found, op, group=self.group)
        return found

    def all_gather(self, tensor: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """The ranks' tensors one after the other along `dim`, where rank i has `sizes[i]`.

        Collective: the axis, one all-gather of as many bytes as the largest has, for each.
        """
        largest = max(sizes)
        shape = list(tensor.shape)
        shape[dim] = largest
        if tensor.shape[dim] == largest:
            own = tensor.contiguous()
        else:  # collectives take equal sizes
            own = tensor.new_zeros(shape)
            own.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
        rows = [torch.empty_like(own) for _ in sizes]
        dist.all_gather(rows, own, group=self.group)
        return torch.cat([row.narrow(dim, 0, size) for row, size in zip(rows, sizes, strict=True)], dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's part, of as many parts along `dim` as ranks, of the sum over the axis; 16 bits sum in float32.

        Collective: the axis, one reduce-scatter of its bytes.
        """
        wide = tensor.float() if tensor.itemsize < 4 and tensor.device.type == "cpu" else tensor
        parts = [part.contiguous() for part in wide.chunk(self.degree, dim)]
        found = torch.empty_like(parts[self.place])
        dist.reduce_scatter(found, parts, group=self.group)
        return found.to(tensor.dtype)


class _Copy(torch.autograd.Function):
    """Forward: the same. Backward: the sum over the axis."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _apply(_Reduce, gradient, ctx.axis), None


class _Reduce(torch.autograd.Function):
    """Forward: the sum over the axis. Backward: the same."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return axis.all_reduce(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _apply(_Copy, gradient, ctx.axis), None


class _Gather(torch.autograd.Function):
    """Forward: all ranks' slices. Backward: this rank's slice; what comes back is whole on every rank."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: TensorAxis, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.rest = axis, dim, sizes
        return axis.all_gather(tensor, dim, sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _apply(_Slice, gradient, *ctx.rest), None, None, None


class _Slice(torch.autograd.Function):
    """Forward: this rank's slice. Backward: all ranks' slices."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: TensorAxis, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.rest = axis, dim, sizes
        return tensor.narrow(dim, sum(sizes[: axis.place]), sizes[axis.place]).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _apply(_Gather, gradient, *ctx.rest), None, None, None


class _Join(torch.autograd.Function):
    """Forward: all ranks' parts of equal size. Backward: this rank's part of the gradients' sum."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: TensorAxis, dim: int) -> Tensor:
        ctx.rest = axis, dim
        return axis.all_gather(tensor, dim, (tensor.shape[dim],) * axis.degree)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _apply(_Divide, gradient, *ctx.rest), None, None


class _Divide(torch.autograd.Function):
    """Forward: this rank's part of the sum. Backward: all ranks' parts."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: TensorAxis, dim: int) -> Tensor:
        ctx.rest = axis, dim
        return axis.reduce_scatter(tensor, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _apply(_Join, gradient, *ctx.rest), None, None


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    found: Tensor = function.apply(*args)
    return found


def enter(tensor: Tensor, axis: TensorAxis) -> Tensor:
    """A whole tensor on its way into slices. Collective in the backward: the axis, an all-reduce of its gradient."""
    return _apply(_Copy, tensor, axis) if tensor.requires_grad and torch.is_grad_enabled() else tensor


def leave(tensor: Tensor, axis: TensorAxis) -> Tensor:
    """The whole from the ranks' terms. Collective: the axis, an all-reduce."""
    return _apply(_Reduce, tensor, axis)


def gather(tensor: Tensor, axis: TensorAxis, dim: int, sizes: Sequence[int]) -> Tensor:
    """The whole from the ranks' slices. Collective: the axis, an all-gather."""
    return _apply(_Gather, tensor, axis, dim, tuple(sizes))


def slice_of(tensor: Tensor, axis: TensorAxis, dim: int, sizes: Sequence[int]) -> Tensor:
    """This rank's slice of the whole. Collective in the backward: the axis, an all-gather."""
    return _apply(_Slice, tensor, axis, dim, tuple(sizes))


def join(tensor: Tensor, axis: TensorAxis, dim: int) -> Tensor:
    """Parts on their way into slices, whole. Collective: the axis, an all-gather; in the backward a reduce-scatter."""
    return _apply(_Join, tensor, axis, dim)


def divide(tensor: Tensor, axis: TensorAxis, dim: int) -> Tensor:
    """This rank's part of the sum of the ranks' terms. Collective: the axis, a reduce-scatter; back an all-gather."""
    return _apply(_Divide, tensor, axis, dim)
