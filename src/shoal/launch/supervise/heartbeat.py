"""Heartbeat of a rank, in a memory-mapped file that the launcher reads, and the launcher's watch over its ranks.

The rank writes its phase, the phase's begin and the longest time of each phase, at each change of phase, in a fraction
of a microsecond. Reads need no lock: a half-written value is at most one instant old. The watch detects stopped, frozen
and stuck ranks without using their collectives or clocks, and reads their Python stacks.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import math
import mmap
import os
import re
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.launch.supervise.child import DiskWaits, kill, standstill
from shoal.runs.records import SPANS

if TYPE_CHECKING:
    from shoal.launch.supervise.fork_server import Process

HEARTBEAT_FILE = "SHOAL_HEARTBEAT_FILE"  # made by the local launcher; the rank's stacks are written next to it
_STACKS, _SHOWN = "-stacks.txt", "-shown.txt"
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

# Pauses of up to 5 s do not trigger an alarm.
_LEAST_SECONDS = 5.0
_TIMES = 3.0
# For a phase that has never ended: a first step compiles, loads and connects.
_FIRST_SECONDS = 600.0
_LOOK_SECONDS, _PAUSED_SECONDS = 0.25, 1.0
# Phases that wait for other ranks, and phases without a time limit, such as writes to a disk.
_WAITING, _UNLIMITED = ("exposed_communication",), ("away", "checkpoint")

_FRAME = re.compile(r'File "(.+)", line (\d+),? in (\S+)')
_COLLECTIVES = re.compile(r"(.*[\\/]torch[\\/])distributed[\\/]distributed_c10d\.py$")
_OWN = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep  # as frames name it


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
        self._stacks = path.with_name(path.name + _STACKS).open("wb")
        # The signal's default action then ends the process.
        faulthandler.register(STACKS, self._stacks, all_threads=True, chain=True)
        self._shown = path.with_name(path.name + _SHOWN).open("wb")
        faulthandler.register(SHOW, self._shown, all_threads=True)
        if not faulthandler.is_enabled():  # otherwise the user has chosen another place
            faulthandler.enable(self._stacks, all_threads=True)

    @classmethod
    def joined(cls, variables: Mapping[str, str]) -> Heartbeat:
        """Return the heartbeat of a rank that a launcher watches, or one that does nothing if no launcher does."""
        path = variables.get(HEARTBEAT_FILE)
        return cls(Path(path) if path else None)

    def forget(self) -> None:
        """Forget how long phases took, so that each may last as in a first step, which compiles."""
        self._longest = [0.0] * len(PHASES)
        if self._memory is not None:
            for window in range(2):
                _LONGEST.pack_into(self._memory, _NOW.size + window * _LONGEST.size, *self._longest)

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
        """Count a step, which begins in the phase `other`."""
        self._steps += 1
        if self._memory is not None and self._steps % _WINDOW == 0:
            _LONGEST.pack_into(self._memory, _NOW.size + _LONGEST.size, *self._longest)
            self._longest = [0.0] * len(PHASES)
        self.enter("other")

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
    """Heartbeat of a rank at one instant, by the rank's own clock in seconds. A sign of life changes `since`."""

    steps: int
    phase: str
    since: float
    longest: float  # of this phase in the last two windows; 0 if the phase has never ended


def make(path: Path) -> None:
    """Create an empty file for a rank's heartbeat."""
    path.write_bytes(bytes(_SIZE))


def read(path: Path) -> Reading | None:
    """Read the last heartbeat of a rank; None if the rank has not begun."""
    memory = path.read_bytes()
    steps, number, since = _NOW.unpack_from(memory)
    if not since or not 0 <= number < len(PHASES):
        return None
    windows = (_LONGEST.unpack_from(memory, _NOW.size + place * _LONGEST.size) for place in range(2))
    return Reading(steps, PHASES[number], since, max(window[number] for window in windows))


