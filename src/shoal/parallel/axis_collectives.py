"""Differentiable collectives of a model-parallel axis; the backward of each is another of them.

As in Megatron-LM (Shoeybi et al., arXiv 1909.08053). Activations are whole on every rank of the axis, or cut alike.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.distributed.mesh import Mesh

Change = Callable[[Tensor], Tensor]


def is_without_data(tensor: Tensor) -> bool:
    """Whether a model is only being followed, of which torch before 2.13 knows no collective but the all-reduce."""
    module = sys.modules.get("torch._subclasses.fake_tensor")  # which nothing else loads
    return module is not None and isinstance(tensor, module.FakeTensor)


@dataclass(frozen=True)
class TensorAxis:
    """Process group of the ranks that divide one model, their number, and this rank's index."""

    degree: int
    place: int
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, mesh: Mesh, axis: str = "tensor") -> TensorAxis:
        """The ranks along an axis that a rank of a mesh is on."""
        return cls(mesh.layout.degree(axis), getattr(mesh.layout.coordinate(mesh.rank), axis), mesh.group(axis))

    def __deepcopy__(self, memo: Any) -> TensorAxis:
        """Itself: a copied layer talks to the same ranks."""
        return self

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """A new tensor: the sum over the axis, or what `op` says. Collective: the axis, one all-reduce of its bytes."""
        found = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(found, op, group=self.group)
        return found

    def all_gather(self, tensor: Tensor, dim: int, sizes: Sequence[int] = ()) -> Tensor:
        """The ranks' tensors one after the other along `dim`, where rank i has `sizes[i]`, or all have as many.

        Collective: the axis, one all-gather of as many bytes as the largest has, for each.
        """
        sizes = sizes or (tensor.shape[dim],) * self.degree
        largest = max(sizes)
        shape = list(tensor.shape)
        shape[dim] = largest
        if tensor.shape[dim] == largest:
            own = tensor.contiguous()
        else:  # collectives take equal sizes
            own = tensor.new_zeros(shape)
            own.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
        rows = [torch.empty_like(own) for _ in sizes]
        if not is_without_data(own):
            dist.all_gather(rows, own, group=self.group)
        return torch.cat([row.narrow(dim, 0, size) for row, size in zip(rows, sizes, strict=True)], dim)

    def own(self, tensor: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """A copy of this rank's slice of a whole, where rank i has `sizes[i]` along `dim`."""
        return tensor.narrow(dim, sum(sizes[: self.place]), sizes[self.place]).clone()

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's part, of as many parts along `dim` as ranks, of the sum over the axis; 16 bits sum in float32.

        Collective: the axis, one reduce-scatter of its bytes.
        """
        wide = tensor.float() if tensor.itemsize < 4 and tensor.device.type == "cpu" else tensor
        parts = [part.contiguous() for part in wide.chunk(self.degree, dim)]
        found = torch.empty_like(parts[self.place])
        if not is_without_data(found):
            dist.reduce_scatter(found, parts, group=self.group)
        return found.to(tensor.dtype)


class _Through(torch.autograd.Function):
    """Forward: what `there` makes of a tensor. Backward: what `back` makes of the gradient, likewise."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: Change, back: Change) -> Tensor:
        ctx.turned = back, there
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return through(gradient, *ctx.turned), None, None


def through(tensor: Tensor, there: Change, back: Change) -> Tensor:
    """Differentiable `there(tensor)`, whose gradient goes through `back`. Collective: as both of them are."""
    found: Tensor = _Through.apply(tensor, there, back)  # type: ignore[no-untyped-call]
    return found


def _same(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)


def enter(tensor: Tensor, axis: TensorAxis) -> Tensor:
    """A whole tensor on its way into slices. Collective in the backward: the axis, an all-reduce of its gradient."""
    return through(tensor, _same, axis.all_reduce) if tensor.requires_grad and torch.is_grad_enabled() else tensor


def leave(tensor: Tensor, axis: TensorAxis) -> Tensor:
    """The whole from the ranks' terms. Collective: the axis, an all-reduce."""
    return through(tensor, axis.all_reduce, _same)


def gather(tensor: Tensor, axis: TensorAxis, dim: int, sizes: Sequence[int]) -> Tensor:
    """The whole from the ranks' slices. Collective: the axis, an all-gather."""
    return through(tensor, partial(axis.all_gather, dim=dim, sizes=sizes), partial(axis.own, dim=dim, sizes=sizes))


def slice_of(tensor: Tensor, axis: TensorAxis, dim: int, sizes: Sequence[int]) -> Tensor:
    """This rank's slice of the whole. Collective in the backward: the axis, an all-gather."""
    return through(tensor, partial(axis.own, dim=dim, sizes=sizes), partial(axis.all_gather, dim=dim, sizes=sizes))


def join(tensor: Tensor, axis: TensorAxis, dim: int) -> Tensor:
    """Parts on their way into slices, whole. Collective: the axis, an all-gather; in the backward a reduce-scatter."""
    return through(tensor, partial(axis.all_gather, dim=dim), partial(axis.reduce_scatter, dim=dim))


def divide(tensor: Tensor, axis: TensorAxis, dim: int) -> Tensor:
    """This rank's part of the sum of the ranks' terms. Collective: the axis, a reduce-scatter; back an all-gather."""
    return through(tensor, partial(axis.reduce_scatter, dim=dim), partial(axis.all_gather, dim=dim))
