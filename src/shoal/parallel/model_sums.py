"""Sums over the ranks that share one model: gradients that are partial over an axis, and the norm; whole tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.numerics.flat import raw_bytes
from shoal.numerics.gradient_norm import rounded
from shoal.parallel.model.sharded_model import ShardedModel, TensorSlices, entries, first_holders, local
from shoal.parallel.model.tensor_slice import TensorSlice


def add_partial(model: ShardedModel) -> None:
    """Sums the gradients that are partial over axes; of a parameter that no rank has one of there is none after it.

    Collective: for each axis, in its group, an all-reduce of flags and one for each such gradient.
    """
    mesh, partial = model.mesh, dict(sorted(model.division.partial.items()))
    for axis in sorted({axis for axes in partial.values() for axis in axes}):
        parameters = [model.model.get_parameter(name) for name, axes in partial.items() if axis in axes]
        parameters = [parameter for parameter in parameters if parameter.requires_grad]
        if not parameters:
            continue
        group = mesh.group(axis)
        there = torch.tensor([float(p.grad is not None) for p in parameters], device=mesh.device)
        dist.all_reduce(there, group=group)
        for parameter, count in zip(parameters, there.tolist(), strict=True):
            if count:
                _add(parameter, model, group)


def _add(parameter: nn.Parameter, model: ShardedModel, group: dist.ProcessGroup | None) -> None:
    """Adds up a gradient over a group, in float32 at least: 16 bits would lose what autograd kept."""
    dtype = torch.float32 if parameter.itemsize < 4 else parameter.dtype
    if parameter.is_meta:  # its stages are elsewhere: this rank adds nothing
        shape = model.division.cut(tuple(parameter.shape))
        dist.all_reduce(torch.zeros(shape, dtype=dtype, device=model.mesh.device), group=group)
        return
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    own = local(parameter.grad)
    wide = own.to(dtype)
    dist.all_reduce(wide, group=group)
    own.copy_(wide)


def whole_norm(model: ShardedModel, own: float) -> float:
    """The Euclidean norm over the whole model from that over the gradients that each rank `counts`, `rounded`.

    Collective: all ranks, one all-reduce of a number, where the model is divided.
    """
    if model.divided:
        squared = torch.tensor(own, dtype=torch.float64).square()
        dist.all_reduce(squared)
        own = float(squared.sqrt())
    return rounded(own, model.dtypes)


def whole_tensors(model: ShardedModel, held: TensorSlices) -> Iterator[tuple[str, Tensor | None]]:
    """Each path of any rank in order, with the whole tensor on rank 0's CPU and None on the others; one at a time.

    Collective: all ranks, a JSON gather and a message for each part that rank 0 lacks, where anything is divided.
    """
    mesh = model.mesh
    if not model.divides_state or mesh.world_size == 1:
        for path in sorted(held):
            yield path, held[path][1].cpu() if mesh.rank == 0 else None
        return
    told = mesh.gather_json(entries(held))
    for path in sorted(set().union(*told)):
        holders = first_holders(told, path)
        dtype, shape, _ = told[next(iter(holders))][path]
        whole = torch.empty(shape, dtype=getattr(torch, dtype)) if mesh.rank == 0 else None
        for rank in holders:
            part = TensorSlice.from_json(shape, told[rank][path][2])
            if mesh.rank == rank != 0:
                dist.send(raw_bytes(held[path][1].cpu()), 0)
            elif whole is not None and rank == 0:
                part.put(whole, held[path][1].cpu())
            elif whole is not None:
                received = torch.empty(part.local_shape, dtype=whole.dtype)
                dist.recv(raw_bytes(received), rank)
                part.put(whole, received)
        yield path, whole
