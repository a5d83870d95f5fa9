"""Checkpoint directories: written under a temporary name, renamed when complete, and verified before use."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypedDict

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from shoal.checkpoint.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, FileEntry, FormatError, Manifest, ManifestError
from shoal.checkpoint.places import GONE, LocalPlace, Place, RemotePlace
from shoal.checkpoint.tensor_file import tensor_file_chunks
from shoal.errors import IntegrityError, RunDirectoryError
from shoal.runs.collection import size_of
from shoal.runs.directory import Fence, read_json


@dataclass(frozen=True)
class NewestMark:
    """File next to a run's checkpoints that records the newest step, so that missing checkpoints are noticed.

    There is no mark if `path` is None.
    """

    path: Path | None
    fence: Fence = field(default_factory=Fence)

    def note(self, step: int) -> None:
        """Write the step. Write errors are ignored, since the checkpoint itself exists."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.fence.write(self.path, json.dumps({"step": step}) + "\n")

    @property
    def step(self) -> int | None:
        """The step that was written last, or None."""
        document = read_json(self.path) if self.path is not None else None
        step = document.get("step") if document is not None else None
        return step if isinstance(step, int) else None


class TensorEntry(TypedDict):
    """A tensor in a checkpoint's document: dtype, shape of the whole tensor, and its index ranges in each file."""

    dtype: str
    shape: list[int]
    files: dict[str, Any]


BEST_NAME = "best"
Step = int | Literal["last", "best"]
STATE_NAME, _TENSORS = "state.json", ".safetensors"


def directory_name(step: int) -> str:
    """Return the directory name of the checkpoint after `step` steps."""
    return f"step-{step:08d}"


