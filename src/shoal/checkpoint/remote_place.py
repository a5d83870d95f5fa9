"""Place of checkpoints at an address that fsspec reaches. Object stores have no folders and no renaming.

A folder is what its files' names begin with, and one with a manifest is whole: the manifest is written last, and
removed first. A folder gets another name as a copy, which the server makes.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import Any

from shoal.checkpoint.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, FileEntry, Manifest, ManifestError
from shoal.runs.address import CHECKPOINTS, RunAddress, make_parent


class RemotePlace:
    """Place of checkpoints at a run's address; the process that has taken it over begins and names folders."""

    def __init__(self, address: str) -> None:
        self._address = RunAddress(address)
        self._mark: dict[str, Any] = {}  # of this run, once it writes here

    def shown(self, name: str = "") -> str:
        """Address of the folder."""
        return "/".join(part for part in (self._address.text, CHECKPOINTS, name) if part)

    def names(self) -> list[str]:
        """Folders that are whole, and hidden ones. What a killed writer has left of others is none."""
        found: dict[str, set[str]] = {}
        for path in self._address.paths(CHECKPOINTS):
            name, _, file = path.partition("/")
            found.setdefault(name, set()).add(file)
        return [name for name, files in found.items() if MANIFEST_NAME in files or name.startswith(".")]

    def check(self) -> None:
        """Raises: OSError where another run has begun there since this one took the place over."""
        if self._mark:
            self._address.check_owner(self._mark)

    def make(self, name: str) -> None:
        """Nothing: a folder is its files. Raises: OSError where another run has begun there since."""
        self._address.check_owner(self._mark)

    def write(self, name: str, file: str, *content: bytes | memoryview) -> FileEntry:
        """Sends a file in parts, as they come."""
        digest, size = hashlib.sha256(), 0
        with self._address.files() as files:
            path = self._path(name, file)
            make_parent(files, path)
            with files.open(path, "wb") as opened:
                for part in content:
                    opened.write(part)
                    digest.update(part)
                    size += len(part)
        return FileEntry(size, digest.hexdigest())

    def read(self, name: str, file: str, limit: int) -> bytes:
        """The first `limit` bytes of a file."""
        try:
            with self._address.files() as files:
                found: bytes = files.cat_file(self._path(name, file), start=0, end=limit)
                return found
        except FileNotFoundError:
            raise ManifestError(f"{file} cannot be read: it is not there") from None

    def move(self, name: str, new: str) -> None:
        """Copies a folder to where no other is whole, and removes it under its old name.

        Raises: OSError where it was being written and lacks a file: a run that began since has removed it.
        """
        if name.startswith(".tmp-"):  # others may be damaged, and are moved as they are
            self._refuse_torn(name)
        self.remove(new)
        self.copy(name, new)
        self.remove(name)

    def copy(self, name: str, new: str) -> None:
        """Copies a folder, its manifest last."""
        with self._address.files() as files:
            for file in sorted(self._files(name), key=lambda file: file == MANIFEST_NAME):
                make_parent(files, self._path(new, file))
                files.cp_file(self._path(name, file), self._path(new, file))

    def remove(self, name: str) -> None:
        """Removes a folder, its manifest first."""
        with contextlib.suppress(OSError), self._address.files() as files:
            for file in sorted(self._files(name), key=lambda file: file != MANIFEST_NAME):
                files.rm_file(self._path(name, file))

    def sync(self, name: str = "") -> None:
        """Nothing: what was sent is there."""

    def take_over(self, folder: Path) -> None:
        """Makes this run, of a folder here, the one that writes at the address."""
        self._mark = self._address.own(folder)

    def send(self, folder: Path) -> None:
        """Sends the run's own files, which are in a folder here, to beside the checkpoints."""
        self._address.send(folder)

    def _refuse_torn(self, name: str) -> None:
        try:
            named = Manifest.from_bytes(self.read(name, MANIFEST_NAME, MAX_MANIFEST_BYTES + 1)).files
        except ManifestError as error:
            raise OSError(f"{self.shown(name)} is not whole any more: {error}") from None
        lacking = sorted(named.keys() - set(self._files(name)))
        if lacking:
            raise OSError(f"{self.shown(name)} is not whole any more: {lacking[0]} is gone")

    def _files(self, name: str) -> list[str]:
        return self._address.paths(f"{CHECKPOINTS}/{name}")

    def _path(self, name: str, file: str) -> str:
        return self._address.path(CHECKPOINTS, name, file)
