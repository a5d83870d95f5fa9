"""Anonymous shared memory of one host's ranks, with a slot for each rank, and futexes (Linux).

The memory has no name, so no file can be left behind. The first rank creates it with memfd_create, mode 0600, and the
others open it through /proc/PID/fd. The kernel frees it with the last process that maps it, however those end; until
all have mapped it, each keeps a descriptor. The memory of the host or container limits it, not the size of /dev/shm.
Its size is sealed: no rank can make another's access fail.

Futexes are 32-bit words in that memory, for which ranks wait without using a core. A word has one writer and is
aligned, so a load or a store of it is one access of the machine. x86 keeps stores in order and loads in order (TSO), so
a reader of a word also sees earlier writes. Other machines need a fence on both sides: FUTEX_WAKE passes a full barrier
of the kernel before it looks for waiters (`futex_hb_waiters_pending`), so a wake of a word without waiters serves as a
fence. FUTEX_WAIT compares the word under the kernel's lock of its waiters, and a FUTEX_WAKE follows every store. No
wake-up is lost.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import CollectiveError, LaunchError

# The three highest bits of a page map entry: in memory, swapped out, a page of a file or shared.
_PAGE_FLAGS, _OF_FILE = 61, 1


class CopyOnWrite:
    """Two mappings of a file. Only this process sees writes through the private one, until it drops them.

    On Linux, an unwritten page of a private mapping is the page of the file itself, so it shows what others write
    through their shared mappings. The first write gives this process its own copy of the page. mmap(2) does not
    guarantee that unwritten pages show the writes of others, so `why_not_copied` tests this. /proc/self/pagemap shows
    which pages are copies.
    """

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
        flags = entries >> np.uint64(_PAGE_FLAGS)
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


T = TypeVar("T")

_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_WAIT, _WAKE, _PRIVATE = 0, 1, 128
_ALL = 0x7FFFFFFF
_ORDERED = ("x86_64",)  # machines with total store order
WORD_MASK = 0xFFFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def has_futexes() -> bool:
    """Return True if this machine has futexes and anonymous shared memory."""
    return sys.platform == "linux" and platform.machine() in _NUMBERS and hasattr(os, "memfd_create")


def is_behind(value: int, target: int) -> bool:
    """Return True if a wrapping 32-bit counter has not reached `target`; the two are less than 2**31 apart."""
    return 0 < ((target - value) & WORD_MASK) < 1 << 31


class Words:
    """The 32-bit words of a mapping. Indices count words, not bytes."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.values = memoryview(memory).cast("I")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._number = _NUMBERS[platform.machine()]
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        pointer, number = ctypes.c_void_p, ctypes.c_long
        self._syscall.argtypes = [number, pointer, ctypes.c_int, ctypes.c_uint, pointer, pointer, ctypes.c_uint]
        self._syscall.restype = number
        self._fences = platform.machine() not in _ORDERED
        self._own = ctypes.c_uint()

    def fence(self) -> None:
        """Order memory accesses before and after the call. Nothing to do on machines that keep the order."""
        if self._fences:
            self._syscall(self._number, ctypes.addressof(self._own), _WAKE | _PRIVATE, 1, None, None, 0)

    def publish(self, index: int, value: int) -> None:
        """Write a word after all earlier writes of this thread, and wake its waiters."""
        self.fence()
        self.values[index] = value & WORD_MASK
        self._syscall(self._number, self._address + 4 * index, _WAKE, _ALL, None, None, 0)

    def wait(self, index: int, seen: int, seconds: float) -> None:
        """Sleep until the word is not `seen`, until a spurious wake-up, or for at most `seconds`."""
        limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        place = self._address + 4 * index
        failed = self._syscall(self._number, place, _WAIT, seen, ctypes.addressof(limit), None, 0)
        if failed:
            number = ctypes.get_errno()
            if number not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
                raise OSError(number, os.strerror(number))


# Takes a rank's numbers and returns every rank's numbers in rank order.
Exchange = Callable[[list[int]], list[list[int]]]
_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")


