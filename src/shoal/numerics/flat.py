"""Flattened tensors: views of one vector, and bytes."""

from __future__ import annotations

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
