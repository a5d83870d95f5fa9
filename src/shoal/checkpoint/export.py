"""Export of a checkpoint's weights to safetensors files in the Hugging Face layout, one tensor in memory at a time."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.checkpoint.state import raw
from shoal.checkpoint.tensor_file import tensor_file_head
from shoal.checkpoint.weights import CheckpointWeights
from shoal.errors import RunDirectoryError, ShoalError, StorageError
from shoal.parallel.model.adapters.transformers import ADAPTER_NAMES
from shoal.runs.directory import read_json

_METADATA = {"format": "pt"}  # metadata that Transformers requires in a file
_ADAPTER = "adapter_config.json"
_CONFIGS = ("config.json", "generation_config.json")
# File names under which Transformers saves a tokenizer.
_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja"),
)


@dataclass(frozen=True)
class Exported:
    """Result of an export: files, number of tensors, their bytes, and whether Transformers can build the model.

    `adapter`: whether the files are only the adapter of a peft model.
    """

    folder: Path
    files: tuple[str, ...]
    num_tensors: int
    num_bytes: int
    has_config: bool
    adapter: bool = False


@dataclass(frozen=True)
class ExportFormat:
    """Format of an export: maximum bytes of a shard, and dtype of floating-point tensors (None: as trained)."""

    max_shard_bytes: int
    dtype: torch.dtype | None = None


def export(
    weights: CheckpointWeights,
    folder: Path,
    form: ExportFormat,
    config: Path | None = None,
    tokenizer: Path | None = None,
) -> Exported:
    """Write weights to a new or empty folder, atomically. Tied tensors are written once.

    For a peft model, only the adapter is written.

    Args:
        config: folder with the configuration files of a Transformers model.
        tokenizer: folder whose tokenizer files are copied.

    Raises: RunDirectoryError if the folder is not empty or the tokenizer is missing; IntegrityError if the checkpoint
    is damaged; StorageError if the folder cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunDirectoryError(
            given=f"an export to {folder}",
            conflict="it is a file" if not folder.is_dir() else "it has files, and nothing is overwritten",
            remedy="give -o a folder that is new or empty",
        )
    copied: list[Path] = []
    if tokenizer is not None:
        copied = [tokenizer / name for name in _TOKENIZER if (tokenizer / name).is_file()]
        if not copied:
            raise RunDirectoryError(
                given=f"--tokenizer {tokenizer}",
                conflict=f"it has none of {', '.join(_TOKENIZER[:2])} ...",
                remedy="give a folder that tokenizer.save_pretrained() wrote",
            )
    aside = folder.absolute().parent / f".{folder.absolute().name}-{uuid.uuid4().hex[:12]}"
    try:
        aside.mkdir(parents=True)
        adapter = read_json(config / ADAPTER_NAMES) if config is not None else None
        names = adapter if adapter is not None else {key: key for key in sorted(weights.once().values())}
        dtypes = {name: weights.dtype(key) for name, key in names.items()}
        if form.dtype is not None:
            dtypes = {name: form.dtype if dtype.is_floating_point else dtype for name, dtype in dtypes.items()}
        sizes = {n: dtypes[n].itemsize * torch.Size(weights.shape(key)).numel() for n, key in names.items()}
        if adapter is not None and config is not None:
            _write_file(weights, aside / "adapter_model.safetensors", names, dtypes)
            shutil.copyfile(config / _ADAPTER, aside / _ADAPTER)
        else:
            _write_shards(weights, aside, dtypes, sizes, form.max_shard_bytes)
        has_config = config is not None and _configure(config, aside, set(dtypes.values()))
        for file in copied:
            shutil.copyfile(file, aside / file.name)
        files = tuple(sorted(path.name for path in aside.iterdir()))
        aside.replace(folder)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, ShoalError) or not isinstance(error, OSError):
            raise
        raise StorageError(
            given=f"an export to {folder}", conflict=f"it could not be written: {error}", remedy="give another folder"
        ) from error
    return Exported(folder, files, len(sizes), sum(sizes.values()), has_config, adapter is not None)


def _write_shards(
    weights: CheckpointWeights, folder: Path, dtypes: Mapping[str, torch.dtype], sizes: Mapping[str, int], most: int
) -> None:
    """Write the model's safetensors files of at most `most` bytes; a larger tensor has its own. Add their index."""
    shards: list[list[str]] = [[]]
    size = 0
    for key, own in sizes.items():
        if shards[-1] and size + own > most:
            shards.append([])
            size = 0
        shards[-1].append(key)
        size += own
    file_of: dict[str, str] = {}
    for number, keys in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        _write_file(weights, folder / name, {key: key for key in keys}, dtypes)
        file_of |= dict.fromkeys(keys, name)
    if len(shards) > 1:
        document = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": file_of}
        text = json.dumps(document, indent=2, sort_keys=True) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _write_file(
    weights: CheckpointWeights, path: Path, names: Mapping[str, str], dtypes: Mapping[str, torch.dtype]
) -> None:
    order, header = tensor_file_head({name: (dtypes[name], weights.shape(names[name])) for name in names}, _METADATA)
    with path.open("xb") as file:
        file.write(header)
        for name in order:
            file.write(raw(weights[names[name]].to(dtypes[name])))
        file.flush()
        os.fsync(file.fileno())


def _configure(source: Path, folder: Path, dtypes: set[torch.dtype]) -> bool:
    """Copy the model configuration, updated with the weights' dtype if there is only one. Return whether it exists."""
    config = read_json(source / _CONFIGS[0])
    if config is None:
        return False
    floating = {dtype for dtype in dtypes if dtype.is_floating_point}
    if len(floating) == 1:
        config["dtype"] = str(floating.pop()).removeprefix("torch.")
    (folder / _CONFIGS[0]).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if (source / _CONFIGS[1]).is_file():
        shutil.copyfile(source / _CONFIGS[1], folder / _CONFIGS[1])
    return True
