"""Checksum of tensors' bits, at the speed of memory. It detects flipped bits, not forgeries."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def bits_checksum(tensors: Iterable[Tensor]) -> int:
    """Return a number below 2^64 over the bits of tensors, in their order. Any single flipped bit changes the number.

    Each tensor's words are summed modulo 2^64, 8 bytes each if size and offset allow it. Waits for each tensor's
    device.
    """
    total = 0
    for tensor in tensors:
        own = tensor.detach().contiguous()
        flat = (torch.view_as_real(own.resolve_conj()).contiguous() if own.is_complex() else own).reshape(-1)
        size, place, least = flat.nbytes, flat.storage_offset() * flat.element_size(), flat.element_size()
        width = next(width for width in _WORDS if size % width == 0 and place % width == 0 and width >= least)
        total = (3 * total + int(flat.view(_WORDS[width]).sum(dtype=torch.int64))) % (1 << 64)
    return total
