"""Memory of all ranks of a host under two mappings of this process: one shared, and one private (copy-on-write).

On Linux, an unwritten page of a private mapping is the page of the file itself, so it shows what others write through
their shared mappings. The first write gives this process its own copy of the page. mmap(2) does not
guarantee that unwritten pages show the writes of others, so `why_not_copied` tests this. /proc/self/pagemap shows which
pages are copies.
"""

from __future__ import annotations

import mmap
import os

import numpy as np
import torch
from torch import Tensor

# The three highest bits of a page map entry: in memory, swapped out, a page of a file or shared.
_FLAGS, _OF_FILE = 61, 1


class CopyOnWrite:
    """Two mappings of a file. Only this process sees writes through the private one, until it drops them."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        """Map the file; the descriptor may be closed afterwards. Raises: OSError."""
        self._shared = mmap.mmap(descriptor, num_bytes)
        self._private = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        first = torch.frombuffer(self._private, dtype=torch.uint8, count=1)
        self._page, self._num_pages = first.data_ptr() // mmap.PAGESIZE, -(-num_bytes // mmap.PAGESIZE)

    def shared(self, offset: int, num_bytes: int) -> Tensor:
        """Return bytes that all ranks map, uint8 [num_bytes], with a storage of exactly that size."""
        return _bytes_of(self._shared, offset, num_bytes)

    def private(self, offset: int, num_bytes: int) -> Tensor:
        """Return the same bytes, with this process's copies of the pages that it wrote since the last `drop`."""
        return _bytes_of(self._private, offset, num_bytes)

    def is_written(self) -> bool:
        """Return True if this process has written to the private mapping since the last `drop`.

        The check takes 20 ns a page: 0.1 ms for 23 MB.
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
        """Free the copies, so that the private mapping again shows the shared bytes."""
        self._private.madvise(mmap.MADV_DONTNEED)


def _bytes_of(memory: mmap.mmap, offset: int, num_bytes: int) -> Tensor:
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=offset)


def why_not_copied() -> str | None:
    """Return why this machine's private mappings do not work, from a trial; None if they work."""
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
