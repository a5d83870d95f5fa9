"""Weights of a checkpoint of any layout or of another program's file, as whole tensors or loaded into a model."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import weakref
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from shoal.checkpoint.callback_state import AVERAGES
from shoal.checkpoint.fetched import fetch_with_checkpoint
from shoal.checkpoint.manifest import MANIFEST_NAME, ManifestError
from shoal.checkpoint.matching import match, named_tensors, value_of
from shoal.checkpoint.state_dicts import ADAPTER_NAME, FILE_NAME, INDEX_NAME, StoredWeights, state_dict_of
from shoal.checkpoint.store import STATE_NAME, SavedCheckpoint, Step, Store, name_of, open_folder
from shoal.checkpoint.whole_optimizer import EVALUATED
from shoal.errors import IntegrityError, RunDirectoryError
from shoal.parallel.model.tensor_slice import TensorSlice
from shoal.runs.address import is_address
from shoal.runs.option_values import NameRules

Model = TypeVar("Model", bound=nn.Module)


class CheckpointWeights(StoredWeights):
    """Whole tensors of a checkpoint under the keys of the model's state dict, each read on access.

    The tensors are on the CPU in the dtype of the training. Each file is verified when it is first read.
    `ema`: use the averages of the callback EMA, for the tensors that it averages.
    """

    def __init__(self, saved: SavedCheckpoint, *, ema: bool = False) -> None:
        """Open the weights. Raises: RunDirectoryError if `ema` is set and the run has no averages."""
        self._saved, self.origin = saved, f"a checkpoint of step {saved.step}{', averaged' if ema else ''}"
        tensors: dict[str, dict[str, Any]] = saved.document["tensors"]
        self._entries: dict[str, dict[str, Any]] = {**tensors["model"], **tensors.get(EVALUATED, {})}
        if ema:
            self._entries |= averages(saved)
        # Checkpoints of earlier versions have no keys: each tensor has the first of its names.
        self._names: dict[str, str] = saved.document.get("keys") or {name: name for name in self._entries}
        self._files: dict[str, Any] = {}

    @property
    def step(self) -> int:
        """Number of steps before the checkpoint."""
        return self._saved.step

    @property
    def document(self) -> Mapping[str, Any]:
        """The training state other than tensors, as JSON."""
        return self._saved.document

    @property
    def names(self) -> Mapping[str, str]:
        """Tensor name by key. Keys of tied tensors have the same name."""
        return self._names

    @property
    def all_names(self) -> set[str]:
        """The names of all tensors, including buffers that are in no state dict."""
        return set(self._entries)

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading the tensor."""
        return tuple(self._entry(key)["shape"])

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of a tensor without reading the tensor."""
        found: torch.dtype = getattr(torch, self._entry(key)["dtype"])
        return found

    def __getitem__(self, key: str) -> Tensor:
        """Return the whole tensor. Raises: KeyError; IntegrityError if a file with a part of the tensor is damaged."""
        entry = self._entry(key)
        try:
            return self._read(self._names.get(key, key), entry)
        except (ManifestError, SafetensorError) as error:
            raise damaged(self._saved.folder, error) from error

    def _entry(self, key: str) -> dict[str, Any]:
        return self._entries[self._names.get(key, key)]

    def _read(self, name: str, entry: Mapping[str, Any]) -> Tensor:
        shape, missing = entry["shape"], math.prod(entry["shape"])
        whole = torch.empty(shape, dtype=getattr(torch, entry["dtype"]))
        target = TensorSlice.whole(shape)
        for file, ranges in entry["files"].items():
            missing -= target.copy(whole, TensorSlice.from_json(shape, ranges), self._file(file).get_tensor(name))
        if missing:
            raise ManifestError(f"its files lack some of {name}")
        return whole

    def _file(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = safe_open(self._saved.verified(name), framework="pt")
        return self._files[name]


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
    weights = _weights_at(text, step, ema) if is_address(text) else weights_of(Path(text), step, ema=ema)
    if into is None:
        return weights
    rules = NameRules(() if strict else ("missing", "unexpected"), tuple((rename or {}).items()))
    matches = match(named_tensors(into), weights, rules)
    matches.wrong = [
        f"{one.names[0]}: {'on the meta device' if one.tensor.is_meta else 'divided over ranks'} in the model"
        for one, _ in matches.pairs
        if one.tensor.is_meta or hasattr(one.tensor, "to_local")
    ]
    matches.refuse(weights, rules, _remedy)
    values = [value_of(weights, keys) for _, keys in matches.pairs]  # read all values before the model changes
    with torch.no_grad():
        for one, _ in matches.pairs:
            one.tensor.copy_(values.pop(0))
    return into


def _weights_at(source: str, step: Step, ema: bool) -> StoredWeights:
    """Load the weights of a run at an address from a temporary copy, which is deleted with the weights."""
    folder = tempfile.mkdtemp(prefix="shoal-run-")
    try:
        fetch_with_checkpoint(source, Path(folder), step)
        found = weights_of(Path(folder), step, ema=ema)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(found, shutil.rmtree, folder, ignore_errors=True)
    return found


def _remedy(kinds: Collection[str]) -> str:
    remedy = "build the model that the run trained"
    both = not {"wrong", "mismatched"} & set(kinds)
    return remedy + (", or write strict=False to load only what both have" if both else "")


def weights_of(path: Path, step: Step = "last", *, ema: bool = False) -> StoredWeights:
    """Return the weights of a run, a checkpoint, or a file or folder of another program. `ema`: averaged weights.

    Raises: RunDirectoryError if there are none; IntegrityError if they are damaged.
    """
    if not (path.is_file() or _is_other(path)):
        return CheckpointWeights(find(path, step), ema=ema)
    if ema:
        raise _no_average(path)
    if step != "last":
        raise RunDirectoryError(
            given=f"{path} with step {step}", conflict="it is no run, and has no steps", remedy="leave the step out"
        )
    return state_dict_of(path)


def averages(saved: SavedCheckpoint) -> dict[str, dict[str, Any]]:
    """Return the entries of a checkpoint's averaged weights. Raises: RunDirectoryError if there are none."""
    found: dict[str, dict[str, Any]] | None = saved.document["tensors"].get(AVERAGES)
    if found is None:
        raise _no_average(saved.folder)
    return found