def end(path: Path, process: Process, patience_seconds: float = 2.0) -> str:
    """Kill a process, even a stopped one. Return its threads' Python stacks, or an empty text if it shows none."""
    _signal_main_thread(process, STACKS)
    process.send_signal(signal.SIGCONT)  # the process runs no further: it handles the other signal first
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(0.0 if "frozen" in standstill(process.pid) else patience_seconds)
    kill(process)
    return last_stacks(path)


def last_stacks(path: Path) -> str:
    """Return the Python stacks that a rank wrote on a fault or on request; empty if it wrote none."""
    with contextlib.suppress(OSError):
        text = path.with_name(path.name + _STACKS).read_text(encoding="utf-8", errors="replace")
        return text.partition("\nExtension modules:")[0]
    return ""


def show(path: Path, process: Process, patience_seconds: float = 0.5) -> str:
    """Return the Python stacks of a rank, which continues; empty if the rank does not answer."""
    if read(path) is None:  # the rank has no handler yet
        return ""
    _signal_main_thread(process, SHOW)
    deadline, stacks = time.monotonic() + patience_seconds, ""
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
        text = path.with_name(path.name + _SHOWN).read_text(encoding="utf-8", errors="replace")
        before, stacks = stacks, text
        if stacks and stacks == before:
            break
    return stacks


def _signal_main_thread(process: Process, number: int) -> None:
    """Send a signal to the main thread of a process, so that this thread stands still while all stacks are read.

    A stopped process gives a process-wide signal to the first thread that wakes, while its main thread runs on.
    """
    send = getattr(ctypes.CDLL(None), "tgkill", None)
    if process.poll() is None and (send is None or send(process.pid, process.pid, number) != 0):
        process.send_signal(number)


# ---------------------------------------------------------------------------------------------- the launcher's watch


@dataclass
class OwnPauses:
    """Instant from which a process has watched others without an own pause of more than 1 s, by a monotonic clock."""

    clock: Callable[[], float] = time.monotonic
    since: float = -math.inf
    now: float = -math.inf

    def look(self) -> float:
        """Return the seconds since the last look, and 0 after a pause, in which this process noticed nobody's signs."""
        before, self.now = self.now, self.clock()
        if self.now - before <= _PAUSED_SECONDS:
            return self.now - before
        self.since = self.now
        return 0.0


