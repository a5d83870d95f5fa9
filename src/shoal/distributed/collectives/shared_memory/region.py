"""Anonymous shared memory of one host's ranks, a slot for each, and futexes (Linux).

It has no name, so that no file can be left over: the first rank makes it with memfd_create, mode 0600, and the others
open it through /proc/PID/fd; the kernel frees it with the last process that maps it, however those end (until then each
keeps a descriptor). It is bounded by the memory of the host or container, and not by the size of /dev/shm. Its size is
sealed: no rank can make another's access fail.

Futexes are 32-bit words in that memory, and waits for them that use no core. What is relied on: a word has one writer
and is aligned, so that a load or a store of it is one access of the machine. x86 keeps stores in order and loads in
order (TSO), so that who sees a word also sees what was written before it. Other machines need a fence on either side:
FUTEX_WAKE passes a full barrier of the kernel before it looks for waiters (`futex_hb_waiters_pending`), and a wake of a
word that nobody waits on is used as one. FUTEX_WAIT compares the word under the kernel's lock of its waiters, and every
store is followed by a FUTEX_WAKE: no wake-up is lost.
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

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.distributed.collectives.shared_memory.copy_on_write import CopyOnWrite
from shoal.errors import CollectiveError, LaunchError

T = TypeVar("T")

_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_WAIT, _WAKE, _PRIVATE = 0, 1, 128
_ALL = 0x7FFFFFFF
_ORDERED = ("x86_64",)  # machines with total store order
WORD_MASK = 0xFFFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def has_futexes() -> bool:
    """Whether this machine has futexes and memory that can be shared without a name."""
    return sys.platform == "linux" and platform.machine() in _NUMBERS and hasattr(os, "memfd_create")


def is_behind(value: int, target: int) -> bool:
    """Whether a counter of 32 bits that wraps has not reached `target`; they are less than 2**31 apart."""
    return 0 < ((target - value) & WORD_MASK) < 1 << 31


class Words:
    """The 32-bit words of a mapping. Indices are words, not bytes."""

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
        """Memory fence: orders accesses before the call and after; nothing where the machine keeps order."""
        if self._fences:
            self._syscall(self._number, ctypes.addressof(self._own), _WAKE | _PRIVATE, 1, None, None, 0)

    def publish(self, index: int, value: int) -> None:
        """Writes a word after everything that this thread wrote, and wakes who waits for it."""
        self.fence()
        self.values[index] = value & WORD_MASK
        self._syscall(self._number, self._address + 4 * index, _WAKE, _ALL, None, None, 0)

    def wait(self, index: int, seen: int, seconds: float) -> None:
        """Sleeps until the word is not `seen` any more, is woken for no reason, or so many seconds have passed."""
        limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        place = self._address + 4 * index
        failed = self._syscall(self._number, place, _WAIT, seen, ctypes.addressof(limit), None, 0)
        if failed:
            number = ctypes.get_errno()
            if number not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
                raise OSError(number, os.strerror(number))


# Takes a rank's numbers, gives every rank's in order.
Exchange = Callable[[list[int]], list[list[int]]]
_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")


class SharedRegion:
    """Mapping of `world_size` slots of `slot_bytes` each, rounded up to pages; zeros at first."""

    def __init__(self, memory: mmap.mmap, world_size: int, slot_bytes: int) -> None:
        self.memory, self.world_size, self.slot_bytes = memory, world_size, slot_bytes
        everything = torch.frombuffer(memory, dtype=torch.uint8)
        self.slots = list(everything.split(slot_bytes))
        self.base = everything.data_ptr()

    def tensor(self, rank: int, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """`numel` elements from byte `offset` of a rank's slot."""
        bytes_of_it: Tensor = self.slots[rank][offset : offset + numel * dtype.itemsize]
        return bytes_of_it.view(dtype)

    def own(self, rank: int, numel: int, dtype: torch.dtype) -> Tensor:
        """As `tensor` from the slot's beginning, with a storage of that size: what a rank counts as its memory."""
        if not numel:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.memory, dtype=dtype, count=numel, offset=rank * self.slot_bytes)

    def offset_in(self, rank: int, tensor: Tensor) -> int | None:
        """The byte of the rank's slot at which a tensor begins; None where it is elsewhere."""
        start = tensor.data_ptr() - self.base - rank * self.slot_bytes
        inside = start >= 0 and start + tensor.numel() * tensor.itemsize <= self.slot_bytes
        return start if inside else None