def _no_average(path: Path) -> RunDirectoryError:
    return RunDirectoryError(
        given=f"{path} with averaged weights",
        conflict="no average of the weights is there",
        remedy="train with Job(callbacks=[shoal.EMA(0.999)]), or leave ema out",
    )


def _is_other(folder: Path) -> bool:
    """Return True if another program wrote a folder. A checkpoint without a manifest does not count."""
    own = any((folder / name).exists() for name in (MANIFEST_NAME, STATE_NAME))
    return not own and any((folder / name).is_file() for name in (FILE_NAME, INDEX_NAME, ADAPTER_NAME))


def find(path: Path, step: Step = "last") -> SavedCheckpoint:
    """Open the checkpoint of a step in a run directory or folder of checkpoints, or the checkpoint at `path`.

    Nothing is renamed. Raises: RunDirectoryError if there is none; IntegrityError if it is damaged.
    """
    folder = path if (path / MANIFEST_NAME).is_file() else _folder_of(path, step)
    try:
        found = open_folder(folder)
    except ManifestError as error:
        raise damaged(folder, error) from error
    if folder == path and step != "last" and step != found.step:
        raise RunDirectoryError(
            given=f"{path} with step {step}",
            conflict=f"that is the checkpoint of step {found.step}",
            remedy="give the run's directory, or leave the step out",
        )
    return found


def _folder_of(path: Path, step: Step) -> Path:
    store = Store(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
    return store.folder / name_of(store, step, str(path))


def damaged(folder: Path, error: Exception) -> IntegrityError:
    """Create the error for a damaged checkpoint."""
    others = [s for s in Store(folder.parent).steps() if folder.name != Store(folder.parent).path(s).name]
    other = f"step {others[-1]} has another" if others else "restore it from a copy"
    return IntegrityError(given=f"the checkpoint {folder}", conflict=f"it is damaged: {error}", remedy=other)
