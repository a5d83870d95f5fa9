"""Heartbeat of a rank, in a file's memory that its launcher reads: its phase, since when, and how long each takes.

Written at each change of phase, a fraction of a microsecond each time, and read without a lock: a value that is half
written is one of an instant ago.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import mmap
import signal
import struct
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.runs.records import SPANS

if TYPE_CHECKING:
    from shoal.launch.fork_server import Process

HEARTBEAT_FILE = "SHOAL_HEARTBEAT_FILE"  # made by the local launcher, beside which the rank's stacks are written
# Ends a rank, which first shows the stacks of its threads. Python's handler is in C: nobody needs to give up the GIL.
STACKS = signal.SIGRTMAX
# Shows them, and the rank goes on.
SHOW = signal.SIGRTMAX - 1

# What a rank does; those of a step are its spans. "away" has no end that could be known: start-up, a checkpoint.
PHASES = ("away", *SPANS, "evaluation")
_NUMBERS = {phase: number for number, phase in enumerate(PHASES)}
# Steps begun, the phase, its beginning; then the longest seconds of each phase in this window of steps and the last.
_NOW = struct.Struct("<qqd")
_LONGEST = struct.Struct(f"<{len(PHASES)}d")
_SIZE = _NOW.size + 2 * _LONGEST.size
# Steps of a window: what took long before, a compilation say, is forgotten after two of them.
_WINDOW = 64


class Heartbeat:
    """Writer of this process's heartbeat; without a file it does nothing, and `writes` says so."""

    def __init__(self, path: Path | None) -> None:
        self._memory: mmap.mmap | None = None
        self.writes = path is not None
        self._steps, self._phase, self._since = 0, 0, 0.0
        self._longest = [0.0] * len(PHASES)
        if path is None:
            return
        self._since = time.perf_counter()
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _SIZE)
        self._stacks = _stacks_of(path).open("wb")
        faulthandler.register(
            STACKS, self._stacks, all_threads=True, chain=True
        )  # and ends, as the signal's default is
        self._shown = _shown_of(path).open("wb")
        faulthandler.register(SHOW, self._shown, all_threads=True)
        if not faulthandler.is_enabled():  # else someone has chosen another place
            faulthandler.enable(self._stacks, all_threads=True)

    @classmethod
    def joined(cls, variables: Mapping[str, str]) -> Heartbeat:
        """The heartbeat of a rank that a launcher watches; else one that does nothing."""
        path = variables.get(HEARTBEAT_FILE)
        return cls(Path(path) if path else None)

    def close(self) -> None:
        """Ends the writing, for a process that goes on without a launcher."""
        if self._memory is not None:
            faulthandler.unregister(STACKS)
            faulthandler.unregister(SHOW)
            faulthandler.disable()
            self._stacks.close()
            self._shown.close()
            self._memory.close()
            self._memory, self.writes = None, False

    def begin_step(self) -> None:
        """Counts a step."""
        self._steps += 1
        if self._memory is not None and self._steps % _WINDOW == 0:
            _LONGEST.pack_into(self._memory, _NOW.size + _LONGEST.size, *self._longest)
            self._longest = [0.0] * len(PHASES)

    def enter(self, phase: str) -> None:
        """Ends the phase that this rank was in, and begins another; the same again is a sign of life."""
        if self._memory is None:
            return
        now = time.perf_counter()
        if now - self._since > self._longest[self._phase]:
            self._longest[self._phase] = now - self._since
            _LONGEST.pack_into(self._memory, _NOW.size, *self._longest)
        self._phase, self._since = _NUMBERS[phase], now
        _NOW.pack_into(self._memory, 0, self._steps, self._phase, now)


@dataclass(frozen=True)
class Reading:
    """Heartbeat of a rank at an instant: `since` on the clock of `time.perf_counter`, `longest` in seconds."""

    steps: int
    phase: str
    since: float
    longest: float  # that this phase took lately; 0 where it never ended yet


def make(path: Path) -> None:
    """Makes an empty file for a rank's heartbeat."""
    path.write_bytes(bytes(_SIZE))


def read(path: Path) -> Reading | None:
    """The last heartbeat of a rank; None where it has not begun."""
    found = path.read_bytes()
    steps, number, since = _NOW.unpack_from(found)
    if not since or not 0 <= number < len(PHASES):
        return None
    windows = (_LONGEST.unpack_from(found, _NOW.size + place * _LONGEST.size) for place in range(2))
    return Reading(steps, PHASES[number], since, max(window[number] for window in windows))


def end(path: Path, process: Process, patience_seconds: float = 2.0) -> str:
    """Ends a process, also a stopped one; the Python stacks that its threads were in, empty where it shows none."""
    _signal_main_thread(process, STACKS)
    process.send_signal(signal.SIGCONT)  # on which it goes no further: the other signal comes first
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience_seconds)
    process.kill()
    return last_stacks(path)


def last_stacks(path: Path) -> str:
    """The Python stacks of a rank that has ended by a fault or was asked for them; empty where it has shown none."""
    with contextlib.suppress(OSError):
        found = _stacks_of(path).read_text(encoding="utf-8", errors="replace")
        return found.partition("\nExtension modules:")[0]
    return ""


def show(path: Path, process: Process, patience_seconds: float = 0.5) -> str:
    """The Python stacks of a rank that goes on; empty where it does not answer."""
    if read(path) is None:  # it could not listen yet
        return ""
    _signal_main_thread(process, SHOW)
    deadline, found = time.monotonic() + patience_seconds, ""
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
        before, found = found, _shown_of(path).read_text(encoding="utf-8", errors="replace")
        if found and found == before:
            break
    return found


def _signal_main_thread(process: Process, number: int) -> None:
    """Signals the main thread of a process, which then stands still while all stacks are read.

    A stopped process gives a signal of its own to whichever thread wakes first, while the main one runs on.
    """
    send = getattr(ctypes.CDLL(None), "tgkill", None)
    if process.poll() is None and (send is None or send(process.pid, process.pid, number) != 0):
        process.send_signal(number)


def _shown_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-shown.txt")


def _stacks_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-stacks.txt")
