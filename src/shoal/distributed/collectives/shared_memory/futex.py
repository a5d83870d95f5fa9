"""Futexes: 32-bit words in shared memory, and waits for them that use no core (Linux).

What is relied on. A word has one writer and is aligned, so that a load or a store of it is one access of the machine.
x86 keeps stores in order and loads in order (TSO), so that who sees a word also sees what was written before it. Other
machines need a fence on either side: FUTEX_WAKE passes a full barrier of the kernel before it looks for waiters
(`futex_hb_waiters_pending`), and a wake of a word that nobody waits on is used as one. FUTEX_WAIT compares the word
under the kernel's lock of its waiters, and every store is followed by a FUTEX_WAKE: no wake-up is lost.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import sys

_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_WAIT, _WAKE, _PRIVATE = 0, 1, 128
_ALL = 0x7FFFFFFF
_ORDERED = ("x86_64",)  # machines with total store order
WORD_MASK = 0xFFFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def available() -> bool:
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
