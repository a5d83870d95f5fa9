"""Generations of a run's processes, and the fence that keeps those of an earlier one from committing anything.

Each start of a run's ranks is a generation: a number that is never used again, and a file of that name in the run
directory. Whoever begins the next one makes its file, removes the earlier ones, and then what their processes had half
written. So a process that stood still meanwhile, on this host or another, either had renamed its file before the next
generation read the directory, or finds that it is no generation any more, or that what it would rename is gone.
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
# Between two looks of a process that writes nothing meanwhile.
_LOOK_SECONDS, _SELDOM_SECONDS = 0.5, 5.0


@dataclass(frozen=True)
class Fence:
    """Right of the processes of one generation to write into a run directory; without a folder nobody is kept out."""

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
        """The generation that begins now, of a process that has the directory. `after`: the one that it replaces.

        `resizable`: whether who begins it can go on with another number of processes; `gpus`: those that it sees then.

        Raises: FencedError where another process has begun one since; RunDirectoryError where nothing can be written.
        """
        place = folder / FOLDER
        try:
            place.mkdir(exist_ok=True)
            if after is not None:
                after.check()
            found = cls(folder, newest(folder) + 1)
            said = {"generation": found.generation, "world_size": world_size, "reason": reason, "resizable": resizable}
            said |= {"gpus": gpus} if resizable else {}
            said |= {"host": socket.gethostname(), "pid": os.getpid(), "began_at": round(time.time(), 3)}
            with contextlib.suppress(FileExistsError), open(found._path, "x", encoding="utf-8") as file:
                file.write(json.dumps(said) + "\n")
                found.check()
                found._fence_others_out(place)
                return found
        except OSError as error:
            raise RunDirectoryError(
                given=str(folder),
                conflict=f"nothing can be written there: {error.strerror or error}",
                remedy="give a directory that can be written to",
            ) from None
        raise found._error()

    def _fence_others_out(self, place: Path) -> None:
        """Removes the files of earlier generations, and then what they have half written."""
        for path in place.iterdir():
            if path.name.isdecimal() and int(path.name) < self.generation:
                path.unlink(missing_ok=True)
        for aside in place.parent.glob(".*.tmp"):
            found = _ASIDE.search(aside.name)
            if found is not None and int(found[1]) < self.generation:
                aside.unlink(missing_ok=True)

    @property
    def _path(self) -> Path:
        assert self.folder is not None, "a fence has a folder"
        return self.folder / FOLDER / f"{self.generation:06d}"

    @property
    def is_open(self) -> bool:
        """Whether no later generation has begun. A directory that is gone says nothing: writing there fails anyhow."""
        if self.folder is None:
            return True
        # A name that was opened is asked of the server anew, of which a network file system's client lists old ones.
        with contextlib.suppress(OSError), self._path.open("rb"):
            pass
        return newest(self.folder) <= self.generation

    def check(self) -> None:
        """Raises: FencedError where a later generation has begun. To be called last before a commit."""
        if not self.is_open:
            raise self._error()

    def write(self, path: Path, text: str) -> None:
        """Writes a file whole or not at all. Raises: OSError; FencedError."""
        aside = write_aside(path, text, f".{self.generation:06d}")
        if not self.is_open:
            aside.unlink(missing_ok=True)
            raise self._error()
        try:
            aside.replace(path)
        except FileNotFoundError:
            self.check()  # the next generation has removed it
            raise

    def append(self, path: Path, line: str) -> None:
        """Appends a line. Raises: OSError; FencedError."""
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
        """A context in which this process ends, with code 69, soon after a later generation has begun."""
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
    """The number of the newest generation of a run directory; 0 where there is none."""
    with contextlib.suppress(OSError):
        return max((int(name) for name in os.listdir(folder / FOLDER) if name.isdecimal()), default=0)
    return 0


def about(folder: Path, generation: int) -> dict[str, Any]:
    """Facts of a generation in its file: world_size, reason, resizable, gpus, host, pid, began_at; or none."""
    return read_json(folder / FOLDER / f"{generation:06d}") or {}


def withdraw(folder: Path) -> None:
    """Removes the numbers from a directory in which its holder has left nothing else, before that lets it go."""
    with contextlib.suppress(OSError):
        if set(os.listdir(folder)) <= {FOLDER, LOCK}:
            shutil.rmtree(folder / FOLDER)
