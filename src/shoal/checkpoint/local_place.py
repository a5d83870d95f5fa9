"""Folder of checkpoints on a file system, and what every place of checkpoints does."""

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

# Beginning of the names of folders that are being removed.
GONE = ".gone-"
# What reading a damaged checkpoint may give: a file gone, a link or folder in its place, a bad sector.
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EIO)


class Place(Protocol):
    """Place of checkpoints: a folder of each, which has files. All methods raise OSError where the disk refuses."""

    def shown(self, name: str = "") -> str:
        """The place, or a folder in it, as a message names it."""

    def names(self) -> list[str]:
        """Folders that are there, whole or not."""

    def check(self) -> None:
        """Raises: OSError where another run has begun to write there since. Last before what moves or removes."""

    def make(self, name: str) -> None:
        """Makes a folder that is not there yet."""

    def write(self, name: str, file: str, *content: bytes | memoryview) -> FileEntry:
        """Writes a file that is not there yet; its size and SHA-256."""

    def read(self, name: str, file: str, limit: int) -> bytes:
        """The first `limit` bytes of a file. Raises: ManifestError where it is not there, or no file."""

    def move(self, name: str, new: str) -> None:
        """Gives a folder another name, that none has."""

    def copy(self, name: str, new: str) -> None:
        """Copies a folder and its files."""

    def remove(self, name: str) -> None:
        """Removes a folder, where it is there; what refuses stays."""

    def sync(self, name: str = "") -> None:
        """Returns once the names in the place, or in a folder of it, outlast a power cut."""


class LocalPlace:
    """Folder of checkpoints on a file system that this host has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def shown(self, name: str = "") -> str:
        """Path of the folder."""
        return str(self.folder / name)

    def names(self) -> list[str]:
        """Folders that are there."""
        return [path.name for path in self.folder.iterdir() if path.is_dir()] if self.folder.is_dir() else []

    def check(self) -> None:
        """Nothing: a lock keeps other runs away."""

    def make(self, name: str) -> None:
        """Makes a folder that nobody else can read."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.folder / name).mkdir(mode=0o700)

    def write(self, name: str, file: str, *content: bytes | memoryview) -> FileEntry:
        """Writes a file and syncs it."""
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
        """The first `limit` bytes of a regular file in a folder that is no link."""
        with self.opened(name, file) as content:
            return content.read(min(limit, os.fstat(content.fileno()).st_size + 1))

    @contextlib.contextmanager
    def opened(self, name: str, file: str) -> Iterator[io.BufferedReader]:
        """A regular file; a link could lead anywhere and a pipe could wait forever. Raises: ManifestError; OSError."""
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
        """Renames a folder."""
        (self.folder / name).rename(self.folder / new)

    def copy(self, name: str, new: str) -> None:
        """Gives the same bytes on disk a second name, where the file system can."""
        (self.folder / new).mkdir(mode=0o700)
        for file in (self.folder / name).iterdir():
            try:
                os.link(file, self.folder / new / file.name)
            except OSError:
                shutil.copy2(file, self.folder / new / file.name)
        self.sync(new)

    def remove(self, name: str) -> None:
        """Removes a folder, which has lost its name first: its writer, should one live, can no more make it whole."""
        gone = self.folder / f"{GONE}{uuid.uuid4().hex[:12]}"
        with contextlib.suppress(OSError):
            (self.folder / name).rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def sync(self, name: str = "") -> None:
        """Syncs the folder itself."""
        descriptor = os.open(self.folder / name, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
