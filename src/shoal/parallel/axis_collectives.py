"""Differentiable collectives of a model-parallel axis. The backward of each is another of these collectives.

The scheme follows Megatron-LM (Shoeybi et al., arXiv 1909.08053). Activations are whole on every rank of the axis, or
every rank has an equal slice.
"""

from __future__ import annotations

import math
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
    """Return True if the tensor is fake. Before torch 2.13, fake tensors support no collective but the all-reduce."""
    module = sys.modules.get("torch._subclasses.fake_tensor")  # loaded only if something else uses fake tensors
    return module is not None and isinstance(tensor, module.FakeTensor)


@dataclass(frozen=True)
class TensorAxis:
    """Process group of the ranks that divide one model, their number, and this rank's index."""

    degree: int
    place: int
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, mesh: Mesh, axis: str = "tensor") -> TensorAxis:
        """Return the axis that contains this rank of a mesh."""
        return cls(mesh.layout.degree(axis), getattr(mesh.layout.coordinate(mesh.rank), axis), mesh.group(axis))

    def __deepcopy__(self, memo: Any) -> TensorAxis:
        """Return the axis itself: a copied layer communicates with the same ranks."""
        return self

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Return the sum over the axis, or another `op`, as a new tensor. Collective: the axis, an all-reduce."""
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, op, group=self.group)
        return total

    def all_gather(self, tensor: Tensor, dim: int, sizes: Sequence[int] = ()) -> Tensor:
        """Return the ranks' tensors concatenated along `dim`. Rank i has `sizes[i]`; by default sizes are equal.

        Collective: the axis, one all-gather; each rank sends as many bytes as the largest tensor has.
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
        """Return a copy of this rank's slice of a whole tensor, in which rank i has `sizes[i]` along `dim`."""
        return tensor.narrow(dim, sum(sizes[: self.place]), sizes[self.place]).clone()

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's equal part, along `dim`, of the sum over the axis.

        On a CPU, 16 bits are summed in float32.
        Collective: the axis, one reduce-scatter of the tensor's bytes.
        """
        wide = tensor.float() if tensor.itemsize < 4 and tensor.device.type == "cpu" else tensor
        parts = [part.contiguous() for part in wide.chunk(self.degree, dim)]
        own = torch.empty_like(parts[self.place])
        if not is_without_data(own):
            dist.reduce_scatter(own, parts, group=self.group)
        return own.to(tensor.dtype)

    def all_to_all(self, tensor: Tensor, num_sent: Sequence[int], num_received: Sequence[int]) -> Tensor:
        """Send `num_sent[i]` rows, in order, to rank i, and return the `num_received[i]` rows of each rank i.

        Collective: the axis, one all-to-all of the rows' bytes.
        """
        received = tensor.new_empty(sum(num_received), *tensor.shape[1:])
        if is_without_data(tensor):
            return received
        width = tensor.element_size() * math.prod(tensor.shape[1:])  # bytes, because Gloo does not support every dtype
        flat, sizes = tensor.contiguous().view(-1), ([n * width for n in num_received], [n * width for n in num_sent])
        dist.all_to_all_single(received.view(-1).view(torch.uint8), flat.view(torch.uint8), *sizes, group=self.group)
        return received


class _Through(torch.autograd.Function):
    """Autograd function that applies `there` in the forward and `back` to the gradient in the backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: Change, back: Change) -> Tensor:
        ctx.turned = back, there
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return through(gradient, *ctx.turned), None, None


def through(tensor: Tensor, there: Change, back: Change) -> Tensor:
    """Return `there(tensor)`, differentiable, with `back` applied to its gradient. Collective: as both functions."""
    result: Tensor = _Through.apply(tensor, there, back)  # type: ignore[no-untyped-call]
    return result


def _same(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)


def enter(tensor: Tensor, axis: TensorAxis) -> Tensor:
    """Return a whole tensor for use in slices. Collective in the backward: the axis, an all-reduce of its gradient."""
    return through(tensor, _same, axis.all_reduce) if tensor.requires_grad and torch.is_grad_enabled() else tensor


def leave(tensor: Tensor, axis: TensorAxis) -> Tensor:
    """Return the sum of the ranks' terms. Collective: the axis, an all-reduce."""
    return through(tensor, axis.all_reduce, _same)


def gather(tensor: Tensor, axis: TensorAxis, dim: int, sizes: Sequence[int]) -> Tensor:
    """Return the whole from the ranks' slices. Collective: the axis, an all-gather."""
    return through(tensor, partial(axis.all_gather, dim=dim, sizes=sizes), partial(axis.own, dim=dim, sizes=sizes))


def slice_of(tensor: Tensor, axis: TensorAxis, dim: int, sizes: Sequence[int]) -> Tensor:
    """Return this rank's slice of the whole. Collective in the backward: the axis, an all-gather."""
    return through(tensor, partial(axis.own, dim=dim, sizes=sizes), partial(axis.all_gather, dim=dim, sizes=sizes))


def join(tensor: Tensor, axis: TensorAxis, dim: int) -> Tensor:
    """Return the whole from equal parts. Collective: the axis, an all-gather; in the backward a reduce-scatter."""
    return through(tensor, partial(axis.all_gather, dim=dim), partial(axis.reduce_scatter, dim=dim))


def divide(tensor: Tensor, axis: TensorAxis, dim: int) -> Tensor:
    """Return this rank's part of the ranks' sum.

    Collective: the axis, a reduce-scatter; in the backward an all-gather.
    """
    return through(tensor, partial(axis.reduce_scatter, dim=dim), partial(axis.all_gather, dim=dim))
