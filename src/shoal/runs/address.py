"""Address of a run directory that fsspec reaches (s3://, gs://, ...), for hosts without a shared file system.

A process that starts or trains such a run has a working copy of the directory's own files, without checkpoints. Rank 0
uploads its copy with each checkpoint and at the end. Checkpoints are written to the address directly.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import tempfile
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from shoal.errors import CommandError, RunDirectoryError, StorageError, say_note
from shoal.runs.directory import FOLDER as GENERATIONS
from shoal.runs.directory import NAME as LOCK
from shoal.runs.directory import RunDirectory, write_file

CHECKPOINTS = "checkpoints"
OWNER = "owner.json"  # names the run that was started there last; older runs must not write
_PACKAGES = {"s3": "shoal[s3]", "s3a": "shoal[s3]", "gs": "shoal[gs]", "gcs": "shoal[gs]"}


def is_address(text: str | None) -> bool:
    """Check whether a run directory is given as an address."""
    return text is not None and "://" in text


class SupersededError(OSError):
    """Another run has started at the same address and writes there."""


class RunAddress:
    """Address of a run directory. All errors of the server or the connection are OSErrors.

    All instances in this process share a record of fetched and sent files per working copy. Unchanged files are not
    sent again, so they do not overwrite newer files of another run.
    """

    _known: ClassVar[dict[tuple[str, Path], dict[str, tuple[int, int]]]] = {}  # stamps of local files

    def __init__(self, text: str) -> None:
        self.text = text.rstrip("/")

    def _known_in(self, folder: Path) -> dict[str, tuple[int, int]]:
        return self._known.setdefault((self.text, folder.resolve()), {})

    @functools.cached_property
    def _reached(self) -> tuple[Any, str]:
        """The file system and the path in it. Raises: CommandError if no installed package reaches the address."""
        try:
            import fsspec  # a dependency of torch; imported late, since few runs need it

            files, root = fsspec.core.url_to_fs(self.text)
        except (ImportError, ValueError) as error:
            package = _PACKAGES.get(self.text.partition("://")[0])
            raise CommandError(
                given=self.text,
                conflict=f"nothing here reaches that address: {error}",
                remedy=f'pip install "{package}", on every host' if package else "install fsspec's package for it",
            ) from None
        return files, root.rstrip("/")

    def path(self, *parts: str) -> str:
        """Return the path of a file at the address, in the form that fsspec uses."""
        return "/".join((self._reached[1], *parts))

    @contextlib.contextmanager
    def files(self) -> Iterator[Any]:
        """Yield the file system, and convert errors of its client to OSError."""
        file_system = self._reached[0]
        try:
            yield file_system
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{self.text}: {type(error).__name__}: {str(error).strip()[:300]}") from error

    def paths(self, below: str = "") -> list[str]:
        """Return the relative paths of all files below a folder."""
        with self.files() as files:
            files.invalidate_cache()
            folder = self.path(*([below] if below else []))
            there = files.find(folder)
        return [str(PurePosixPath(path).relative_to(folder)) for path in there]

    def fetch(self, folder: Path, known: dict[str, tuple[int, int]] | None = None) -> None:
        """Copy the directory's own files to `folder`.

        `known`: gets the stamp of each local copy. Default: the shared record of the working copy `folder`.
        Raises: RunDirectoryError if the address cannot be read.
        """
        known = self._known_in(folder) if known is None else known
        try:
            with self.files() as files:
                files.invalidate_cache()
                there = files.ls(self.path(), detail=True) if files.exists(self.path()) else []
                names = [PurePosixPath(entry["name"]).name for entry in there if entry["type"] == "file"]
                for name in (name for name in names if name != OWNER):
                    content = files.cat_file(self.path(name))
                    aside = folder / f".{name}.fetched"
                    aside.write_bytes(content)
                    aside.replace(folder / name)
                    known[name] = _stamp(folder / name)
        except OSError as error:
            raise RunDirectoryError(
                given=self.text,
                conflict=f"it cannot be read: {error}",
                remedy="check the address, and this host's credentials and way to it",
            ) from error

    def fetch_folder(self, below: str, folder: Path) -> None:
        """Copy all files of a remote folder. Raises: OSError; RunDirectoryError if a path leads out of the folder."""
        for path in self.paths(below):
            if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:  # object stores accept any key
                raise RunDirectoryError(
                    given=f"{self.text}/{below}/{path}",
                    conflict="its path leads out of the folder that it is copied to",
                    remedy="remove it there: shoal writes no such file",
                )
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with self.files() as files:
                files.get_file(self.path(below, path), str(target))

    def send(self, folder: Path) -> None:
        """Upload new and changed local files, except checkpoints and hidden files.

        Raises: SupersededError if another run has started at the address since; OSError.
        """
        if (folder / OWNER).exists():
            check_owner(self, json.loads((folder / OWNER).read_text(encoding="utf-8")))
        known = self._known_in(folder)
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            first, *_ = parts = PurePosixPath(name).parts
            hidden = any(part.startswith(".") for part in parts)
            if hidden or name in (LOCK, OWNER) or first in (CHECKPOINTS, GENERATIONS) or not path.is_file():
                continue
            stamp = _stamp(path)
            if known.get(name) != stamp:
                self.write(name, path.read_bytes())
                known[name] = stamp

    def write(self, name: str, content: bytes) -> None:
        """Write a whole file at the address. Raises: OSError."""
        with self.files() as files:
            make_parent(files, self.path(name))
            files.pipe_file(self.path(name), content)

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Return the JSON object in a remote file, or None if it is missing or damaged.

        Raises: OSError if unreachable.
        """
        with contextlib.suppress(FileNotFoundError, ValueError), self.files() as files:
            files.invalidate_cache()
            document = json.loads(files.cat_file(self.path(name)))
            return document if isinstance(document, dict) else None
        return None

    def remove(self, name: str) -> None:
        """Remove a file at the address. Errors are ignored."""
        with contextlib.suppress(OSError), self.files() as files:
            files.rm_file(self.path(name))


