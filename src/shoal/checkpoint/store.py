"""Checkpoint directories: tensor files and their manifest, written aside, renamed, and verified in full before use."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import shutil
import stat
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from shoal.checkpoint.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, FileEntry, FormatError, Manifest, ManifestError
from shoal.checkpoint.newest_mark import NewestMark
from shoal.checkpoint.tensor_file import tensor_file_chunks
from shoal.errors import IntegrityError
from shoal.runs.directory_lock import claim
from shoal.runs.generation import Fence

BEST_NAME = "best"
STATE_NAME, _TENSORS = "state.json", ".safetensors"
# What reading a damaged checkpoint may give: a file gone, a link or folder in its place, a bad sector.
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EIO)


def directory_name(step: int) -> str:
    """The name of the directory of a checkpoint taken after `step` steps."""
    return f"step-{step:08d}"


@dataclass(frozen=True)
class Snapshot:
    """Contents of a checkpoint: CPU tensors by file and name, and a JSON document; `best`: of all up to now."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    document: dict[str, Any]
    best: bool = False


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint on disk; its tensors are read a file at a time. `checked`: all of its files are what was written."""

    folder: Path
    manifest: Manifest
    document: dict[str, Any]
    checked: bool = True

    @property
    def step(self) -> int:
        """The step that it was taken after."""
        return self.manifest.step

    @property
    def names(self) -> list[str]:
        """Its files of tensors, without their ending."""
        return sorted(n.removesuffix(_TENSORS) for n in self.manifest.files if n.endswith(_TENSORS))

    def read(self, name: str) -> dict[str, Tensor]:
        """The tensors of one file. Raises: ManifestError where it is not what was written; OSError."""
        file = f"{name}{_TENSORS}"
        content = _verified(self.folder, file, self.manifest.files[file], hashed=not self.checked)
        try:
            found: dict[str, Tensor] = load_tensors(content)
        except SafetensorError as error:
            raise ManifestError(f"{name} does not hold tensors: {error}") from None
        return found

    def verified(self, name: str) -> Path:
        """The path of one file of tensors, whose bytes are what was written. Raises: as `read`."""
        file = f"{name}{_TENSORS}"
        entry = self.manifest.files.get(file)
        if entry is None:
            raise ManifestError(f"the manifest does not name {file}")
        with _opened(self.folder / file) as content:
            size = os.fstat(content.fileno()).st_size
            if size != entry.size:
                raise ManifestError(f"{file} has {size} bytes, written were {entry.size}")
            if hashlib.file_digest(content, "sha256").hexdigest() != entry.sha256:
                raise ManifestError(f"{file} is not what was written (SHA-256 differs)")
        return self.folder / file


def open_folder(folder: Path) -> SavedCheckpoint:
    """The checkpoint in a folder, of which each file is checked when it is read. Raises: ManifestError; OSError."""
    if folder.is_symlink():
        raise ManifestError(f"{folder.name} is a link")
    manifest = Manifest.from_bytes(_read(folder / MANIFEST_NAME, MAX_MANIFEST_BYTES + 1))
    if STATE_NAME not in manifest.files:
        raise ManifestError(f"its files do not hold a training state: {STATE_NAME!r}")
    content = _verified(folder, STATE_NAME, manifest.files[STATE_NAME])
    try:
        return SavedCheckpoint(folder, manifest, json.loads(content), checked=False)
    except ValueError as error:
        raise ManifestError(f"its files do not hold a training state: {error}") from None


class Store:
    """Checkpoints under one directory, of which the newest `keep` remain."""

    def __init__(
        self, folder: Path, keep: int | None = 3, mark: NewestMark | None = None, fence: Fence | None = None
    ) -> None:
        """`keep`: how many of the newest, None for all; `mark`: of the newest one's step; `fence`: of who writes."""
        self.folder, self.keep, self._mark, self._fence = folder, keep, mark or NewestMark(None), fence or Fence()

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, oldest first; whether they are good is not known yet."""
        if not self.folder.is_dir():
            return []
        names = [p.name for p in self.folder.iterdir() if p.is_dir()]
        return sorted(int(n[5:]) for n in names if n.startswith("step-") and n[5:].isdecimal())

    def path(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.folder / directory_name(step)

    def write(self, snapshot: Snapshot) -> None:
        """Writes a checkpoint: either it is there whole, or not at all. Raises: OSError where the disk does."""
        aside = self.begin(snapshot.step)
        try:
            files = dict(self.add(aside, name, group) for name, group in snapshot.tensors.items())
            self.commit(aside, snapshot.step, files, snapshot.document, best=snapshot.best)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            self._fence.check()  # whose next generation removes what lies aside
            raise

    def begin(self, step: int) -> Path:
        """A new folder for the files of a checkpoint, which `commit` makes one."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        aside = self.folder / f".tmp-{directory_name(step)}-{uuid.uuid4().hex[:12]}"
        aside.mkdir(mode=0o700)
        return aside

    def add(self, aside: Path, name: str, tensors: dict[str, Tensor]) -> tuple[str, FileEntry]:
        """Writes one file of tensors; its name and the manifest's entry for it. Raises: OSError."""
        return f"{name}{_TENSORS}", _write(aside / f"{name}{_TENSORS}", *tensor_file_chunks(tensors))

    def commit(
        self, aside: Path, step: int, files: dict[str, FileEntry], document: dict[str, Any], *, best: bool = False
    ) -> None:
        """Seals what is in the folder and gives it its name; the oldest beyond `keep` go. Raises: OSError."""
        target = self.folder / directory_name(step)
        content = json.dumps(document, sort_keys=True).encode()
        files = {**files, STATE_NAME: _write(aside / STATE_NAME, content)}
        _write(aside / MANIFEST_NAME, Manifest(step, files).to_bytes())
        _sync_directory(aside)
        self._fence.check()
        if target.exists():  # the same step again, after a rollback or a resume: the older one steps aside first
            old = self.folder / f".old-{target.name}-{uuid.uuid4().hex[:12]}"
            target.rename(old)
            try:
                aside.rename(target)
            except OSError:
                old.rename(target)
                raise
            shutil.rmtree(old, ignore_errors=True)
        else:
            aside.rename(target)
        _sync_directory(self.folder)
        self._mark.note(step)
        if best:
            self.keep_best(step)
        others = [s for s in self.steps() if s != step]
        for other in others[: -self.keep + 1 or None] if self.keep is not None else ():
            shutil.rmtree(self.folder / directory_name(other), ignore_errors=True)

    def keep_best(self, step: int) -> None:
        """Makes the checkpoint of a step the best, which stays until there is a better one. Raises: OSError."""
        target, mark = self.folder / BEST_NAME, uuid.uuid4().hex[:12]
        aside, old = self.folder / f".tmp-{BEST_NAME}-{mark}", self.folder / f".old-{BEST_NAME}-{mark}"
        aside.mkdir(mode=0o700)
        for file in self.path(step).iterdir():
            try:
                os.link(file, aside / file.name)  # the same bytes on disk under a second name
            except OSError:
                shutil.copy2(file, aside / file.name)
        _sync_directory(aside)
        if not self._fence.is_open:
            shutil.rmtree(aside, ignore_errors=True)
        self._fence.check()
        if target.exists():
            target.rename(old)
        aside.rename(target)
        _sync_directory(self.folder)
        shutil.rmtree(old, ignore_errors=True)

    def mend_best(self, step: int) -> None:
        """Makes the checkpoint of a step the best where a killed writer had not come to that. Raises: OSError."""
        try:
            there = open_folder(self.folder / BEST_NAME).step == step
        except ManifestError:
            there = False
        if not there and step in self.steps():
            self.keep_best(step)

    def open(self, step: int) -> SavedCheckpoint:
        """The checkpoint of a step, of which each file is checked when it is read. Raises: as `read`."""
        found = open_folder(self.folder / directory_name(step))
        if found.step != step:
            raise ManifestError(f"it is the checkpoint of step {found.step}")
        return found

    def read(self, step: int) -> SavedCheckpoint:
        """The verified checkpoint of a step. Raises: ManifestError naming what is wrong with it; OSError."""
        found = self.open(step)
        held = {name: found.read(name).keys() for name in found.names}
        try:
            parts = [(f, path) for group in found.document.get("tensors", {}).values() for path, f in group.items()]
            lacking = [(name, path) for f, path in parts for name in f["files"] if path not in held.get(name, ())]
        except (AttributeError, KeyError, TypeError) as error:
            raise ManifestError(f"its files do not hold a training state: {error!r}") from None
        if lacking:
            raise ManifestError("its file {} does not hold {}".format(*lacking[0]))
        return replace(found, checked=True)

    def newest_good(self) -> tuple[SavedCheckpoint | None, list[str]]:
        """The newest checkpoint that passes, and a line about each that did not; the latter are renamed to `.bad`.

        None where there never was a checkpoint. Raises: IntegrityError where there were some and none passes, or the
        newest is of another format; OSError where one cannot be read now (permission, a network disk away), which
        proves nothing against it.
        """
        found = self.steps()
        complaints: list[str] = []
        for step in reversed(found):
            try:
                good = self.read(step)
                if (self._mark.step or 0) > found[-1]:
                    complaints.append(f"the checkpoint of step {self._mark.step} is not there any more")
                return good, complaints
            except FormatError as error:
                raise IntegrityError(
                    given=f"--resume from {self.folder}",
                    conflict=f"the checkpoint of step {step}, the newest, was written by another version: {error}",
                    remedy="resume with the version of shoal that wrote it; job.json has its number",
                ) from None
            except ManifestError as error:
                kept = self._quarantine(step)
                complaints.append(f"checkpoint of step {step} is damaged: {error}; kept as {kept.name}")
        if found or self.damaged() or self._mark.step is not None:
            gone = f"this run had a checkpoint of step {self._mark.step}, and no checkpoint is there any more"
            bad = "no checkpoint there passes its checks" + "".join(f"\n{c}" for c in complaints)
            raise IntegrityError(
                given=f"--resume from {self.folder}",
                conflict=bad if found or self.damaged() else gone,
                remedy="restore the directory from a copy, or start anew with another --out",
            )
        return None, complaints

    def forget_after(self, step: int) -> None:
        """Removes the checkpoints of later steps."""
        for later in [s for s in self.steps() if s > step]:
            shutil.rmtree(self.folder / directory_name(later), ignore_errors=True)

    def damaged(self) -> list[Path]:
        """Directories of damaged checkpoints."""
        return sorted(self.folder.glob("step-*.bad*")) if self.folder.is_dir() else []

    def hold(self, until: contextlib.ExitStack) -> None:
        """Takes the folder for this process alone until that closes, and cleans it. Raises: as `claim`."""
        until.enter_context(claim(self.folder, lambda text: print(f"note: {text}", file=sys.stderr), mode=0o700))
        self.clean()

    def clean(self) -> None:
        """Removes what a killed writer left half done, and puts back what it had moved aside last."""
        self._fence.check()
        if not self.folder.is_dir():
            return
        for path in self.folder.glob(".old-step-*"):
            target = self.folder / path.name[5:18]
            if not target.exists():
                with contextlib.suppress(OSError):
                    path.rename(target)
        for pattern in (".tmp-*", ".old-*", ".gone-*"):
            for path in self.folder.glob(pattern):
                gone = self.folder / f".gone-{uuid.uuid4().hex[:12]}"  # at one stroke, should its writer live
                with contextlib.suppress(OSError):
                    path.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)

    def _quarantine(self, step: int) -> Path:
        folder = self.folder / directory_name(step)
        number = 1
        while (kept := folder.with_name(f"{folder.name}.bad" + (f"-{number}" if number > 1 else ""))).exists():
            number += 1
        folder.rename(kept)
        return kept


def _write(path: Path, *content: bytes | memoryview) -> FileEntry:
    digest, size = hashlib.sha256(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        for part in content:
            file.write(part)
            digest.update(part)
            size += len(part)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(size, digest.hexdigest())


def _verified(folder: Path, name: str, entry: FileEntry, hashed: bool = True) -> bytes:
    content = _read(folder / name, entry.size + 1)
    if len(content) != entry.size:
        raise ManifestError(f"{name} has {len(content)} bytes or more, written were {entry.size}")
    if hashed and hashlib.sha256(content).hexdigest() != entry.sha256:
        raise ManifestError(f"{name} is not what was written (SHA-256 differs)")
    return content


def _read(path: Path, limit: int) -> bytes:
    with _opened(path) as file:
        return file.read(min(limit, os.fstat(file.fileno()).st_size + 1))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[io.BufferedReader]:
    """A regular file; a link could lead anywhere and a pipe could wait forever. Raises: ManifestError; OSError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ManifestError(f"{path.name} is not a regular file")
            yield file
    except OSError as error:
        if error.errno not in _DAMAGE:
            raise
        raise ManifestError(f"{path.name} cannot be read: {error.strerror}") from None


def _sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
