"""Flattened tensors: views of one vector, and bytes."""

from __future__ import annotations

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
