"""Folder of checkpoints on a file system, and the interface of every place of checkpoints."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from shoal.checkpoint.manifest import FileEntry, ManifestError

# Prefix of folders that are being removed.
GONE = ".gone-"
# Errors of reading a damaged checkpoint: a missing file, a link or folder in its place, a bad sector.
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EIO)


class Place(Protocol):
    """Place of checkpoints, with a folder of files for each. All methods raise OSError if the storage fails."""

    def shown(self, name: str = "") -> str:
        """Return the place, or a folder in it, as messages show it."""

    def names(self) -> list[str]:
        """Return the names of all folders, complete or not."""

    def check(self) -> None:
        """Check that no other run has begun to write here. Call just before moving or removing. Raises: OSError."""

    def make(self, name: str) -> None:
        """Create a new folder."""

    def write(self, name: str, file: str, *content: bytes | memoryview) -> FileEntry:
        """Write a new file. Return its size and SHA-256."""

    def read(self, name: str, file: str, limit: int) -> bytes:
        """Return the first `limit` bytes of a file. Raises: ManifestError if the file is missing or not regular."""

    def move(self, name: str, new: str) -> None:
        """Rename a folder to an unused name."""

    def copy(self, name: str, new: str) -> None:
        """Copy a folder with its files."""

    def remove(self, name: str) -> None:
        """Remove a folder if it exists. Files that cannot be removed stay."""

    def sync(self, name: str = "") -> None:
        """Return once the names in the place, or in a folder of the place, survive a power failure."""


class LocalPlace:
    """Folder of checkpoints on a file system of this host."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def shown(self, name: str = "") -> str:
        """Return the path of the folder."""
        return str(self.folder / name)

    def names(self) -> list[str]:
        """Return the names of the folders."""
        return [path.name for path in self.folder.iterdir() if path.is_dir()] if self.folder.is_dir() else []

    def check(self) -> None:
        """Do nothing: a lock already excludes other runs."""

    def make(self, name: str) -> None:
        """Create a folder that only the owner can access."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.folder / name).mkdir(mode=0o700)

    def write(self, name: str, file: str, *content: bytes | memoryview) -> FileEntry:
        """Write and sync a file."""
        digest, size = hashlib.sha256(), 0
        descriptor = os.open(self.folder / name / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as opened:
            for part in content:
                opened.write(part)
                digest.update(part)
                size += len(part)
            opened.flush()
            os.fsync(opened.fileno())
        return FileEntry(size, digest.hexdigest())

    def read(self, name: str, file: str, limit: int) -> bytes:
        """Return the first `limit` bytes of a regular file. The folder must not be a link."""
        with self.opened(name, file) as content:
            return content.read(min(limit, os.fstat(content.fileno()).st_size + 1))

    @contextlib.contextmanager
    def opened(self, name: str, file: str) -> Iterator[io.BufferedReader]:
        """Open a regular file. Links and pipes are refused: a link may lead anywhere, a pipe may block.

        Raises: ManifestError; OSError.
        """
        if (self.folder / name).is_symlink():
            raise ManifestError(f"{name} is a link")
        try:
            descriptor = os.open(self.folder / name / file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as content:
                if not stat.S_ISREG(os.fstat(content.fileno()).st_mode):
                    raise ManifestError(f"{file} is not a regular file")
                yield content
        except OSError as error:
            if error.errno not in _DAMAGE:
                raise
            raise ManifestError(f"{file} cannot be read: {error.strerror}") from None

    def move(self, name: str, new: str) -> None:
        """Rename a folder."""
        (self.folder / name).rename(self.folder / new)

    def copy(self, name: str, new: str) -> None:
        """Copy a folder with hard links, or as files if the file system has no hard links."""
        (self.folder / new).mkdir(mode=0o700)
        for file in (self.folder / name).iterdir():
            try:
                os.link(file, self.folder / new / file.name)
            except OSError:
                shutil.copy2(file, self.folder / new / file.name)
        self.sync(new)

    def remove(self, name: str) -> None:
        """Remove a folder. It is renamed first, so that a writer that is still alive cannot complete it."""
        gone = self.folder / f"{GONE}{uuid.uuid4().hex[:12]}"
        with contextlib.suppress(OSError):
            (self.folder / name).rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def sync(self, name: str = "") -> None:
        """Sync the folder's own entry."""
        descriptor = os.open(self.folder / name, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
