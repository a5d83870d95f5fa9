"""Flattened tensors: views of one vector, bytes, and the rows of tensors of any layout."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor


def views_of(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The pieces of a vector, one after the other, in the shapes of these tensors, which fill it.

    Of a complex tensor a real vector has both parts of each element: its piece has the shape of `as_real`.
    """
    if flat.is_complex() or not any(map(Tensor.is_complex, like)):
        pieces = flat.split([tensor.numel() for tensor in like])
        return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]
    pieces = flat.split([real_numel(tensor) for tensor in like])
    shapes = [(*tensor.shape, 2) if tensor.is_complex() else tensor.shape for tensor in like]
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def real_numel(tensor: Tensor) -> int:
    """How many real numbers a tensor has: two for each complex element."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def as_real(tensor: Tensor) -> Tensor:
    """A tensor as real numbers: of a complex one both parts, in one more dim; any other as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def in_dtype(real: Tensor, like: Tensor) -> Tensor:
    """Real numbers, as `as_real` gives them, in the dtype of a tensor; themselves where that is theirs."""
    if like.is_complex():  # not a view: where it lies need not be aligned for pairs
        return torch.view_as_complex(real.clone()).to(like.dtype)
    return real if real.dtype == like.dtype else real.to(like.dtype)


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
