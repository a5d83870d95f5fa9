"""State dicts in files of other programs: safetensors, torch files, and folders in the Hugging Face layout."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from shoal.checkpoint.tensor_file import DTYPE_NAMES, open_tensors
from shoal.errors import IntegrityError, RunDirectoryError
from shoal.runs.directory import read_json

FILE_NAME, INDEX_NAME = "model.safetensors", "model.safetensors.index.json"
ADAPTER_NAME = "adapter_model.safetensors"
_ADAPTER = "default"  # get_peft_model's name of an adapter, in the model's names but not in the file's
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_SHOWN = 8  # maximum number of entries in a message


class StoredWeights(Mapping[str, Tensor]):
    """Whole CPU tensors under the keys of a state dict. Each tensor is read on access.

    `origin`: description for messages. `names`: tensor name by key; keys of tied tensors have the same name.
    `all_names`: the names of all tensors, including buffers that are in no state dict.
    """

    def __init__(self, origin: str, names: Mapping[str, str], all_names: set[str] | None = None) -> None:
        self.origin, self.names = origin, names
        self.all_names = set(names.values()) if all_names is None else all_names

    def once(self) -> dict[str, str]:
        """Return one key for each tensor name: the key equal to the name if there is one, else the first."""
        keys: dict[str, str] = {}
        for key, name in self.names.items():
            if key == name or name not in keys:
                keys[name] = key
        return keys

    def key_of(self, name: str) -> str:
        """Return the key in these weights of a name in a model."""
        return name

    def is_whole(self, name: str) -> bool:
        """Return True if these weights should contain a model's tensor of that name."""
        return True

    @abc.abstractmethod
    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading the tensor."""

    @abc.abstractmethod
    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of a tensor without reading the tensor."""

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, key: object) -> bool:
        return key in self.names


class SafetensorsWeights(StoredWeights):
    """Weights in safetensors files with distinct keys."""

    def __init__(self, origin: str, files: list[Path]) -> None:
        """Open the files. Raises: IntegrityError for an invalid file; RunDirectoryError for a key in two files."""
        self._files: dict[str, Any] = {}
        for path in files:
            try:
                file: Any = open_tensors(path)
            except (SafetensorError, OSError) as error:
                raise unreadable(path, error) from error
            for key in file.keys():  # noqa: SIM118, since it is no mapping
                if key in self._files:
                    raise RunDirectoryError(
                        given=origin, conflict=f"{key} is in {path.name} and in another file", remedy="remove one"
                    )
                self._files[key] = file
        super().__init__(origin, {key: key for key in self._files})

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._files[key].get_slice(key).get_shape())

    def dtype(self, key: str) -> torch.dtype:
        name = self._files[key].get_slice(key).get_dtype()
        return _DTYPES[name] if name in _DTYPES else self[key].dtype

    def __getitem__(self, key: str) -> Tensor:
        tensor: Tensor = self._files[key].get_tensor(key)
        return tensor


class AdapterWeights(SafetensorsWeights):
    """Weights of a peft adapter. The model's own code supplies the base weights."""

    def key_of(self, name: str) -> str:
        parts = [part for part in name.split(".") if part not in (_ADAPTER, "modules_to_save")]
        return ".".join(parts)

    def is_whole(self, name: str) -> bool:
        return self.key_of(name) != name


class TorchWeights(StoredWeights):
    """Weights in a file of torch.save: a state dict, alone or under one key of a dict."""

    def __init__(self, path: Path) -> None:
        """Load the file.

        Raises: IntegrityError for a file that is invalid or has code; RunDirectoryError for other content.
        """
        try:
            try:
                content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # the format of torch before 1.6 cannot be memory-mapped
                content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # damaged and foreign files raise any type of error
            raise unreadable(path, error) from error
        origin = str(path)
        entries = content if isinstance(content, dict) else {}
        inner = {key: value for key, value in entries.items() if _is_state_dict(value)}
        if not _is_state_dict(content):
            if len(inner) != 1:
                is_dict = isinstance(content, dict)
                has = ", ".join(map(str, list(inner or entries)[:_SHOWN])) if is_dict else type(content)
                raise RunDirectoryError(
                    given=str(path),
                    conflict=f"it has {'several state dicts' if inner else 'no state dict of tensors'}: {has}",
                    remedy="write a file of the model's state_dict() alone",
                )
            ((key, content),) = inner.items()
            origin = f"{path}, entry {key}"
        self._tensors: dict[str, Tensor] = content
        super().__init__(origin, {key: key for key in content})

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._tensors[key].shape)

    def dtype(self, key: str) -> torch.dtype:
        return self._tensors[key].dtype

    def __getitem__(self, key: str) -> Tensor:
        return self._tensors[key].detach()


def _is_state_dict(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and bool(value)
        and all(isinstance(key, str) and isinstance(item, Tensor) for key, item in value.items())
    )


def state_dict_of(path: Path) -> StoredWeights:
    """Return the weights in a file, or in a folder with model.safetensors, an index of shards, or a peft adapter.

    Raises: RunDirectoryError if there are none; IntegrityError if a file is unreadable or contains code.
    """
    if path.is_file():
        return SafetensorsWeights(str(path), [path]) if path.suffix == ".safetensors" else TorchWeights(path)
    index = path / INDEX_NAME
    if index.is_file():
        # In the cache of the Hugging Face Hub each file is a link.
        file_of = (read_json(index.resolve()) or {}).get("weight_map")
        if not isinstance(file_of, dict) or any(Path(str(name)).name != name for name in file_of.values()):
            raise IntegrityError(given=str(index), conflict="it has no weight_map of files beside it", remedy="mend it")
        weights = SafetensorsWeights(str(path), [path / name for name in sorted(set(file_of.values()))])
        if set(weights) != set(file_of):
            wrong = sorted(set(weights) ^ set(file_of))[0]
            raise IntegrityError(
                given=str(index), conflict=f"index and files differ in {wrong}", remedy="copy the folder again"
            )
        return weights
    if (path / FILE_NAME).is_file():
        return SafetensorsWeights(str(path), [path / FILE_NAME])
    if (path / ADAPTER_NAME).is_file():
        return AdapterWeights(f"the adapter {path}", [path / ADAPTER_NAME])
    raise RunDirectoryError(
        given=str(path),
        conflict=f"it has neither checkpoints of a run nor {FILE_NAME} nor {INDEX_NAME}",
        remedy="give a run, a checkpoint, a folder that save_pretrained() wrote, or a .safetensors or .pt file",
    )


def unreadable(path: Path, error: Exception) -> IntegrityError:
    """Create the error for a file that contains no readable state dict."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return IntegrityError(
        given=str(path),
        conflict=f"no state dict can be read from it: {first[:300]}",
        remedy="give a file of tensors alone: safetensors, or a state_dict() as torch saves it; code is never run",
    )
