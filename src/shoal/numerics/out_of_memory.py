"""Detection of exceptions from torch and Python that report exhausted memory."""

from __future__ import annotations

import torch

from shoal.errors import ShoalError, text_of

# Messages of the host's allocator, and of CUDA and its libraries, which also allocate without torch's allocator.
_WORDS = ("can't allocate memory", "not enough memory", "CUDA error: out of memory", "_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an exception reports that a device or the host ran out of memory, except shoal's own errors."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return not isinstance(error, ShoalError)
    text = text_of(error)
    return isinstance(error, RuntimeError) and any(words in text for words in _WORDS)
