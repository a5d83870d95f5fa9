"""Differentiable collectives of a model-parallel axis; the backward of each is another of them.

As in Megatron-LM (Shoeybi et al., arXiv 1909.08053). Activations are whole on every rank of the axis, or cut alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


# What takes a tensor, the axis and further arguments, and gives a tensor.
_Exchange = Callable[..., Tensor]


class _Exchanged(torch.autograd.Function):
    """Autograd function of an exchange over the axis, whose backward is `back`: an exchange of the same arguments."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, exchange: _Exchange, back: _Exchange, *rest: Any) -> Tensor:
        ctx.exchanges = exchange, back, rest
        return exchange(tensor, *rest)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        exchange, back, rest = ctx.exchanges
        return _apply(gradient, back, exchange, *rest), None, None, *(None for _ in rest)


def _apply(tensor: Tensor, exchange: _Exchange, back: _Exchange, *rest: Any) -> Tensor:
    found: Tensor = _Exchanged.apply(tensor, exchange, back, *rest)  # type: ignore[no-untyped-call]
    return found


def _copy(tensor: Tensor, axis: TensorAxis) -> Tensor:
    return tensor.view_as(tensor)


def _sum(tensor: Tensor, axis: TensorAxis) -> Tensor:
    return axis.all_reduce(tensor)


def _gather(tensor: Tensor, axis: TensorAxis, dim: int, sizes: Sequence[int]) -> Tensor:
    return axis.all_gather(tensor, dim, sizes)


def _slice(tensor: Tensor, axis: TensorAxis, dim: int, sizes: Sequence[int]) -> Tensor:
    return tensor.narrow(dim, sum(sizes[: axis.place]), sizes[axis.place]).clone()


def _join(tensor: Tensor, axis: TensorAxis, dim: int) -> Tensor:
    return axis.all_gather(tensor, dim, (tensor.shape[dim],) * axis.degree)


def _divide(tensor: Tensor, axis: TensorAxis, dim: int) -> Tensor:
    return axis.reduce_scatter(tensor, dim)


def enter(tensor: Tensor, axis: TensorAxis) -> Tensor:
    """A whole tensor on its way into slices. Collective in the backward: the axis, an all-reduce of its gradient."""
    return _apply(tensor, _copy, _sum, axis) if tensor.requires_grad and torch.is_grad_enabled() else tensor


def leave(tensor: Tensor, axis: TensorAxis) -> Tensor:
    """The whole from the ranks' terms. Collective: the axis, an all-reduce."""
    return _apply(tensor, _sum, _copy, axis)


def gather(tensor: Tensor, axis: TensorAxis, dim: int, sizes: Sequence[int]) -> Tensor:
    """The whole from the ranks' slices. Collective: the axis, an all-gather."""
    return _apply(tensor, _gather, _slice, axis, dim, tuple(sizes))


def slice_of(tensor: Tensor, axis: TensorAxis, dim: int, sizes: Sequence[int]) -> Tensor:
    """This rank's slice of the whole. Collective in the backward: the axis, an all-gather."""
    return _apply(tensor, _slice, _gather, axis, dim, tuple(sizes))


def join(tensor: Tensor, axis: TensorAxis, dim: int) -> Tensor:
    """Parts on their way into slices, whole. Collective: the axis, an all-gather; in the backward a reduce-scatter."""
    return _apply(tensor, _join, _divide, axis, dim)


def divide(tensor: Tensor, axis: TensorAxis, dim: int) -> Tensor:
    """This rank's part of the sum of the ranks' terms. Collective: the axis, a reduce-scatter; back an all-gather."""
    return _apply(tensor, _divide, _join, axis, dim)
