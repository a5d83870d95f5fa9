"""Weights of a checkpoint of any layout or of another program's file, as whole tensors or loaded into a model."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
import weakref
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from shoal.checkpoint.callback_state import AVERAGES
from shoal.checkpoint.manifest import MANIFEST_NAME, FormatError, ManifestError
from shoal.checkpoint.matching import match, named_tensors, value_of
from shoal.checkpoint.places import RemotePlace
from shoal.checkpoint.state_dicts import ADAPTER_NAME, FILE_NAME, INDEX_NAME, StoredWeights, state_dict_of
from shoal.checkpoint.store import (
    STATE_NAME,
    SavedCheckpoint,
    Step,
    Store,
    TensorEntry,
    directory_name,
    name_of,
    open_folder,
)
from shoal.checkpoint.tensor_file import open_tensors
from shoal.checkpoint.whole_optimizer import EVALUATED
from shoal.errors import IntegrityError, RunDirectoryError, nearest
from shoal.parallel.model.sharded_model import TensorSlice
from shoal.runs.address import CHECKPOINTS, RunAddress, fetch_to_read, is_address
from shoal.runs.directory import RunDirectory
from shoal.runs.options import NameRules

Model = TypeVar("Model", bound=nn.Module)


class CheckpointWeights(StoredWeights):
    """Whole tensors of a checkpoint under the keys of the model's state dict, each read on access.

    The tensors are on the CPU in the dtype of the training. Each file is verified when it is first read.
    `ema`: use the averages of the callback EMA, for the tensors that it averages.
    `step`: number of steps before the checkpoint. `document`: the training state other than tensors, as JSON.
    """

    def __init__(self, saved: SavedCheckpoint, *, ema: bool = False) -> None:
        """Open the weights. Raises: RunDirectoryError if `ema` is set and the run has no averages."""
        self._saved, self.step = saved, saved.step
        self.document: Mapping[str, Any] = saved.document
        tensors: dict[str, dict[str, TensorEntry]] = saved.document["tensors"]
        self._entries: dict[str, TensorEntry] = {**tensors["model"], **tensors.get(EVALUATED, {})}
        if ema:
            self._entries |= averages(saved)
        # Checkpoints of earlier versions have no keys: each tensor has the first of its names.
        names: dict[str, str] = saved.document.get("keys") or {name: name for name in self._entries}
        super().__init__(f"a checkpoint of step {self.step}{', averaged' if ema else ''}", names, set(self._entries))
        self._files: dict[str, Any] = {}

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading the tensor."""
        return tuple(self._entry(key)["shape"])

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of a tensor without reading the tensor."""
        dtype: torch.dtype = getattr(torch, self._entry(key)["dtype"])
        return dtype

    def __getitem__(self, key: str) -> Tensor:
        """Return the whole tensor. Raises: KeyError; IntegrityError if a file with a part of the tensor is damaged."""
        name, entry = self.names.get(key, key), self._entry(key)
        shape, missing = entry["shape"], math.prod(entry["shape"])
        whole = torch.empty(shape, dtype=getattr(torch, entry["dtype"]))
        target = TensorSlice.whole(shape)
        try:
            for file, ranges in entry["files"].items():
                if file not in self._files:
                    self._files[file] = open_tensors(self._saved.verified(file))
                piece = self._files[file].get_tensor(name)
                missing -= target.copy(whole, TensorSlice.from_json(shape, ranges), piece)
            if missing:
                raise ManifestError(f"its files lack some of {name}")
        except (ManifestError, SafetensorError) as error:
            raise damaged(self._saved.folder, error) from error
        return whole

    def _entry(self, key: str) -> TensorEntry:
        return self._entries[self.names.get(key, key)]


@overload
def load(
    source: str | os.PathLike[str],
    into: None = None,
    *,
    step: Step = "last",
    strict: bool = True,
    rename: Mapping[str, str] | None = None,
    ema: bool = False,
) -> StoredWeights: ...


@overload
def load(
    source: str | os.PathLike[str],
    into: Model,
    *,
    step: Step = "last",
    strict: bool = True,
    rename: Mapping[str, str] | None = None,
    ema: bool = False,
) -> Model: ...


def load(
    source: str | os.PathLike[str],
    into: nn.Module | None = None,
    *,
    step: Step = "last",
    strict: bool = True,
    rename: Mapping[str, str] | None = None,
    ema: bool = False,
) -> nn.Module | StoredWeights:
    """Load weights into a model, or return them as a mapping of whole tensors that are read lazily.

    No process group, GPU or job is needed.

    Args:
        source: a run directory or its address, a directory of checkpoints, one checkpoint, a safetensors file, a file
            of torch.save, or a folder in the Hugging Face layout.
        into: model to fill, which is returned. Values take the model's dtypes and devices.
        step: checkpoint of a run: "last" (default), "best" by the metric that the job watches, or a number of steps.
        strict: if False, tensors that only the source or only the model has are ignored.
        rename: old prefix -> new prefix of names.
        ema: load the averaged weights of a run with the callback EMA.

    Raises: RunDirectoryError if the weights do not exist; IntegrityError if they are damaged or not plain data;
    JobMismatchError if names or shapes differ. The model is unchanged then.
    """
    text = os.fspath(source)
    if is_address(text):
        folder = tempfile.mkdtemp(prefix="shoal-run-")
        try:
            fetch_with_checkpoint(text, Path(folder), step)
            weights = weights_of(Path(folder), step, ema=ema)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        weakref.finalize(weights, shutil.rmtree, folder, ignore_errors=True)  # the copy lasts as long as the weights
    else:
        weights = weights_of(Path(text), step, ema=ema)
    if into is None:
        return weights

    def remedy(kinds: Collection[str]) -> str:
        both = not {"wrong", "mismatched"} & set(kinds)
        more = ", or write strict=False to load only what both have" if both else ""
        return f"build the model that the run trained{more}"

    rules = NameRules(() if strict else ("missing", "unexpected"), tuple((rename or {}).items()))
    matches = match(named_tensors(into), weights, rules)
    matches.wrong = [
        f"{one.names[0]}: {'on the meta device' if one.tensor.is_meta else 'divided over ranks'} in the model"
        for one, _ in matches.pairs
        if one.tensor.is_meta or hasattr(one.tensor, "to_local")
    ]
    matches.refuse(weights, rules, remedy)
    values = [value_of(weights, keys) for _, keys in matches.pairs]  # read all values before the model changes
    with torch.no_grad():
        for one, _ in matches.pairs:
            one.tensor.copy_(values.pop(0))
    return into


def weights_of(path: Path, step: Step = "last", *, ema: bool = False) -> StoredWeights:
    """Return the weights of a run, a checkpoint, or a file or folder of another program. `ema`: averaged weights.

    Raises: RunDirectoryError if there are none; IntegrityError if they are damaged.
    """
    # A folder of another program has none of a checkpoint's files. A checkpoint without a manifest does not count.
    own = any((path / name).exists() for name in (MANIFEST_NAME, STATE_NAME))
    is_other = not own and any((path / name).is_file() for name in (FILE_NAME, INDEX_NAME, ADAPTER_NAME))
    if not (path.is_file() or is_other):
        return CheckpointWeights(find(path, step), ema=ema)
    if ema:
        raise _no_average(path)
    if step != "last":
        raise RunDirectoryError(
            given=f"{path} with step {step}", conflict="it is no run, and has no steps", remedy="leave the step out"
        )
    return state_dict_of(path)


def averages(saved: SavedCheckpoint) -> dict[str, TensorEntry]:
    """Return the entries of a checkpoint's averaged weights. Raises: RunDirectoryError if there are none."""
    entries: dict[str, TensorEntry] | None = saved.document["tensors"].get(AVERAGES)
    if entries is None:
        raise _no_average(saved.folder)
    return entries


