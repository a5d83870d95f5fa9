"""Flattened tensors: views of one vector, bytes, and the rows of tensors of any layout."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor


def views_of(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The pieces of a vector, one after the other, in the shapes of these tensors, which fill it."""
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


def raw_bytes(tensor: Tensor) -> Tensor:
    """A tensor's bytes, uint8 [nbytes]: its own memory where that is in one piece."""
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def is_strided(tensor: Tensor) -> bool:
    """Whether a tensor is one block of numbers: not sparse, nested or quantized."""
    return tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized


def strided_parts(tensor: Tensor) -> list[Tensor]:
    """The strided tensors that a tensor consists of: itself, or indices and values of a sparse one, and the like."""
    if is_strided(tensor):
        return [tensor]
    if tensor.is_quantized:
        return [tensor.int_repr(), tensor.dequantize()]  # the second for its scales and zero points
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def row_runs(tensor: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """The numbers in runs of `counts` rows of a tensor of any layout; of a sparse one with their places in the run."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.is_nested:
        rows = iter(tensor.unbind())
        return [torch.cat([next(rows).reshape(-1) for _ in range(count)]) for count in counts]
    if tensor.layout == torch.strided:
        return [run.reshape(-1) for run in tensor.split(list(counts))]
    held = tensor.to_sparse_coo().coalesce()
    places, values = held.indices(), held.values()
    values = values.to(torch.complex128 if values.is_complex() else torch.float64)
    ends = torch.tensor([0, *counts], device=places.device).cumsum(0)
    cuts = torch.searchsorted(places[0].contiguous(), ends).tolist()
    runs = []
    for first, (begin, end) in zip(ends.tolist(), itertools.pairwise(cuts), strict=False):
        within = places[:, begin:end] + 1  # a place of zero would not count
        within[0] -= first
        runs.append(torch.cat([values[begin:end].reshape(-1), within.reshape(-1).to(values.dtype)]))
    return runs
