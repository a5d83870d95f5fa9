"""Generations of a run's processes, and the fence that keeps earlier generations from writing.

Each start of a run's ranks is a generation: a unique number, and a file of that name in the run directory. A new
generation creates its file, removes the files of earlier generations, and then their temporary files. A process that
was paused meanwhile, on any host, has two possible outcomes. Either it renamed its file before the new generation read
the directory, or it finds that its generation is over or its temporary file is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import FencedError, RunDirectoryError
from shoal.runs.directory import read_json, write_aside
from shoal.runs.directory_lock import NAME as LOCK

FOLDER = "generations"
_ASIDE = re.compile(r"\.(\d{6,})\.tmp$")
# Intervals at which a process that does not write checks the fence.
_LOOK_SECONDS, _SELDOM_SECONDS = 0.5, 5.0


@dataclass(frozen=True)
class Fence:
    """Right of one generation's processes to write into a run directory. Without a folder, the fence is always open."""

    folder: Path | None = None
    generation: int = 0

    @classmethod
    def next(
        cls,
        folder: Path,
        world_size: int,
        reason: str,
        after: Fence | None = None,
        *,
        resizable: bool = False,
        gpus: int = 0,
    ) -> Fence:
        """Start the next generation, in a process that has locked the directory.

        Args:
            after: the generation to replace.
            resizable: whether the caller can continue with another number of processes.
            gpus: number of GPUs that the caller sees, if resizable.

        Raises: FencedError if another process has started a generation since; RunDirectoryError if nothing can be
        written.
        """
        place = folder / FOLDER
        try:
            place.mkdir(exist_ok=True)
            if after is not None:
                after.check()
            fence = cls(folder, newest(folder) + 1)
            said = {"generation": fence.generation, "world_size": world_size, "reason": reason, "resizable": resizable}
            said |= {"gpus": gpus} if resizable else {}
            said |= {"host": socket.gethostname(), "pid": os.getpid(), "began_at": round(time.time(), 3)}
            with contextlib.suppress(FileExistsError), open(fence._path, "x", encoding="utf-8") as file:
                file.write(json.dumps(said) + "\n")
                fence.check()
                fence._fence_others_out(place)
                return fence
        except OSError as error:
            raise RunDirectoryError(
                given=str(folder),
                conflict=f"nothing can be written there: {error.strerror or error}",
                remedy="give a directory that can be written to",
            ) from None
        raise fence._error()

    def _fence_others_out(self, place: Path) -> None:
        """Remove the files of earlier generations, and then their temporary files."""
        for path in place.iterdir():
            if path.name.isdecimal() and int(path.name) < self.generation:
                path.unlink(missing_ok=True)
        for aside in place.parent.glob(".*.tmp"):
            match = _ASIDE.search(aside.name)
            if match is not None and int(match[1]) < self.generation:
                aside.unlink(missing_ok=True)

    @property
    def _path(self) -> Path:
        assert self.folder is not None, "a fence has a folder"
        return self.folder / FOLDER / f"{self.generation:06d}"

    @property
    def is_open(self) -> bool:
        """Whether no later generation has started. True for a missing directory, since writing fails there anyway."""
        if self.folder is None:
            return True
        # Opening a name makes a network file system's client refresh its cached listing.
        with contextlib.suppress(OSError), self._path.open("rb"):
            pass
        return newest(self.folder) <= self.generation

    def check(self) -> None:
        """Check the fence just before a commit. Raises: FencedError if a later generation has started."""
        if not self.is_open:
            raise self._error()

    def write(self, path: Path, text: str) -> None:
        """Write a file atomically. Raises: OSError; FencedError."""
        aside = write_aside(path, text, f".{self.generation:06d}")
        if not self.is_open:
            aside.unlink(missing_ok=True)
            raise self._error()
        try:
            aside.replace(path)
        except FileNotFoundError:
            self.check()  # the next generation may have removed it
            raise

    def append(self, path: Path, line: str) -> None:
        """Append a line. Raises: OSError; FencedError."""
        self.check()
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _error(self) -> FencedError:
        assert self.folder is not None, "a fence without a folder is open"
        now = newest(self.folder)
        said = about(self.folder, now)
        by = f", by process {said['pid']} on {said['host']} ({said['reason']})" if "pid" in said else ""
        host = socket.gethostname()
        error = FencedError(
            given=f"process {os.getpid()} on {host}, of generation {self.generation} of {self.folder}",
            conflict=f"generation {now} has begun{by}, while this process stood still or could not be reached",
            remedy="nothing: this process is fenced, has written nothing since, and ends; the run goes on without it",
        )
        error.host = host
        return error

    @contextlib.contextmanager
    def watched(self, *, says: bool, seldom: bool = False) -> Iterator[None]:
        """Run a context in which this process ends, with code 69, soon after a later generation has started."""
        if self.folder is None:
            yield
            return
        over = threading.Event()

        def watch() -> None:
            while not over.wait(_SELDOM_SECONDS if seldom else _LOOK_SECONDS):
                if not self.is_open:
                    error = self._error()
                    if says:
                        with contextlib.suppress(OSError, ValueError):
                            print(error.render(), file=sys.stderr, flush=True)
                    os._exit(error.exit_code)

        thread = threading.Thread(target=watch, name="fence", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def newest(folder: Path) -> int:
    """Return the number of the newest generation of a run directory, or 0 if there is none."""
    with contextlib.suppress(OSError):
        return max((int(name) for name in os.listdir(folder / FOLDER) if name.isdecimal()), default=0)
    return 0


def about(folder: Path, generation: int) -> dict[str, Any]:
    """Return the facts in a generation's file: world_size, reason, resizable, gpus, host, pid, began_at; or {}."""
    return read_json(folder / FOLDER / f"{generation:06d}") or {}


def withdraw(folder: Path) -> None:
    """Remove the generations from a directory that contains nothing else, before its lock is released."""
    with contextlib.suppress(OSError):
        if set(os.listdir(folder)) <= {FOLDER, LOCK}:
            shutil.rmtree(folder / FOLDER)
