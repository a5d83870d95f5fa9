"""Spare processes of a run, for a new start of its ranks: they have loaded torch and wait."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.errors import ExitCode
from shoal.launch.environment import GATE_FD
from shoal.launch.heartbeat import read
from shoal.launch.rank_processes import LocalRun, RankProcess, Start

# A run that is over before then has no use for them; their start takes some seconds of a core each.
AFTER_SECONDS = 30.0
_LOOK_SECONDS = 0.5
# They and what they share with the ranks: a host that has not eight times as much to spare goes without.
_BYTES_EACH, _TIMES = 240 << 20, 8
_GROUPS = Path("/sys/fs/cgroup")
_FILES = {"": ("memory.max", "memory.current"), "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes")}


@dataclass
class Spares:
    """The next start of a run's ranks, whose processes wait. `wanted`: whether there ever is another start.

    They are made once a run has trained for a while, and after a loss as soon as the ranks train again.
    """

    wanted: bool
    clock: Callable[[], float] = time.monotonic
    available: Callable[[], int] = field(default=lambda: _available_bytes())
    _next: Start | None = None
    _began: float | None = None
    _looked: float = 0.0
    _lost: bool = False

    def tend(self, run: LocalRun, workers: Sequence[RankProcess]) -> None:
        """Starts the spare processes, where it is time; to be called often while `workers` run."""
        now = self.clock()
        if not self.wanted or self._next is not None or now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        if not any(_trains(worker) for worker in workers):
            return
        if self._began is None:
            self._began = now
        if not self._lost and now - self._began < AFTER_SECONDS:
            return
        if "MASTER_PORT" in os.environ or self.available() < _TIMES * _BYTES_EACH * run.num_processes:
            self.wanted = False
            return
        try:
            self._next = Start(run, waits=True)
        except OSError:  # no more processes, or a full disk: the run itself goes on
            self.wanted = False

    def take(self, run: LocalRun) -> Start:
        """The next start: of the processes that wait, where there are any."""
        found, self._next = self._next, None
        self._lost = self._began is not None
        return found or Start(run)

    def close(self) -> None:
        """Ends what waits."""
        if self._next is not None:
            self._next.close()
            self._next = None


def wait_until_needed(load: Callable[[], object]) -> None:
    """In a spare process: calls `load` and waits, and ends the process where its run needs no other. Else nothing."""
    gate = os.environ.pop(GATE_FD, None)
    if gate is None:
        return
    load()
    needed = os.read(int(gate), 1)
    os.close(int(gate))
    if not needed:
        os._exit(ExitCode.DONE)


def _trains(worker: RankProcess) -> bool:
    """Whether a rank has a step behind it."""
    with contextlib.suppress(OSError):
        reading = read(worker.heartbeat)
        return reading is not None and reading.steps > 1
    return False


def _available_bytes() -> int:
    """Memory that nothing uses, of this host or of the smallest control group that this process is in."""
    import psutil

    return min([int(psutil.virtual_memory().available), *_left_in_groups(Path("/proc/self/cgroup"), _GROUPS)])


def _left_in_groups(membership: Path, root: Path) -> Iterator[int]:
    """Bytes left in each control group of a process, in version 2 and 1 of the kernel's interface."""
    with contextlib.suppress(OSError):
        for line in membership.read_text(encoding="utf-8").splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            limit, used = _FILES[controllers]
            folder = root / controllers / name.lstrip("/")
            for place in (folder, *folder.parents):
                with contextlib.suppress(OSError, ValueError):  # "max"; not seen in a container
                    yield int((place / limit).read_text()) - int((place / used).read_text())
                if place == root / controllers:
                    break
