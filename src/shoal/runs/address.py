"""Address of a run directory that fsspec reaches (s3://, gs://, ...), where hosts share no file system.

A process that starts or trains such a run has a working copy of the directory's own files, without checkpoints. Rank
0's is written back with each checkpoint and at the end. Checkpoints go to the address directly.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import sys
import tempfile
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from shoal.errors import CommandError, RunDirectoryError, StorageError
from shoal.runs.directory import RunDirectory, write_file
from shoal.runs.directory_lock import NAME as LOCK
from shoal.runs.generation import FOLDER as GENERATIONS

CHECKPOINTS = "checkpoints"
OWNER = "owner.json"  # the run that was started there last: an older one writes no more
_PACKAGES = {"s3": "shoal[s3]", "s3a": "shoal[s3]", "gs": "shoal[gs]", "gcs": "shoal[gs]"}


def is_address(text: str | None) -> bool:
    """Whether a run directory is given as an address."""
    return text is not None and "://" in text


class SupersededError(OSError):
    """Another run has begun at an address since, and writes there."""


class RunAddress:
    """Address of a run directory. Errors of the server, or of the way to it, are OSErrors.

    All of this process know of a working copy which files one of them has fetched or sent: none sends those again, over
    what another run may have written since.
    """

    _known: ClassVar[dict[tuple[str, Path], dict[str, tuple[int, int]]]] = {}  # of files here as they are there

    def __init__(self, text: str) -> None:
        self.text = text.rstrip("/")

    def _known_in(self, folder: Path) -> dict[str, tuple[int, int]]:
        return self._known.setdefault((self.text, folder.resolve()), {})

    @functools.cached_property
    def _reached(self) -> tuple[Any, str]:
        """The file system and the path in it. Raises: CommandError for an address that no installed package reaches."""
        try:
            import fsspec  # which torch has; here, since few runs need it

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
        """The path of a file there, as fsspec has it."""
        return "/".join((self._reached[1], *parts))

    @contextlib.contextmanager
    def files(self) -> Iterator[Any]:
        """The file system, in a context whose errors are OSErrors: clients have classes of their own."""
        found = self._reached[0]
        try:
            yield found
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{self.text}: {type(error).__name__}: {str(error).strip()[:300]}") from error

    def paths(self, below: str = "") -> list[str]:
        """Paths of all files below a folder, relative to it."""
        with self.files() as files:
            files.invalidate_cache()
            folder = self.path(*([below] if below else []))
            found = files.find(folder)
        return [str(PurePosixPath(path).relative_to(folder)) for path in found]

    def fetch(self, folder: Path) -> None:
        """Copies the directory's own files to a working copy. Raises: as `copy_files`."""
        self.copy_files(folder, self._known_in(folder))

    def copy_files(self, folder: Path, known: dict[str, tuple[int, int]]) -> None:
        """Copies the directory's own files here, and notes each in `known`, by its name, as it is here.

        Raises: RunDirectoryError where the address does not answer.
        """
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
        """Copies all files of a folder there to one here. Raises: OSError; RunDirectoryError of one that leads out."""
        for path in self.paths(below):
            if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:  # keys are whatever was written
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
        """Copies files here that are new or changed to the address, but checkpoints and what is hidden.

        Raises: SupersededError where the folder is of a run that another has followed; OSError.
        """
        if (folder / OWNER).exists():
            self.check_owner(json.loads((folder / OWNER).read_text(encoding="utf-8")))
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
        """Writes a file there, whole. Raises: OSError."""
        with self.files() as files:
            make_parent(files, self.path(name))
            files.pipe_file(self.path(name), content)

    def read_json(self, name: str) -> dict[str, Any] | None:
        """A JSON object from a file there; None where it is missing or damaged. Raises: OSError of the way to it."""
        with contextlib.suppress(FileNotFoundError, ValueError), self.files() as files:
            files.invalidate_cache()
            found = json.loads(files.cat_file(self.path(name)))
            return found if isinstance(found, dict) else None
        return None

    def remove(self, name: str) -> None:
        """Removes a file there, where it is; one that cannot be removed stays."""
        with contextlib.suppress(OSError), self.files() as files:
            files.rm_file(self.path(name))

    def own(self, folder: Path) -> dict[str, Any]:
        """Makes the run of a folder here the one that writes there, and returns its mark, which both have.

        It is the right of the run that began last. No lock: a host that is cut off cannot give one back.
        """
        now = datetime.now(UTC).isoformat(timespec="seconds")
        mark = {"token": uuid.uuid4().hex, "host": socket.gethostname(), "pid": os.getpid(), "since": now}
        content = json.dumps(mark)
        self.write(OWNER, content.encode())
        write_file(folder / OWNER, content)
        return mark

    def check_owner(self, mark: dict[str, Any]) -> None:
        """Raises: SupersededError where another run than that of the mark has begun there since; OSError."""
        with self.files() as files:
            files.invalidate_cache()
            there = json.loads(files.cat_file(self.path(OWNER)))
        if there["token"] != mark["token"]:
            raise SupersededError(
                f"{self.text}: another run trains there since {there['since']} "
                f"(process {there['pid']} on {there['host']}), and this one writes there no more"
            )


