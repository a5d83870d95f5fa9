"""Checkpoint directories: tensor files and their manifest, written aside, renamed, and verified in full before use."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from shoal.checkpoint.local_place import GONE, LocalPlace, Place
from shoal.checkpoint.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, FileEntry, FormatError, Manifest, ManifestError
from shoal.checkpoint.newest_mark import NewestMark
from shoal.checkpoint.remote_place import RemotePlace
from shoal.checkpoint.tensor_file import tensor_file_chunks
from shoal.errors import IntegrityError, RunDirectoryError
from shoal.runs.directory_lock import claim
from shoal.runs.generation import Fence

BEST_NAME = "best"
Step = int | Literal["last", "best"]
STATE_NAME, _TENSORS = "state.json", ".safetensors"


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
    """A checkpoint; its tensors are read a file at a time. `checked`: all of its files are what was written."""

    place: Place
    name: str
    manifest: Manifest
    document: dict[str, Any]
    checked: bool = True

    @property
    def folder(self) -> Path:
        """Its folder on disk; checkpoints at an address are read by the run alone."""
        assert isinstance(self.place, LocalPlace), "it is read from a run directory on disk"
        return self.place.folder / self.name

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
        content = _verified(self.place, self.name, file, self.manifest.files[file], hashed=not self.checked)
        try:
            found: dict[str, Tensor] = load_tensors(content)
        except SafetensorError as error:
            raise ManifestError(f"{name} does not hold tensors: {error}") from None
        return found

    def verified(self, name: str) -> Path:
        """The path of one file of tensors on this host, whose bytes are what was written. Raises: as `read`."""
        assert isinstance(self.place, LocalPlace), "it is read from a run directory on disk"
        file = f"{name}{_TENSORS}"
        entry = self.manifest.files.get(file)
        if entry is None:
            raise ManifestError(f"the manifest does not name {file}")
        with self.place.opened(self.name, file) as content:
            size = os.fstat(content.fileno()).st_size
            if size != entry.size:
                raise ManifestError(f"{file} has {size} bytes, written were {entry.size}")
            if hashlib.file_digest(content, "sha256").hexdigest() != entry.sha256:
                raise ManifestError(f"{file} is not what was written (SHA-256 differs)")
        return self.folder / file


def open_folder(folder: Path) -> SavedCheckpoint:
    """The checkpoint in a folder on disk. Raises: as `open_in`."""
    return open_in(LocalPlace(folder.parent), folder.name)


def open_in(place: Place, name: str) -> SavedCheckpoint:
    """The checkpoint of that name, of which each file is checked when it is read. Raises: ManifestError; OSError."""
    manifest = Manifest.from_bytes(place.read(name, MANIFEST_NAME, MAX_MANIFEST_BYTES + 1))
    if STATE_NAME not in manifest.files:
        raise ManifestError(f"its files do not hold a training state: {STATE_NAME!r}")
    content = _verified(place, name, STATE_NAME, manifest.files[STATE_NAME])
    try:
        return SavedCheckpoint(place, name, manifest, json.loads(content), checked=False)
    except ValueError as error:
        raise ManifestError(f"its files do not hold a training state: {error}") from None


class Store:
    """Checkpoints in one place, of which the newest `keep` remain."""

    def __init__(
        self,
        folder: Path,
        keep: int | None = 3,
        mark: NewestMark | None = None,
        fence: Fence | None = None,
        remote: RemotePlace | None = None,
    ) -> None:
        """`keep`: how many of the newest, None for all; `mark`: of the newest one's step; `fence`: of who writes.

        `remote`: where they are, if not in `folder` on disk.
        """
        self.folder, self.keep, self._mark, self._fence = folder, keep, mark or NewestMark(None), fence or Fence()
        self.place: Place = remote or LocalPlace(folder)
        self._remote = remote

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, oldest first; whether they are good is not known yet."""
        names = self.place.names()
        return sorted(int(n[5:]) for n in names if n.startswith("step-") and n[5:].isdecimal())

    def path(self, step: int) -> Path:
        """The folder of a step's checkpoint on disk."""
        return self.folder / directory_name(step)

    def shown(self, step: int) -> Path | str:
        """The folder of a step's checkpoint: its path, or its address as text."""
        return self.path(step) if self._remote is None else self._remote.shown(directory_name(step))

    def write(self, snapshot: Snapshot) -> None:
        """Writes a checkpoint: either it is there whole, or not at all. Raises: OSError where the disk does."""
        aside = self.begin(snapshot.step)
        try:
            files = dict(self.add(aside, name, group) for name, group in snapshot.tensors.items())
            self.commit(aside, snapshot.step, files, snapshot.document, best=snapshot.best)
        except BaseException:
            self.place.remove(aside)
            self._fence.check()  # whose next generation removes what lies aside
            raise

    def begin(self, step: int) -> str:
        """A new folder for the files of a checkpoint, which `commit` makes one; its name. Raises: OSError."""
        aside = f".tmp-{directory_name(step)}-{uuid.uuid4().hex[:12]}"
        self.place.make(aside)
        return aside

    def add(self, aside: str, name: str, tensors: dict[str, Tensor]) -> tuple[str, FileEntry]:
        """Writes one file of tensors; its name and the manifest's entry for it. Raises: OSError."""
        return f"{name}{_TENSORS}", self.place.write(aside, f"{name}{_TENSORS}", *tensor_file_chunks(tensors))

    def commit(
        self, aside: str, step: int, files: dict[str, FileEntry], document: dict[str, Any], *, best: bool = False
    ) -> None:
        """Seals what is in the folder and gives it its name; the oldest beyond `keep` go. Raises: OSError."""
        place, target = self.place, directory_name(step)
        content = json.dumps(document, sort_keys=True).encode()
        files = {**files, STATE_NAME: place.write(aside, STATE_NAME, content)}
        place.write(aside, MANIFEST_NAME, Manifest(step, files).to_bytes())
        place.sync(aside)
        self._name(aside, target)
        self._mark.note(step)
        if best:
            self.keep_best(step)
        others = [s for s in self.steps() if s != step]
        for other in others[: -self.keep + 1 or None] if self.keep is not None else ():
            self._check()
            place.remove(directory_name(other))
        self.send()

    def _check(self) -> None:
        """Raises: FencedError, OSError where others write here now. Last before anything is moved or removed."""
        self._fence.check()
        self.place.check()

    def _name(self, aside: str, target: str) -> None:
        """Gives a folder its name; one that has it, as of the same step before a rollback, steps aside first."""
        place, old = self.place, f".old-{target}-{uuid.uuid4().hex[:12]}"
        self._check()
        if target in place.names():
            place.move(target, old)
            try:
                place.move(aside, target)
            except OSError:
                place.move(old, target)
                raise
            place.sync()
            place.remove(old)
        else:
            place.move(aside, target)
            place.sync()

    def keep_best(self, step: int) -> None:
        """Makes the checkpoint of a step the best, which stays until there is a better one. Raises: OSError."""
        aside = f".tmp-{BEST_NAME}-{uuid.uuid4().hex[:12]}"
        try:
            self.place.copy(directory_name(step), aside)
            self._name(aside, BEST_NAME)
        except BaseException:
            self.place.remove(aside)
            raise

    def mend_best(self, step: int) -> None:
        """Makes the checkpoint of a step the best where a killed writer had not come to that. Raises: OSError."""
        try:
            there = open_in(self.place, BEST_NAME).step == step
        except ManifestError:
            there = False
        if not there and step in self.steps():
            self.keep_best(step)

    def open(self, step: int) -> SavedCheckpoint:
        """The checkpoint of a step, of which each file is checked when it is read. Raises: as `read`."""
        found = open_in(self.place, directory_name(step))
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
                    given=f"--resume from {self.place.shown()}",
                    conflict=f"the checkpoint of step {step}, the newest, was written by another version: {error}",
                    remedy="resume with the version of shoal that wrote it; job.json has its number",
                ) from None
            except ManifestError as error:
                kept = self._quarantine(step)
                complaints.append(f"checkpoint of step {step} is damaged: {error}; kept as {kept}")
        if found or self.damaged() or self._mark.step is not None:
            gone = f"this run had a checkpoint of step {self._mark.step}, and no checkpoint is there any more"
            bad = "no checkpoint there passes its checks" + "".join(f"\n{c}" for c in complaints)
            raise IntegrityError(
                given=f"--resume from {self.place.shown()}",
                conflict=bad if found or self.damaged() else gone,
                remedy="restore the directory from a copy, or start anew with another --out",
            )
        return None, complaints

    def forget_after(self, step: int) -> None:
        """Removes the checkpoints of later steps."""
        for later in [s for s in self.steps() if s > step]:
            self._check()
            self.place.remove(directory_name(later))

    def damaged(self) -> list[str]:
        """Names of damaged checkpoints' folders."""
        return sorted(name for name in self.place.names() if name.startswith("step-") and ".bad" in name)

    def hold(self, until: contextlib.ExitStack) -> None:
        """Takes the folder for this process alone until that closes, and cleans it. Raises: as `claim`."""
        until.enter_context(claim(self.folder, lambda text: print(f"note: {text}", file=sys.stderr), mode=0o700))
        self.clean()

    def take_over(self) -> None:
        """Makes this run the one that writes to an address. On disk a lock says so. Raises: OSError."""
        if self._remote is not None:
            self._fence.check()  # a process that stood still is not to take it from its followers
            self._remote.take_over(self.folder.parent)

    def send(self) -> None:
        """Sends the run's own files, where it is one at an address. Raises: OSError."""
        if self._remote is not None:
            self._remote.send(self.folder.parent)

    def clean(self) -> None:
        """Removes what a killed writer left half done, and puts back what it had moved aside last."""
        self._check()
        for name in (n for n in self.place.names() if n.startswith((".old-step-", f".old-{BEST_NAME}-"))):
            before = name.removeprefix(".old-").rpartition("-")[0]
            if before not in self.place.names():
                with contextlib.suppress(OSError):
                    self.place.move(name, before)
        for name in self.place.names():
            if name.startswith((".tmp-", ".old-", GONE)):
                self.place.remove(name)

    def _quarantine(self, step: int) -> str:
        name, there, number = directory_name(step), self.place.names(), 1
        while (kept := f"{name}.bad" + (f"-{number}" if number > 1 else "")) in there:
            number += 1
        self._check()
        self.place.move(name, kept)
        return kept


