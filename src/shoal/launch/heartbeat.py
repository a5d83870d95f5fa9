"""Heartbeat of a rank, in a memory-mapped file that the launcher reads: phase, its begin, and the longest time of each.

The rank writes at each change of phase, in a fraction of a microsecond. Reads need no lock: a half-written value is
at most one instant old.
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

HEARTBEAT_FILE = "SHOAL_HEARTBEAT_FILE"  # made by the local launcher; the rank's stacks are written next to it
# Ends a rank after it has shown its threads' stacks. Python's handler is in C and does not need the GIL.
STACKS = signal.SIGRTMAX
# Shows the stacks and lets the rank continue.
SHOW = signal.SIGRTMAX - 1

# Phases of a rank; those of a step are its spans. "away" (start-up, a checkpoint) has no predictable end.
PHASES = ("away", *SPANS, "evaluation")
_NUMBERS = {phase: number for number, phase in enumerate(PHASES)}
# Steps begun, the phase and its begin; then the longest seconds of each phase in this and the last window of steps.
_NOW = struct.Struct("<qqd")
_LONGEST = struct.Struct(f"<{len(PHASES)}d")
_SIZE = _NOW.size + 2 * _LONGEST.size
# Steps of a window. A long phase, for example a compilation, is forgotten after two windows.
_WINDOW = 64


class Heartbeat:
    """Writer of this process's heartbeat. Without a file it does nothing, and `writes` is False."""

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
        )  # then the signal's default action ends the process
        self._shown = _shown_of(path).open("wb")
        faulthandler.register(SHOW, self._shown, all_threads=True)
        if not faulthandler.is_enabled():  # otherwise the user has chosen another place
            faulthandler.enable(self._stacks, all_threads=True)

    @classmethod
    def joined(cls, variables: Mapping[str, str]) -> Heartbeat:
        """Return the heartbeat of a rank that a launcher watches, or one that does nothing if no launcher does."""
        path = variables.get(HEARTBEAT_FILE)
        return cls(Path(path) if path else None)

    def close(self) -> None:
        """Stop writing, for a process that continues without a launcher."""
        if self._memory is not None:
            faulthandler.unregister(STACKS)
            faulthandler.unregister(SHOW)
            faulthandler.disable()
            self._stacks.close()
            self._shown.close()
            self._memory.close()
            self._memory, self.writes = None, False

    def begin_step(self) -> None:
        """Count a step."""
        self._steps += 1
        if self._memory is not None and self._steps % _WINDOW == 0:
            _LONGEST.pack_into(self._memory, _NOW.size + _LONGEST.size, *self._longest)
            self._longest = [0.0] * len(PHASES)

    def enter(self, phase: str) -> None:
        """End the rank's current phase and begin `phase`. Entering the same phase again is a sign of life."""
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
    """Heartbeat of a rank at one instant: `since` on the clock of `time.perf_counter`, `longest` in seconds."""

    steps: int
    phase: str
    since: float
    longest: float  # of this phase in the last two windows; 0 if the phase has never ended


def make(path: Path) -> None:
    """Create an empty file for a rank's heartbeat."""
    path.write_bytes(bytes(_SIZE))


def read(path: Path) -> Reading | None:
    """Read the last heartbeat of a rank; None if the rank has not begun."""
    found = path.read_bytes()
    steps, number, since = _NOW.unpack_from(found)
    if not since or not 0 <= number < len(PHASES):
        return None
    windows = (_LONGEST.unpack_from(found, _NOW.size + place * _LONGEST.size) for place in range(2))
    return Reading(steps, PHASES[number], since, max(window[number] for window in windows))


def end(path: Path, process: Process, patience_seconds: float = 2.0) -> str:
    """Kill a process, even a stopped one. Return its threads' Python stacks, or an empty text if it shows none."""
    _signal_main_thread(process, STACKS)
    process.send_signal(signal.SIGCONT)  # the process runs no further: it handles the other signal first
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience_seconds)
    process.kill()
    return last_stacks(path)


def last_stacks(path: Path) -> str:
    """Return the Python stacks that a rank wrote on a fault or on request; empty if it wrote none."""
    with contextlib.suppress(OSError):
        found = _stacks_of(path).read_text(encoding="utf-8", errors="replace")
        return found.partition("\nExtension modules:")[0]
    return ""


def show(path: Path, process: Process, patience_seconds: float = 0.5) -> str:
    """Return the Python stacks of a rank, which continues; empty if the rank does not answer."""
    if read(path) is None:  # the rank has no handler yet
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
    """Send a signal to the main thread of a process, so that this thread stands still while all stacks are read.

    A stopped process gives a process-wide signal to the first thread that wakes, while its main thread runs on.
    """
    send = getattr(ctypes.CDLL(None), "tgkill", None)
    if process.poll() is None and (send is None or send(process.pid, process.pid, number) != 0):
        process.send_signal(number)


def _shown_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-shown.txt")


def _stacks_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-stacks.txt")
