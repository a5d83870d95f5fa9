"""Place of checkpoints at an address that fsspec reaches. Object stores have no folders and cannot rename.

A folder is a common prefix of file names. It is complete if it has a manifest, which is written last and removed first.
A rename is a copy on the server and a removal.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import Any

from shoal.checkpoint.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, FileEntry, Manifest, ManifestError
from shoal.runs.address import CHECKPOINTS, RunAddress, check_owner, make_parent, take_ownership


class RemotePlace:
    """Place of checkpoints at a run's address.

    Only the process that took the place over may create and rename folders.
    """

    def __init__(self, address: str) -> None:
        self._address = RunAddress(address)
        self._mark: dict[str, Any] = {}  # this run's owner mark, once it has taken the place over

    def shown(self, name: str = "") -> str:
        """Return the address of the folder."""
        return "/".join(part for part in (self._address.text, CHECKPOINTS, name) if part)

    def names(self) -> list[str]:
        """Return the names of complete folders and of hidden ones.

        Incomplete folders of a killed writer do not count.
        """
        found: dict[str, set[str]] = {}
        for path in self._address.paths(CHECKPOINTS):
            name, _, file = path.partition("/")
            found.setdefault(name, set()).add(file)
        return [name for name, files in found.items() if MANIFEST_NAME in files or name.startswith(".")]

    def check(self) -> None:
        """Check that no other run has taken the place over since. Raises: OSError."""
        if self._mark:
            check_owner(self._address, self._mark)

    def make(self, name: str) -> None:
        """Check the ownership only: folders exist through their files. Raises: OSError if another run took over."""
        check_owner(self._address, self._mark)

    def write(self, name: str, file: str, *content: bytes | memoryview) -> FileEntry:
        """Upload a file in parts."""
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
        """Return the first `limit` bytes of a file."""
        try:
            with self._address.files() as files:
                found: bytes = files.cat_file(self._path(name, file), start=0, end=limit)
                return found
        except FileNotFoundError:
            raise ManifestError(f"{file} cannot be read: it is not there") from None

    def move(self, name: str, new: str) -> None:
        """Copy a folder to a new name, replacing an incomplete one, and remove the old name.

        Raises: OSError if a new checkpoint lacks a file, since a run that began later removed it.
        """
        if name.startswith(".tmp-"):  # damaged checkpoints are moved unchecked
            self._refuse_torn(name)
        self.remove(new)
        self.copy(name, new)
        self.remove(name)

    def copy(self, name: str, new: str) -> None:
        """Copy a folder, with the manifest last."""
        with self._address.files() as files:
            for file in sorted(self._files(name), key=lambda file: file == MANIFEST_NAME):
                make_parent(files, self._path(new, file))
                files.cp_file(self._path(name, file), self._path(new, file))

    def remove(self, name: str) -> None:
        """Remove a folder, with the manifest first."""
        with contextlib.suppress(OSError), self._address.files() as files:
            for file in sorted(self._files(name), key=lambda file: file != MANIFEST_NAME):
                files.rm_file(self._path(name, file))

    def sync(self, name: str = "") -> None:
        """Do nothing: uploaded files are already durable."""

    def take_over(self, folder: Path) -> None:
        """Make the run in the local `folder` the only writer at the address."""
        self._mark = take_ownership(self._address, folder)

    def send(self, folder: Path) -> None:
        """Upload the run's own files from the local `folder`, next to the checkpoints."""
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