def name_of(store: Store, step: Step, run: str) -> str:
    """Name of the folder of a step's checkpoint, of the run of that path or address. Raises: RunDirectoryError."""
    steps, given = store.steps(), f"{run} with step {step}"
    if isinstance(step, str) and step not in ("last", "best"):
        raise RunDirectoryError(given=given, conflict="no such step", remedy='write "last", "best" or a number')
    if step == "best":
        if BEST_NAME in store.place.names():
            return BEST_NAME
        conflict, remedy = "no checkpoint is kept as the best", 'write Job(watch="accuracy:max"), say, and train'
    elif not steps:
        bad = ", ".join(store.damaged())
        conflict = f"no checkpoint is there{f' but damaged ones: {bad}' if bad else ''}"
        remedy = "give the directory of a run that has trained, or one of its checkpoints"
    elif step == "last":
        return directory_name(steps[-1])
    elif step in steps:
        return directory_name(int(step))
    else:
        conflict = f"there are checkpoints of the steps {', '.join(map(str, steps))}"
        remedy = f"write one of them, or {steps[-1]} for the last"
    raise RunDirectoryError(given=given, conflict=conflict, remedy=remedy)


def _verified(place: Place, name: str, file: str, entry: FileEntry, hashed: bool = True) -> bytes:
    content = place.read(name, file, entry.size + 1)
    if len(content) != entry.size:
        raise ManifestError(f"{file} has {len(content)} bytes or more, written were {entry.size}")
    if hashed and hashlib.sha256(content).hexdigest() != entry.sha256:
        raise ManifestError(f"{file} is not what was written (SHA-256 differs)")
    return content
