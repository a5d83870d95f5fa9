"""A freezer cgroup: its processes stand still while their kernel answers, as those of a paused container."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_FROZEN_SECONDS = 10.0


def unavailable() -> str | None:
    """Why no cgroup can be made here; None where one can."""
    try:
        with made() as freezer:
            freezer.freeze([])
    except OSError as error:
        return f"no freezer cgroup can be made here: {error}"
    return None


@dataclass(frozen=True)
class Freezer:
    """A cgroup of version 1 or 2."""

    folder: Path

    def freeze(self, pids: Iterable[int]) -> None:
        """Takes the processes in and stops them and all that is in."""
        for pid in pids:
            (self.folder / "cgroup.procs").write_text(str(pid))
        self._set("FROZEN", "1")

    def thaw(self) -> None:
        """Lets them go on."""
        self._set("THAWED", "0")

    def _set(self, state: str, number: str) -> None:
        first = (self.folder / "freezer.state").exists()
        (self.folder / ("freezer.state" if first else "cgroup.freeze")).write_text(state if first else number)
        deadline = time.monotonic() + _FROZEN_SECONDS
        while True:
            said = (self.folder / ("freezer.state" if first else "cgroup.events")).read_text()
            if said.strip() == state or f"frozen {number}" in said:
                return
            assert time.monotonic() < deadline, f"not {state}: {said}"
            time.sleep(0.01)


@contextlib.contextmanager
def made() -> Iterator[Freezer]:
    """A cgroup for a context. Its processes go on at the end, and belong to the root of the tree."""
    root = _ROOT / "freezer" if (_ROOT / "freezer").is_dir() else _ROOT
    freezer = Freezer(root / f"shoal-test-{os.getpid()}-{time.monotonic_ns()}")
    freezer.folder.mkdir()
    try:
        yield freezer
    finally:
        freezer.thaw()
        for pid in (freezer.folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (root / "cgroup.procs").write_text(pid)
        for _ in range(100):
            with contextlib.suppress(OSError):
                freezer.folder.rmdir()
                break
            time.sleep(0.02)  # a process in it is about to end