def make_parent(files: Any, path: str) -> None:
    """Makes the folder of a file, where the file system has such a thing.

    Object stores have none; theirs would make a bucket, which a misspelt address is not to do.
    """
    if not files.async_impl:
        files.makedirs(files._parent(path), exist_ok=True)


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_mtime_ns, found.st_size


@contextlib.contextmanager
def working_copy(text: str, *, fetched: bool = True) -> Iterator[Path]:
    """A folder with the address's own files, for a context; what was changed is written back at its end.

    `fetched`: whether the files are wanted. Raises: CommandError, RunDirectoryError, StorageError of the address.
    """
    address = RunAddress(text)
    with tempfile.TemporaryDirectory(prefix="shoal-run-") as name:
        folder = Path(name)
        if fetched:
            address.fetch(folder)
        try:
            yield folder
        except BaseException:
            with _noted(f"--out {text}: the run's own files could not be written there: "):  # what is raised is told
                address.send(folder)
            raise
        try:
            address.send(folder)
        except SupersededError as error:
            print(f"note: {error}", file=sys.stderr)
        except OSError as error:
            raise StorageError(
                given=f"--out {text}",
                conflict=f"the run's own files could not be written there: {error}",
                remedy="check this host's way to it; --resume goes on from the newest checkpoint there",
            ) from error


@contextlib.contextmanager
def _noted(about: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        print(f"note: {'' if isinstance(error, SupersededError) else about}{error}", file=sys.stderr)


@contextlib.contextmanager
def copy_to_read(run: str) -> Iterator[Path]:
    """A run directory: `run` itself; of one at an address a copy of its own files, for a context, as they are now.

    Nothing is written back. Raises: CommandError, RunDirectoryError of the address, also where no run began there.
    """
    if not is_address(run):
        yield Path(run)
        return
    with tempfile.TemporaryDirectory(prefix="shoal-run-") as name:
        fetch_to_read(run, Path(name))
        yield Path(name)


def fetch_to_read(run: str, folder: Path) -> None:
    """Copies the own files of the run at an address here. Raises: as `copy_to_read`."""
    there: dict[str, tuple[int, int]] = {}  # for this look alone: nothing of it is sent back
    RunAddress(run).copy_files(folder, there)
    if RunDirectory(folder).job.name not in there:  # an earlier copy may have it still
        raise RunDirectoryError(
            given=run,
            conflict="no run began there, or it has saved nothing yet (it has no job.json)",
            remedy="give the address that --out of the run has; of a checkpoint that of its run, and --step",
        )
