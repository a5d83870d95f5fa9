"""Places of checkpoints: the interface, folders on a file system, and addresses that fsspec reaches.

Object stores at an address have no folders and cannot rename. A folder is a common prefix of file names. It is complete
if it has a manifest, which is written last and removed first. A rename is a copy on the server and a removal.
"""

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
from typing import Any, Protocol

from shoal.checkpoint.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, FileEntry, Manifest, ManifestError
from shoal.runs.address import CHECKPOINTS, RunAddress, check_owner, make_parent, take_ownership
from shoal.runs.directory import Fence

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

    def check(self, fence: Fence) -> None:
        """Check that no other process writes here. Call just before moving or removing.

        Raises: FencedError if a later generation of the run does; OSError if another run does.
        """

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

    def check(self, fence: Fence) -> None:
        """Check the generation only: a lock already excludes other runs."""
        fence.check()

    def make(self, name: str) -> None:
        """Create a folder that only the owner can write to; the umask decides who can read it."""
        self.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        (self.folder / name).mkdir(mode=0o755)

    def write(self, name: str, file: str, *content: bytes | memoryview) -> FileEntry:
        """Write and sync a file."""
        digest, size = hashlib.sha256(), 0
        descriptor = os.open(self.folder / name / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
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
        (self.folder / new).mkdir(mode=0o755)
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


class RemotePlace:
    """Place of checkpoints at a run's address.

    Only the process that took the place over may create and rename folders.
    """

    def __init__(self, address: str) -> None:
        self.address = RunAddress(address)
        self._mark: dict[str, Any] = {}  # this run's owner mark, once it has taken the place over

    def shown(self, name: str = "") -> str:
        """Return the address of the folder."""
        return "/".join(part for part in (self.address.text, CHECKPOINTS, name) if part)

    def names(self) -> list[str]:
        """Return the names of complete folders and of hidden ones.

        Incomplete folders of a killed writer do not count.
        """
        folders: dict[str, set[str]] = {}
        for path in self.address.paths(CHECKPOINTS):
            name, _, file = path.partition("/")
            folders.setdefault(name, set()).add(file)
        return [name for name, files in folders.items() if MANIFEST_NAME in files or name.startswith(".")]

    def check(self, fence: Fence) -> None:
        """Check that no other run has taken the place over since. Raises: as `Place.check`."""
        fence.check()
        if self._mark:
            check_owner(self.address, self._mark)

    def make(self, name: str) -> None:
        """Check the ownership only: folders exist through their files. Raises: OSError if another run took over."""
        check_owner(self.address, self._mark)

    def write(self, name: str, file: str, *content: bytes | memoryview) -> FileEntry:
        """Upload a file in parts."""
        digest, size = hashlib.sha256(), 0
        with self.address.files() as files:
            path = self._path(name, file)
            make_parent(files, path)
            with files.open(path, "wb") as opened:
                for part in content:
                    opened.write(part)
                    digest.update(part)
                    size += len(part)
        return FileEntry(size, digest.hexdigest())

    def read(self, name: str, file: str, limit: int) -> bytes:
        """Return the first `limit` bytes of a file."""
        try:
            with self.address.files() as files:
                content: bytes = files.cat_file(self._path(name, file), start=0, end=limit)
                return content
        except FileNotFoundError:
            raise ManifestError(f"{file} cannot be read: it is not there") from None

    def move(self, name: str, new: str) -> None:
        """Copy a folder to a new name, replacing an incomplete one, and remove the old name.

        Raises: OSError if a new checkpoint lacks a file, since a run that began later removed it.
        """
        if name.startswith(".tmp-"):  # damaged checkpoints are moved unchecked
            try:
                files = Manifest.from_bytes(self.read(name, MANIFEST_NAME, MAX_MANIFEST_BYTES + 1)).files
            except ManifestError as error:
                raise OSError(f"{self.shown(name)} is not whole any more: {error}") from None
            lacking = sorted(files.keys() - set(self.address.paths(f"{CHECKPOINTS}/{name}")))
            if lacking:
                raise OSError(f"{self.shown(name)} is not whole any more: {lacking[0]} is gone")
        self.remove(new)
        self.copy(name, new)
        self.remove(name)

    def copy(self, name: str, new: str) -> None:
        """Copy a folder, with the manifest last."""
        with self.address.files() as files:
            names = self.address.paths(f"{CHECKPOINTS}/{name}")
            for file in sorted(names, key=lambda file: file == MANIFEST_NAME):
                make_parent(files, self._path(new, file))
                files.cp_file(self._path(name, file), self._path(new, file))

    def remove(self, name: str) -> None:
        """Remove a folder, with the manifest first."""
        with contextlib.suppress(OSError), self.address.files() as files:
            names = self.address.paths(f"{CHECKPOINTS}/{name}")
            for file in sorted(names, key=lambda file: file != MANIFEST_NAME):
                files.rm_file(self._path(name, file))

    def sync(self, name: str = "") -> None:
        """Do nothing: uploaded files are already durable."""

    def take_over(self, folder: Path, fence: Fence) -> None:
        """Make the run in the local `folder` the only writer at the address. Raises: FencedError; OSError."""
        fence.check()  # a process that was paused must not take the place from its successors
        self._mark = take_ownership(self.address, folder)

    def _path(self, name: str, file: str) -> str:
        return self.address.path(CHECKPOINTS, name, file)
