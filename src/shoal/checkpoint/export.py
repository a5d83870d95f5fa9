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

    `adapter`: True if the files are only the adapter of a peft model.
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
        packed = next((n for n in names if n.endswith(".absmax") and not dtypes[n].is_floating_point), None)
        if packed is not None:
            raise RunDirectoryError(
                given=f"an export of {packed.removesuffix('.absmax')}, which bitsandbytes has quantized",
                conflict="no other program reads the packed weights and scales as the run's checkpoints have them",
                remedy="train an adapter of peft on it, and export that",
            )
        if form.dtype is not None:
            dtypes = {name: form.dtype if dtype.is_floating_point else dtype for name, dtype in dtypes.items()}
        sizes = {n: dtypes[n].itemsize * torch.Size(weights.shape(key)).numel() for n, key in names.items()}
        if adapter is not None and config is not None:
            _write_file(weights, aside / "adapter_model.safetensors", names, dtypes)
            shutil.copyfile(config / _ADAPTER, aside / _ADAPTER)
        else:  # files of at most max_shard_bytes, in which a larger tensor has its own, and their index
            shards: list[list[str]] = [[]]
            size = 0
            for key, own in sizes.items():
                if shards[-1] and size + own > form.max_shard_bytes:
                    shards.append([])
                    size = 0
                shards[-1].append(key)
                size += own
            file_of: dict[str, str] = {}
            for number, keys in enumerate(shards, 1):
                suffix = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
                _write_file(weights, aside / f"model{suffix}.safetensors", {key: key for key in keys}, dtypes)
                file_of |= dict.fromkeys(keys, f"model{suffix}.safetensors")
            if len(shards) > 1:
                document = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": file_of}
                text = json.dumps(document, indent=2, sort_keys=True) + "\n"
                (aside / "model.safetensors.index.json").write_text(text, encoding="utf-8")
        model_config = read_json(config / _CONFIGS[0]) if config is not None else None
        if config is not None and model_config is not None:
            floating = {dtype for dtype in dtypes.values() if dtype.is_floating_point}
            if len(floating) == 1:
                model_config["dtype"] = str(floating.pop()).removeprefix("torch.")
            text = json.dumps(model_config, indent=2, sort_keys=True) + "\n"
            (aside / _CONFIGS[0]).write_text(text, encoding="utf-8")
            if (config / _CONFIGS[1]).is_file():
                shutil.copyfile(config / _CONFIGS[1], aside / _CONFIGS[1])
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
    return Exported(folder, files, len(sizes), sum(sizes.values()), model_config is not None, adapter is not None)


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