@dataclass(frozen=True)
class Snapshot:
    """Contents of a checkpoint: CPU tensors by file and name, and a JSON document.

    `best`: True if it is the best so far.
    """

    step: int
    tensors: dict[str, dict[str, Tensor]]
    document: dict[str, Any]
    best: bool = False


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint whose tensors are read one file at a time. `checked`: True if all files are already verified."""

    place: Place
    name: str
    manifest: Manifest
    document: dict[str, Any]
    checked: bool = True

    @property
    def folder(self) -> Path:
        """The checkpoint's folder on disk. Checkpoints at an address have none."""
        assert isinstance(self.place, LocalPlace), "it is read from a run directory on disk"
        return self.place.folder / self.name

    @property
    def step(self) -> int:
        """Number of steps before the checkpoint."""
        return self.manifest.step

    @property
    def names(self) -> list[str]:
        """Names of the tensor files, without suffix."""
        return sorted(n.removesuffix(_TENSORS) for n in self.manifest.files if n.endswith(_TENSORS))

    def read(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of one file. Raises: ManifestError if the file was altered; OSError."""
        file = f"{name}{_TENSORS}"
        content = _verified(self.place, self.name, file, self.manifest.files[file], hashed=not self.checked)
        try:
            tensors: dict[str, Tensor] = load_tensors(content)
        except SafetensorError as error:
            raise ManifestError(f"{name} does not hold tensors: {error}") from None
        return tensors

    def verified(self, name: str) -> Path:
        """Verify one tensor file on this host and return its path. Raises: ManifestError; OSError."""
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
    """Open the checkpoint in a folder on disk. Raises: as `open_in`."""
    return open_in(LocalPlace(folder.parent), folder.name)


def open_in(place: Place, name: str) -> SavedCheckpoint:
    """Open a checkpoint by name; each file is verified when it is read. Raises: ManifestError; OSError."""
    manifest = Manifest.from_bytes(place.read(name, MANIFEST_NAME, MAX_MANIFEST_BYTES + 1))
    if STATE_NAME not in manifest.files:
        raise ManifestError(f"its files do not hold a training state: {STATE_NAME!r}")
    content = _verified(place, name, STATE_NAME, manifest.files[STATE_NAME])
    try:
        return SavedCheckpoint(place, name, manifest, json.loads(content), checked=False)
    except ValueError as error:
        raise ManifestError(f"its files do not hold a training state: {error}") from None


class Store:
    """Checkpoints in one place. Only the newest `keep` and the best remain."""

    def __init__(
        self,
        folder: Path,
        keep: int | None = 3,
        mark: NewestMark | None = None,
        fence: Fence | None = None,
        remote: RemotePlace | None = None,
    ) -> None:
        """Create the store.

        Args:
            folder: local folder of the checkpoints.
            keep: number of newest checkpoints to keep; None keeps all.
            mark: record of the newest checkpoint's step.
            fence: check that this process may still write.
            remote: place of the checkpoints if they are not in `folder`.
        """
        self.folder, self.keep, self._mark, self.fence = folder, keep, mark or NewestMark(None), fence or Fence()
        self.place: Place = remote or LocalPlace(folder)
        self.remote = remote

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, oldest first, without verification."""
        names = self.place.names()
        return sorted(int(n[5:]) for n in names if n.startswith("step-") and n[5:].isdecimal())

    def write(self, snapshot: Snapshot) -> None:
        """Write a checkpoint completely or not at all. Raises: OSError."""
        aside = self.begin(snapshot.step)
        try:
            files = dict(self.add(aside, name, group) for name, group in snapshot.tensors.items())
            self.commit(aside, snapshot.step, files, snapshot.document, best=snapshot.best)
        except BaseException:
            self.place.remove(aside)
            self.fence.check()  # a fenced process leaves the cleanup to the next generation
            raise

    def begin(self, step: int) -> str:
        """Create a temporary folder for a checkpoint, to be completed by `commit`, and return its name.

        Raises: OSError.
        """
        aside = f".tmp-{directory_name(step)}-{uuid.uuid4().hex[:12]}"
        self.place.make(aside)
        return aside

    def add(self, aside: str, name: str, tensors: dict[str, Tensor]) -> tuple[str, FileEntry]:
        """Write one file of tensors. Return its name and manifest entry. Raises: OSError."""
        return f"{name}{_TENSORS}", self.place.write(aside, f"{name}{_TENSORS}", *tensor_file_chunks(tensors))

    def commit(
        self, aside: str, step: int, files: dict[str, FileEntry], document: dict[str, Any], *, best: bool = False
    ) -> None:
        """Write the manifest, rename the folder to its final name, and remove all but the newest `keep` checkpoints.

        `best`: store this checkpoint as the best one too, which later commits do not remove. Raises: OSError.
        """
        place, target = self.place, directory_name(step)
        content = json.dumps(document, sort_keys=True).encode()
        files = {**files, STATE_NAME: place.write(aside, STATE_NAME, content)}
        place.write(aside, MANIFEST_NAME, Manifest(step, files).to_bytes())
        place.sync(aside)
        self._rename(aside, target)
        self._mark.note(step)
        if best:
            self.keep_best(step)
        for other in _beyond(self, step):
            place.check(self.fence)
            place.remove(directory_name(other))
        if self.remote is not None:  # the run's own files go with its checkpoints
            self.remote.address.send(self.folder.parent)

    def _rename(self, aside: str, target: str) -> None:
        """Rename a folder to its final name. An existing folder of that name, from before a rollback, is replaced."""
        place, old = self.place, f".old-{target}-{uuid.uuid4().hex[:12]}"
        place.check(self.fence)
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

    def keep_best(self, step: int, *, if_missing: bool = False) -> None:
        """Store a copy of a step's checkpoint as the best, replacing the previous best. Raises: OSError.

        `if_missing`: only if the step has a checkpoint that is not the best yet, since a killed writer did not get to
            it.
        """
        if if_missing:
            with contextlib.suppress(ManifestError):
                if open_in(self.place, BEST_NAME).step == step:
                    return
            if step not in self.steps():
                return
        aside = f".tmp-{BEST_NAME}-{uuid.uuid4().hex[:12]}"
        try:
            self.place.copy(directory_name(step), aside)
            self._rename(aside, BEST_NAME)
        except BaseException:
            self.place.remove(aside)
            raise

    def open(self, step: int) -> SavedCheckpoint:
        """Open the checkpoint of a step; each file is verified when it is read. Raises: ManifestError; OSError."""
        saved = open_in(self.place, directory_name(step))
        if saved.step != step:
            raise ManifestError(f"it is the checkpoint of step {saved.step}")
        return saved

    def read(self, step: int) -> SavedCheckpoint:
        """Return the fully verified checkpoint of a step. Raises: ManifestError that states the damage; OSError."""
        saved = self.open(step)
        paths = {name: saved.read(name).keys() for name in saved.names}
        try:
            parts = [(f, path) for group in saved.document.get("tensors", {}).values() for path, f in group.items()]
            lacking = [(name, path) for f, path in parts for name in f["files"] if path not in paths.get(name, ())]
        except (AttributeError, KeyError, TypeError) as error:
            raise ManifestError(f"its files do not hold a training state: {error!r}") from None
        if lacking:
            raise ManifestError("its file {} does not hold {}".format(*lacking[0]))
        return replace(saved, checked=True)

    def newest_good(self) -> tuple[SavedCheckpoint | None, list[str]]:
        """Return the newest valid checkpoint, and a message for each damaged one, which is renamed to `.bad`.

        The checkpoint is None if the run never had one.
        Raises: IntegrityError if no checkpoint is valid or the newest has another format; OSError if a checkpoint
        cannot be read now (permission, network disk), which does not prove damage.
        """
        steps = self.steps()
        complaints: list[str] = []
        for step in reversed(steps):
            try:
                good = self.read(step)
                if (self._mark.step or 0) > steps[-1]:
                    complaints.append(f"the checkpoint of step {self._mark.step} is not there any more")
                return good, complaints
            except FormatError as error:
                raise IntegrityError(
                    given=f"--resume from {self.place.shown()}",
                    conflict=f"the checkpoint of step {step}, the newest, was written by another version: {error}",
                    remedy="resume with the version of shoal that wrote it; job.json has its number",
                ) from None
            except ManifestError as error:
                name, folders, number = directory_name(step), self.place.names(), 1
                while (bad := f"{name}.bad" + (f"-{number}" if number > 1 else "")) in folders:
                    number += 1
                self.place.check(self.fence)
                self.place.move(name, bad)
                complaints.append(f"checkpoint of step {step} is damaged: {error}; kept as {bad}")
        if steps or self.damaged() or self._mark.step is not None:
            gone = f"this run had a checkpoint of step {self._mark.step}, and no checkpoint is there any more"
            bad = "no checkpoint there passes its checks" + "".join(f"\n{c}" for c in complaints)
            raise IntegrityError(
                given=f"--resume from {self.place.shown()}",
                conflict=bad if steps or self.damaged() else gone,
                remedy="restore the directory from a copy, or start anew with another --out",
            )
        return None, complaints

    def damaged(self) -> list[str]:
        """Return the names of damaged checkpoints' folders."""
        return sorted(name for name in self.place.names() if name.startswith("step-") and ".bad" in name)

    def clean(self) -> None:
        """Remove incomplete folders of a killed writer, and restore folders that it had renamed."""
        self.place.check(self.fence)
        for name in (n for n in self.place.names() if n.startswith((".old-step-", f".old-{BEST_NAME}-"))):
            before = name.removeprefix(".old-").rpartition("-")[0]
            if before not in self.place.names():
                with contextlib.suppress(OSError):
                    self.place.move(name, before)
        for name in self.place.names():
            if name.startswith((".tmp-", ".old-", GONE)):
                self.place.remove(name)


def remove_later(store: Store, step: int) -> None:
    """Remove the checkpoints of later steps. Raises: FencedError; OSError."""
    for later in [s for s in store.steps() if s > step]:
        store.place.check(store.fence)
        store.place.remove(directory_name(later))


def _beyond(store: Store, step: int) -> list[int]:
    """Return the steps whose checkpoints are too many once there is one of `step`, oldest first."""
    others = [s for s in store.steps() if s != step]
    return others[: -store.keep + 1 or None] if store.keep is not None else []


def make_room(store: Store, step: int) -> tuple[int, int] | None:
    """Remove the oldest checkpoint that the commit of `step` would remove, since the disk is full.

    The newest valid one and the best stay. Return the step and the bytes of the removed one, or None.
    Raises: FencedError.
    """
    if store.remote is not None or not (oldest := _beyond(store, step)):
        return None
    stays = set[int]()
    with contextlib.suppress(ManifestError, OSError):
        stays.add(open_in(store.place, BEST_NAME).step)
    for other in reversed(store.steps()):
        with contextlib.suppress(ManifestError, OSError):
            stays.add(store.read(other).step)
            break
    else:
        return None
    for other in (s for s in oldest if s not in stays):
        store.place.check(store.fence)
        num_bytes = size_of(store.folder / directory_name(other))
        store.place.remove(directory_name(other))
        return other, num_bytes
    return None


def name_of(store: Store, step: Step, run: str) -> str:
    """Return the folder name of a step's checkpoint. `run`: path or address for messages. Raises: RunDirectoryError."""
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