def open_region(exchange: Exchange, rank: int, world_size: int, num_bytes: int) -> SharedRegion:
    """Memory with `num_bytes` or more for each rank. Collective and raises: as `_opened`."""
    slot_bytes = -(-max(num_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = _opened(exchange, (rank, world_size), slot_bytes, mmap.mmap)
    if slot_bytes >= 1 << 21:
        with contextlib.suppress(OSError):  # the system may forbid it for shared memory
            memory.madvise(mmap.MADV_HUGEPAGE)
    region = SharedRegion(memory, world_size, slot_bytes)
    region.slots[rank].zero_()  # a page lies near the core that touches it first
    return region


def open_copied(exchange: Exchange, rank: int, world_size: int, num_bytes: int) -> CopyOnWrite:
    """Memory of `num_bytes` or more for all ranks together. Collective and raises: as `_opened`."""
    slot_bytes = -(-max(num_bytes, 1) // (world_size * mmap.PAGESIZE)) * mmap.PAGESIZE
    return _opened(exchange, (rank, world_size), slot_bytes, CopyOnWrite)


def _opened(exchange: Exchange, place: tuple[int, int], slot_bytes: int, mapping: Callable[[int, int], T]) -> T:
    """Mapping of a new file, which has so many bytes for each rank; `place`: this one and how many there are.

    Collective: two exchanges. Raises: on every rank, CollectiveError where they ask for different sizes, LaunchError
    where any cannot map it.
    """
    (rank, world_size), descriptor, problem = place, -1, 0
    if rank == 0:
        try:
            descriptor = _create(slot_bytes * world_size)
        except OSError as error:
            problem = error.errno or -1
    status = os.fstat(descriptor) if descriptor >= 0 else None
    own = [os.getpid(), descriptor, status.st_ino if status else 0, slot_bytes, problem]
    told = exchange(own)
    mapped: list[T] = []
    try:
        if not told[0][4] and all(row[3] == slot_bytes for row in told):
            if rank:
                descriptor = _open_of(*told[0][:3])
            mapped.append(mapping(descriptor, slot_bytes * world_size))
    except OSError as error:
        problem = error.errno or -1
    problems = [row[0] for row in exchange([problem])]  # the first rank keeps its descriptor until all have opened it
    if descriptor >= 0:
        os.close(descriptor)
    _refuse([row[3] for row in told], problems)
    return mapped[0]


def _create(num_bytes: int) -> int:
    descriptor = os.memfd_create("shoal", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, num_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, sum(getattr(fcntl, name) for name in _SEALS))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _open_of(pid: int, number: int, inode: int) -> int:
    """The file that another process has open. Raises: OSError where it is not the one that was meant."""
    descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    if os.fstat(descriptor).st_ino != inode:
        os.close(descriptor)
        raise FileNotFoundError(2, "another process has that number here")
    return descriptor


def place_of_process() -> list[int]:
    """Numbers that are equal for two processes exactly where they can open each other's files: kernel, namespace."""
    try:
        boot = int(Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", "")[:15], 16)
        return [int(has_futexes()), boot, os.stat("/proc/self/ns/pid").st_ino]
    except (OSError, ValueError):
        return [0, 0, 0]


def exchanged(row: list[int], group: dist.ProcessGroup | None = None) -> list[list[int]]:
    """The row of each rank, as long on all. Collective: all ranks of the group (the run where None), an all-gather."""
    own = torch.tensor(row, dtype=torch.int64)
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, own, group=group)
    return [told.tolist() for told in rows]


def places() -> list[list[int]]:
    """`place_of_process` of every rank. Collective: all ranks of the run, an all-gather of three numbers."""
    return exchanged(place_of_process())


def _refuse(sizes: list[int], problems: list[int]) -> None:
    if len(set(sizes)) > 1:
        raise CollectiveError(
            given=f"shared memory of {sizes} bytes by rank",
            conflict="every rank asks for the same size",
            remedy="allocate as many elements of the same dtype on every rank",
        )
    rank = next((r for r, problem in enumerate(problems) if problem), None)
    if rank is not None:
        raise LaunchError(
            given=f"{sum(sizes) / 1e6:.1f} MB of memory shared by {len(problems)} ranks",
            conflict=f"rank {rank} cannot map it: {os.strerror(max(problems[rank], 0))}",
            remedy='use all_reduce = "native", or let the ranks see each other in /proc and have that memory',
        )