class SharedRegion:
    """Mapping of `world_size` slots of `slot_bytes` each, rounded up to pages; initially zeros."""

    def __init__(self, memory: mmap.mmap, world_size: int, slot_bytes: int) -> None:
        self.memory, self.world_size, self.slot_bytes = memory, world_size, slot_bytes
        everything = torch.frombuffer(memory, dtype=torch.uint8)
        self.slots = list(everything.split(slot_bytes))
        self.base = everything.data_ptr()

    def tensor(self, rank: int, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return `numel` elements from byte `offset` of a rank's slot."""
        bytes_of_it: Tensor = self.slots[rank][offset : offset + numel * dtype.itemsize]
        return bytes_of_it.view(dtype)

    def own(self, rank: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return `tensor` from the slot's start, with a storage of exactly its size, so that it counts correctly."""
        if not numel:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.memory, dtype=dtype, count=numel, offset=rank * self.slot_bytes)

    def offset_in(self, rank: int, tensor: Tensor) -> int | None:
        """Return the byte of the rank's slot at which a tensor begins; None if the tensor is elsewhere."""
        start = tensor.data_ptr() - self.base - rank * self.slot_bytes
        inside = start >= 0 and start + tensor.numel() * tensor.itemsize <= self.slot_bytes
        return start if inside else None


def open_region(exchange: Exchange, rank: int, world_size: int, num_bytes: int) -> SharedRegion:
    """Map memory with at least `num_bytes` for each rank. Collective and raises: as `_opened`."""
    slot_bytes = -(-max(num_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = _opened(exchange, (rank, world_size), slot_bytes, mmap.mmap)
    if slot_bytes >= 1 << 21:
        with contextlib.suppress(OSError):  # the system may forbid it for shared memory
            memory.madvise(mmap.MADV_HUGEPAGE)
    region = SharedRegion(memory, world_size, slot_bytes)
    region.slots[rank].zero_()  # a page is allocated near the core that first touches it
    return region


def open_copied(exchange: Exchange, rank: int, world_size: int, num_bytes: int) -> CopyOnWrite:
    """Map memory of at least `num_bytes` for all ranks together. Collective and raises: as `_opened`."""
    slot_bytes = -(-max(num_bytes, 1) // (world_size * mmap.PAGESIZE)) * mmap.PAGESIZE
    return _opened(exchange, (rank, world_size), slot_bytes, CopyOnWrite)


def _opened(exchange: Exchange, place: tuple[int, int], slot_bytes: int, mapping: Callable[[int, int], T]) -> T:
    """Map a new file with `slot_bytes` for each rank; `place`: this rank and the number of ranks.

    Raises, on every rank: CollectiveError if the ranks request different sizes, LaunchError if one cannot map the file.
    Collective: two exchanges.
    """
    (rank, world_size), descriptor, problem = place, -1, 0
    if rank == 0:
        try:
            descriptor = os.memfd_create("shoal", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.fchmod(descriptor, 0o600)
                os.ftruncate(descriptor, slot_bytes * world_size)
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, sum(getattr(fcntl, name) for name in _SEALS))
            except OSError:
                os.close(descriptor)
                raise
        except OSError as error:
            problem = error.errno or -1
    status = os.fstat(descriptor) if descriptor >= 0 else None
    own = [os.getpid(), descriptor, status.st_ino if status else 0, slot_bytes, problem]
    rows = exchange(own)
    mapped: list[T] = []
    try:
        if not rows[0][4] and all(row[3] == slot_bytes for row in rows):
            if rank:
                pid, number, inode = rows[0][:3]
                descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
                if os.fstat(descriptor).st_ino != inode:
                    os.close(descriptor)
                    descriptor = -1
                    raise FileNotFoundError(2, "another process has that number here")
            mapped.append(mapping(descriptor, slot_bytes * world_size))
    except OSError as error:
        problem = error.errno or -1
    problems = [row[0] for row in exchange([problem])]  # the first rank keeps its descriptor until all have opened it
    if descriptor >= 0:
        os.close(descriptor)
    sizes = [row[3] for row in rows]
    if len(set(sizes)) > 1:
        raise CollectiveError(
            given=f"shared memory of {sizes} bytes by rank",
            conflict="every rank asks for the same size",
            remedy="allocate as many elements of the same dtype on every rank",
        )
    culprit = next((r for r, problem in enumerate(problems) if problem), None)
    if culprit is not None:
        raise LaunchError(
            given=f"{sum(sizes) / 1e6:.1f} MB of memory shared by {len(problems)} ranks",
            conflict=f"rank {culprit} cannot map it: {os.strerror(max(problems[culprit], 0))}",
            remedy='use all_reduce = "native", or let the ranks see each other in /proc and have that memory',
        )
    return mapped[0]


def place_of_process() -> list[int]:
    """Return numbers for kernel and namespace, equal for two processes exactly if they can open each other's files."""
    try:
        boot = int(Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", "")[:15], 16)
        return [int(has_futexes()), boot, os.stat("/proc/self/ns/pid").st_ino]
    except (OSError, ValueError):
        return [0, 0, 0]


def exchanged(row: list[int], group: dist.ProcessGroup | None = None) -> list[list[int]]:
    """Return every rank's row, of equal length. Collective: all ranks of the group (None: the run), an all-gather."""
    own = torch.tensor(row, dtype=torch.int64)
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, own, group=group)
    return [numbers.tolist() for numbers in rows]


def places() -> list[list[int]]:
    """Return `place_of_process` of every rank. Collective: all ranks of the run, an all-gather of three numbers."""
    return exchanged(place_of_process())