@dataclass
class Watch:
    """Watch over ranks, by their process ids and heartbeat files. It times signs of life by its own monotonic clock.

    `unsaved` returns the seconds since the run's newest checkpoint, which a restart would repeat. Waiting for that long
    costs at most twice the best choice, whether the rank would have recovered or not.
    """

    heartbeats: Mapping[int, Path]
    unsaved: Callable[[], float]
    clock: Callable[[], float] = time.monotonic
    all_here: bool = True  # whether ranks that wait can only wait for ranks on this host
    excused: dict[str, float] = field(default_factory=dict)  # by phase, the seconds before an earlier alarm
    _signs: dict[int, tuple[Reading | None, float]] = field(default_factory=dict)  # the newest, and when it was new
    _stopped: dict[int, float] = field(default_factory=dict)
    _pauses: OwnPauses = field(init=False)
    _disks: DiskWaits = field(default_factory=DiskWaits)

    def __post_init__(self) -> None:
        self._pauses = OwnPauses(self.clock)

    def look(self, living: Mapping[int, int]) -> dict[int, str]:
        """Return the stopped and stuck ranks among `living` (rank: process id), with the reason to take them for lost.

        Checks at most four times a second.
        """
        if self.clock() - self._pauses.now < _LOOK_SECONDS:
            return {}
        passed, now, unsaved = self._pauses.look(), self._pauses.now, self.unsaved()
        lost: dict[int, str] = {}
        readings: dict[int, Reading] = {}
        for rank, path in self.heartbeats.items():
            reading, why = None, ""
            with contextlib.suppress(OSError):
                reading = read(path)
            before, at = self._signs.get(rank, (None, -math.inf))
            if before != reading or at < 0.0:
                at = now
                self._signs[rank] = reading, at
            elif rank in living:
                why = standstill(living[rank])
                if self._disks.look(living[rank], f"rank {rank}"):
                    at = now  # however long it takes
                    self._signs[rank] = reading, at
            self._stopped[rank] = seconds = self._stopped.get(rank, 0.0) + passed if why else 0.0
            if seconds > _LEAST_SECONDS:
                lost[rank] = f"was {why} for {seconds:.0f} s"
            if rank in living and reading is not None:
                readings[rank] = replace(reading, since=at)
        if lost or not readings or len(readings) < len(self.heartbeats):
            return lost  # not all ranks have begun, or one has ended
        fewest = min(reading.steps for reading in readings.values())
        behind = {rank: reading for rank, reading in readings.items() if reading.steps == fewest}
        if any(reading.phase in _UNLIMITED or self._stopped[rank] for rank, reading in behind.items()):
            return {}  # a stopped rank is reported as stopped, not as stuck
        stuck = {rank: reading for rank, reading in behind.items() if reading.phase not in _WAITING}
        if not stuck and self.all_here:
            stuck = behind
        for reading in stuck.values():
            # Three times the longest of late, or 600 s if none has ended; the time trained since the newest checkpoint
            # before the rank stood still; and four times an earlier false alarm.
            learned = _TIMES * reading.longest if reading.longest else _FIRST_SECONDS
            repeated = unsaved - (now - reading.since)
            limit = max(_LEAST_SECONDS, learned, repeated, 4.0 * self.excused.get(reading.phase, 0.0))
            if now - max(reading.since, self._pauses.since) <= limit:
                return {}
        for reading in stuck.values():
            # The same phase may take four times as long from now on, in case the rank was only slow.
            self.excused[reading.phase] = now - reading.since
        return {
            rank: f"has been in {reading.phase} of step {reading.steps} since its start "
            f"for {now - reading.since:.0f} s; "
            + (f"the longest of late took {reading.longest:.1f} s" if reading.longest else "none has ended yet")
            for rank, reading in stuck.items()
        }


# ---------------------------------------------------------------------------------------------------- stacks


def own_call(stacks: str) -> str | None:
    """Return the collective that the job's own code called, as "all_reduce at FILE:LINE in FUNCTION".

    `stacks`: from faulthandler or an exception's traceback. None if no collective is in them, or if shoal called it.
    """
    if stacks.startswith("Traceback"):
        threads = [list(_FRAME.finditer(stacks))[::-1]]
    else:
        texts = re.split(r"^(?:Current t|T)hread 0x.*$", stacks, flags=re.MULTILINE)
        threads = [list(_FRAME.finditer(text)) for text in texts]
    for matches in threads:
        frames = [match.groups() for match in matches]  # the innermost first: file, line and function
        called = [(place, match[1]) for place, (file, _, _) in enumerate(frames) if (match := _COLLECTIVES.match(file))]
        if not called:
            continue
        last, torch = called[-1]
        callers = [frame for frame in frames[last:] if not frame[0].startswith(torch)]
        if callers and not callers[0][0].startswith(_OWN):
            file, line, function = callers[0]
            return f"{frames[last][2]} at {file}:{line} in {function}"
    return None


def different_calls(stacks: Mapping[int, str]) -> str:
    """Return a clause that names each rank's collective if the job's own collectives differ between ranks, else ""."""
    calls = {rank: own_call(text) for rank, text in sorted(stacks.items()) if text}
    if len(calls) < 2 or len({(call or "").partition(" ")[0] for call in calls.values()} - {""}) == 0:
        return ""
    places = (f"rank {rank} in {call or 'none of its own, or in one of shoal'}" for rank, call in calls.items())
    return f"the job's own collectives do not match: {', '.join(places)}"
