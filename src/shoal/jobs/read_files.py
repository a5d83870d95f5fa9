"""Files that a job reads while it is loaded, and digests of their content."""

from __future__ import annotations

import builtins
import contextlib
import functools
import hashlib
import io
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from shoal.jobs.job_sources import is_installed

_MOST_FILES = 256
_WHOLE_BYTES = 1 << 20  # of longer files, blocks of this total size are hashed
_BLOCK_BYTES = 1 << 16


@contextlib.contextmanager
def files_read() -> Iterator[list[str]]:
    """Collect the paths (at most 256) that the job's own code opens for reading with Python's `open` in a context.

    Files that a library opens during its import, and files that are also opened for writing, do not count.
    """
    read_paths: dict[str, None] = {}
    written: set[str] = set()
    paths: list[str] = []
    plain, is_active = builtins.open, True

    def watched(file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        opened = plain(file, mode, *arguments, **named)
        if is_active and isinstance(file, str | os.PathLike) and len(read_paths) < _MOST_FILES:
            path = os.path.abspath(os.fsdecode(file))
            if any(letter in mode for letter in "wax+"):
                written.add(path)
            elif path not in read_paths and os.path.isfile(path) and _is_read_by_job():
                read_paths[path] = None
        return opened

    builtins.open = io.open = watched
    try:
        yield paths
    finally:
        is_active = False  # a library may still refer to `watched`
        builtins.open = io.open = plain
        paths += (path for path in read_paths if path not in written and not _is_library(path))


def digests_of(paths: Iterable[str], folders: Iterable[str]) -> dict[str, str]:
    """Return digests by path, relative to the first of the folders that contains the file."""
    digests = {}
    for path in paths:
        inside = next((folder for folder in folders if Path(path).is_relative_to(folder)), None)
        with contextlib.suppress(OSError):
            size = os.path.getsize(path)
            digest = hashlib.sha256(str(size).encode())
            with open(path, "rb") as file:
                if size <= _WHOLE_BYTES:
                    digest.update(file.read())
                else:
                    num_blocks = _WHOLE_BYTES // _BLOCK_BYTES
                    for number in range(num_blocks):
                        file.seek((size - _BLOCK_BYTES) * number // (num_blocks - 1))
                        digest.update(file.read(_BLOCK_BYTES))
            digests[os.path.relpath(path, inside) if inside is not None else path] = digest.hexdigest()[:16]
    return digests


def _is_read_by_job() -> bool:
    """Check whether the job's own code called `open`, directly or through a library, outside of an import."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith("<frozen importlib"):
            return False
        if not name.startswith("<frozen") and not _is_library(name):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


@functools.cache
def _is_library(path: str) -> bool:
    return is_installed(path) or path.startswith(("/proc/", "/sys/", "/dev/"))
