"""Exceptions by which torch and Python say that memory ran out."""

from __future__ import annotations

import torch

from shoal.errors import ShoalError


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on a device or the host."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return not isinstance(error, ShoalError)
    text = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "not enough memory" in text)
