"""Memory of all ranks of a host under two mappings of this process: one shared, and one private, copied on write.

Linux: a page of a private mapping that was not written to is the page of the file itself, so that what others write
through their shared mappings is seen in it; the first write gives this process a copy of that page, which nobody else
sees. mmap(2) leaves the former open, so that `why_not_copied` tries it. /proc/self/pagemap tells which are copies.
"""

from __future__ import annotations

import mmap
import os

import numpy as np
import torch
from torch import Tensor

# Of an entry of the page map, its three highest bits: in memory, swapped out, a page of a file or shared.
_FLAGS, _OF_FILE = 61, 1


class CopyOnWrite:
    """Two mappings of a file: what is written through the private one stays in this process until it is dropped."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        """Raises: OSError. The descriptor may be closed afterwards."""
        self._shared = mmap.mmap(descriptor, num_bytes)
        self._private = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        first = torch.frombuffer(self._private, dtype=torch.uint8, count=1)
        self._page, self._num_pages = first.data_ptr() // mmap.PAGESIZE, -(-num_bytes // mmap.PAGESIZE)

    def shared(self, offset: int, num_bytes: int) -> Tensor:
        """Bytes that all ranks map, uint8 [num_bytes], a storage of their own size."""
        return _bytes_of(self._shared, offset, num_bytes)

    def private(self, offset: int, num_bytes: int) -> Tensor:
        """The same bytes, of which this process has copies where it has written to them since the last `drop`."""
        return _bytes_of(self._private, offset, num_bytes)

    def is_written(self) -> bool:
        """Whether anything in this process has written to the private mapping since the last `drop`.

        20 ns a page: 0.1 ms for 23 MB.
        """
        pages = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        try:
            entries = np.frombuffer(os.pread(pages, 8 * self._num_pages, 8 * self._page), dtype=np.uint64)
        finally:
            os.close(pages)
        if len(entries) != self._num_pages:
            raise OSError(5, f"/proc/self/pagemap tells of {len(entries)} pages of {self._num_pages}")
        flags = entries >> np.uint64(_FLAGS)
        return bool(((flags != 0) & (flags & np.uint64(_OF_FILE) == 0)).any())

    def drop(self) -> None:
        """Gives back the copies: the private mapping shows again what all ranks have."""
        self._private.madvise(mmap.MADV_DONTNEED)


def _bytes_of(memory: mmap.mmap, offset: int, num_bytes: int) -> Tensor:
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=offset)


def why_not_copied() -> str | None:
    """The reason why this machine's private mappings do not serve, from a trial; None where they do."""
    try:
        descriptor = os.memfd_create("shoal", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, 2 * mmap.PAGESIZE)
            tried = CopyOnWrite(descriptor, 2 * mmap.PAGESIZE)
        finally:
            os.close(descriptor)
        shared, private = tried.shared(0, 2 * mmap.PAGESIZE), tried.private(0, 2 * mmap.PAGESIZE)
        seen = [private[0].item()]
        shared[0] = 1
        seen += [private[0].item(), tried.is_written()]
        private[0] = 2
        seen += [shared[0].item(), tried.is_written()]
        tried.drop()
        seen += [private[0].item(), tried.is_written()]
    except OSError as error:
        return f"the pages of a private mapping cannot be told: {error}"
    return None if seen == [0, 1, False, 1, True, 1, False] else "a private mapping does not show what others write"