def take_ownership(address: RunAddress, folder: Path) -> dict[str, Any]:
    """Make the run in `folder` the only writer at the address, and return the mark that both places store.

    The run that started last has this right. There is no lock, since a disconnected host could not release it.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds")
    mark = {"token": uuid.uuid4().hex, "host": socket.gethostname(), "pid": os.getpid(), "since": now}
    content = json.dumps(mark)
    address.write(OWNER, content.encode())
    write_file(folder / OWNER, content)
    return mark


def check_owner(address: RunAddress, mark: dict[str, Any]) -> None:
    """Check that no run other than the mark's has started at the address. Raises: SupersededError; OSError."""
    with address.files() as files:
        files.invalidate_cache()
        there = json.loads(files.cat_file(address.path(OWNER)))
    if there["token"] != mark["token"]:
        raise SupersededError(
            f"{address.text}: another run trains there since {there['since']} "
            f"(process {there['pid']} on {there['host']}), and this one writes there no more"
        )


def make_parent(files: Any, path: str) -> None:
    """Create the folder of a file on file systems that have folders.

    Object stores are skipped: they would create a bucket, even for a misspelt address.
    """
    if not files.async_impl:
        files.makedirs(files._parent(path), exist_ok=True)


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size


@contextlib.contextmanager
def working_copy(text: str, *, fetched: bool = True) -> Iterator[Path]:
    """Yield a local folder with the address's own files, and upload changes at the end of the context.

    `fetched`: whether to download the files first. Raises: CommandError, RunDirectoryError, StorageError of the
        address.
    """
    address = RunAddress(text)
    with tempfile.TemporaryDirectory(prefix="shoal-run-") as name:
        folder = Path(name)
        if fetched:
            address.fetch(folder)
        try:
            yield folder
        except BaseException:
            try:
                address.send(folder)
            except OSError as error:  # raise the first error
                about = f"--out {text}: the run's own files could not be written there: "
                say_note(f"{'' if isinstance(error, SupersededError) else about}{error}")
            raise
        try:
            address.send(folder)
        except SupersededError as error:
            say_note(f"{error}")
        except OSError as error:
            raise StorageError(
                given=f"--out {text}",
                conflict=f"the run's own files could not be written there: {error}",
                remedy="check this host's way to it; --resume goes on from the newest checkpoint there",
            ) from error


@contextlib.contextmanager
def copy_to_read(run: str) -> Iterator[Path]:
    """Yield a local run directory for reading: `run` itself, or a temporary copy of a run at an address.

    Nothing is written back. Raises: CommandError, RunDirectoryError if the address is unreadable or has no run.
    """
    if not is_address(run):
        yield Path(run)
        return
    with tempfile.TemporaryDirectory(prefix="shoal-run-") as name:
        fetch_to_read(run, Path(name))
        yield Path(name)


def fetch_to_read(run: str, folder: Path) -> None:
    """Copy the own files of the run at an address to `folder`. Raises: as `copy_to_read`."""
    there: dict[str, tuple[int, int]] = {}  # not the shared record: this copy is never sent back
    RunAddress(run).fetch(folder, there)
    if RunDirectory(folder).job.name not in there:  # `folder` may have the file from an earlier copy
        raise RunDirectoryError(
            given=run,
            conflict="no run began there, or it has saved nothing yet (it has no job.json)",
            remedy="give what --out of the run was, for a checkpoint its run's address together with --step N",
        )
