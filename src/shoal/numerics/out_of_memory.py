"""Exceptions by which torch and Python say that memory ran out."""

from __future__ import annotations

import torch

from shoal.errors import ShoalError, text_of

# Of the host's allocator, and of CUDA and its libraries, which do not ask torch's allocator for all that they need.
_WORDS = ("can't allocate memory", "not enough memory", "CUDA error: out of memory", "_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on a device or the host."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return not isinstance(error, ShoalError)
    text = text_of(error)
    return isinstance(error, RuntimeError) and any(words in text for words in _WORDS)