def _no_average(path: Path) -> RunDirectoryError:
    return RunDirectoryError(
        given=f"{path} with averaged weights",
        conflict="no average of the weights is there",
        remedy="train with Job(callbacks=[shoal.EMA(0.999)]), or leave ema out",
    )


def find(path: Path, step: Step = "last") -> SavedCheckpoint:
    """Open the checkpoint of a step in a run directory or folder of checkpoints, or the checkpoint at `path`.

    Nothing is renamed. Raises: RunDirectoryError if there is none; IntegrityError if it is damaged.
    """
    folder = path
    if not path.exists():
        parent = path.absolute().parent
        beside = [one.name for one in parent.iterdir() if one.is_dir()] if parent.is_dir() else []
        raise RunDirectoryError(
            given=str(path),
            conflict="there is no such folder",
            remedy=f"give the directory of a run that has trained{nearest(path.name, beside)}",
        )
    if not (path / MANIFEST_NAME).is_file():
        store = Store(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
        folder = store.folder / name_of(store, step, str(path))
    try:
        saved = open_folder(folder)
    except ManifestError as error:
        raise damaged(folder, error) from error
    if folder == path and step != "last" and step != saved.step:
        raise RunDirectoryError(
            given=f"{path} with step {step}",
            conflict=f"that is the checkpoint of step {saved.step}",
            remedy="give the run's directory, or leave the step out",
        )
    return saved


@contextlib.contextmanager
def with_checkpoint(run: str, step: Step = "last") -> Iterator[Path]:
    """Yield a local run directory that has the checkpoint of `step`.

    A local run is used in place. A run at an address is copied to a temporary folder, and nothing is written back.
    Raises: CommandError or RunDirectoryError if the address is wrong or has no such checkpoint.
    """
    if not is_address(run):
        yield Path(run)
        return
    with tempfile.TemporaryDirectory(prefix="shoal-run-") as folder:
        fetch_with_checkpoint(run, Path(folder), step)
        yield Path(folder)


def fetch_with_checkpoint(run: str, folder: Path, step: Step) -> None:
    """Copy the run's own files and the checkpoint of a step from an address to `folder`.

    Raises: CommandError or RunDirectoryError as `with_checkpoint`.
    """
    fetch_to_read(run, folder)
    address, model = RunAddress(run), RunDirectory(folder).model
    try:
        name = name_of(Store(folder / CHECKPOINTS, remote=RemotePlace(run)), step, run)
        for below in (f"{CHECKPOINTS}/{name}", model.name):
            address.fetch_folder(below, folder / below)
    except OSError as error:
        raise RunDirectoryError(
            given=run,
            conflict=f"its checkpoint cannot be read: {error}",
            remedy="try again, where the run still trains and has a newer one by now; check this host's way to it",
        ) from error
    if not (folder / CHECKPOINTS / name / MANIFEST_NAME).exists():
        raise RunDirectoryError(
            given=f"{run}/{CHECKPOINTS}/{name}",
            conflict="the run has removed it meanwhile, for a newer one",
            remedy="try again",
        )


def damaged(folder: Path, error: Exception) -> IntegrityError:
    """Create the error for a checkpoint that is damaged or of another format."""
    if isinstance(error, FormatError):
        remedy = "read it with the version of shoal that wrote it; job.json has its number"
        return IntegrityError(given=f"the checkpoint {folder}", conflict=str(error), remedy=remedy)
    others = [step for step in Store(folder.parent).steps() if folder.name != directory_name(step)]
    other = f"step {others[-1]} has another" if others else "restore it from a copy"
    return IntegrityError(given=f"the checkpoint {folder}", conflict=f"it is damaged: {error}", remedy=other)
