"""Anonymous shared memory of one host's ranks, a slot for each. It has no name, so that no file can be left over.

The first rank makes it with memfd_create, mode 0600, and the others open it through /proc/PID/fd; the kernel frees it
with the last process that maps it, however those end (until then each keeps a descriptor). It is bounded by the memory
of the host or container, and not by the size of /dev/shm. Its size is sealed: no rank can make another's access fail.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.distributed.collectives.shared_memory import futex
from shoal.errors import CollectiveError, LaunchError

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
    """Memory with `num_bytes` or more for each rank. Collective: two exchanges.

    Raises: on every rank, CollectiveError where they ask for different sizes, LaunchError where any cannot map it.
    """
    slot_bytes = -(-max(num_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    descriptor, problem = -1, 0
    if rank == 0:
        try:
            descriptor = _create(slot_bytes * world_size)
        except OSError as error:
            problem = error.errno or -1
    status = os.fstat(descriptor) if descriptor >= 0 else None
    own = [os.getpid(), descriptor, status.st_ino if status else 0, slot_bytes, problem]
    told = exchange(own)
    memory: mmap.mmap | None = None
    try:
        if not told[0][4] and all(row[3] == slot_bytes for row in told):
            if rank:
                descriptor = _open_of(*told[0][:3])
            memory = mmap.mmap(descriptor, slot_bytes * world_size)
    except OSError as error:
        problem = error.errno or -1
    problems = [row[0] for row in exchange([problem])]  # the first rank keeps its descriptor until all have opened it
    if descriptor >= 0:
        os.close(descriptor)
    _refuse_sizes([row[3] for row in told])
    _refuse_problems(problems, slot_bytes * world_size)
    assert memory is not None
    if slot_bytes >= 1 << 21:
        with contextlib.suppress(OSError):  # the system may forbid it for shared memory
            memory.madvise(mmap.MADV_HUGEPAGE)
    region = SharedRegion(memory, world_size, slot_bytes)
    region.slots[rank].zero_()  # a page lies near the core that touches it first
    return region


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
        return [int(futex.available()), boot, os.stat("/proc/self/ns/pid").st_ino]
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


def _refuse_sizes(sizes: list[int]) -> None:
    if len(set(sizes)) > 1:
        raise CollectiveError(
            given=f"shared memory of {sizes} bytes by rank",
            conflict="every rank asks for the same size",
            remedy="allocate as many elements of the same dtype on every rank",
        )


def _refuse_problems(problems: list[int], num_bytes: int) -> None:
    rank = next((r for r, problem in enumerate(problems) if problem), None)
    if rank is not None:
        raise LaunchError(
            given=f"{num_bytes / 1e6:.1f} MB of memory shared by {len(problems)} ranks",
            conflict=f"rank {rank} cannot map it: {os.strerror(max(problems[rank], 0))}",
            remedy='use all_reduce = "native", or let the ranks see each other in /proc and have that memory',
        )
