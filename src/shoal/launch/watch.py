"""Watch of a launcher over its ranks: detects stopped and stuck ranks without using their collectives."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shoal.launch.heartbeat import Reading, read

# Pauses of up to 5 s do not trigger an alarm.
_LEAST_SECONDS = 5.0
_TIMES = 3.0
# For a phase that has never ended: a first step compiles, loads and connects.
_FIRST_SECONDS = 600.0
_LOOK_SECONDS = 0.25
# Phases that wait for other ranks, and phases without a time limit, such as writes to a disk.
_WAITING, _UNLIMITED = ("exposed_communication",), ("away", "checkpoint")


@dataclass(frozen=True)
class Stuck:
    """Rank that is considered lost although its process is alive."""

    rank: int
    reason: str


@dataclass
class Watch:
    """Watch over ranks, by their process ids and heartbeat files. `clock`: the heartbeat files' clock, in seconds.

    `unsaved` returns the seconds since the run's newest checkpoint, which a restart would repeat. Waiting for that long
    costs at most twice the best choice, whether the rank would have recovered or not.
    """

    heartbeats: Mapping[int, Path]
    unsaved: Callable[[], float]
    clock: Callable[[], float] = time.perf_counter
    all_here: bool = True  # whether ranks that wait can only wait for ranks on this host
    excused: dict[str, float] = field(default_factory=dict)  # by phase, the seconds before an earlier alarm
    _stopped: dict[int, float] = field(default_factory=dict)
    _looked: float | None = None
    _since: float = 0.0  # before this time, this process itself may have been stopped

    def look(self, living: Mapping[int, int]) -> list[Stuck]:
        """Return the stopped and stuck ranks among `living` (rank: process id). Checks at most four times a second."""
        now = self.clock()
        if self._looked is not None and now - self._looked < _LOOK_SECONDS:
            return []
        passed = now - self._looked if self._looked is not None else 0.0
        if self._looked is None or passed > 1.0:
            self._since, passed = now, 0.0
        self._looked = now
        for rank in self.heartbeats:
            stopped = rank in living and _is_stopped(living[rank])
            self._stopped[rank] = self._stopped.get(rank, 0.0) + passed if stopped else 0.0
        found = [rank for rank, seconds in self._stopped.items() if seconds > _LEAST_SECONDS]
        if found:
            return [Stuck(rank, f"was stopped (SIGSTOP) for {self._stopped[rank]:.0f} s") for rank in found]
        return self._hung(now, living)

    def _hung(self, now: float, living: Mapping[int, int]) -> list[Stuck]:
        readings: dict[int, Reading] = {}
        for rank, path in self.heartbeats.items():
            with contextlib.suppress(OSError):
                reading = read(path)
                if rank in living and reading is not None:
                    readings[rank] = reading
        if not readings or len(readings) < len(self.heartbeats):
            return []  # not all ranks have begun, or one has ended
        fewest = min(reading.steps for reading in readings.values())
        behind = {rank: reading for rank, reading in readings.items() if reading.steps == fewest}
        if any(reading.phase in _UNLIMITED or self._stopped.get(rank) for rank, reading in behind.items()):
            return []  # a stopped rank is reported as stopped, not as stuck
        busy = {rank: reading for rank, reading in behind.items() if reading.phase not in _WAITING}
        if not busy and not self.all_here:
            return []
        busy = busy or behind
        if any(now - max(reading.since, self._since) <= self._limit(now, reading) for reading in busy.values()):
            return []
        return [Stuck(rank, _reason(now, reading)) for rank, reading in busy.items()]

    def _limit(self, now: float, reading: Reading) -> float:
        learned = _TIMES * reading.longest if reading.longest else _FIRST_SECONDS
        lost = self.unsaved() - (now - reading.since)  # the seconds that were trained before it stood still
        return max(_LEAST_SECONDS, learned, lost, 4.0 * self.excused.get(reading.phase, 0.0))

    def excuse(self, stuck: list[Stuck]) -> None:
        """Record an alarm: from now on the same phase may take four times as long, in case the rank was only slow."""
        now = self.clock()
        for found in stuck:
            with contextlib.suppress(OSError):
                reading = read(self.heartbeats[found.rank])
                if reading is not None:
                    self.excused[reading.phase] = now - reading.since


def _reason(now: float, reading: Reading) -> str:
    lately = f"the longest of late took {reading.longest:.1f} s" if reading.longest else "none has ended yet"
    where = f"in {reading.phase} of step {reading.steps} since its start"
    return f"has been {where} for {now - reading.since:.0f} s; {lately}"


def _is_stopped(pid: int) -> bool:
    """Check whether a signal has stopped a process. Stops by a debugger do not count."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].startswith(b"T")
    return False
