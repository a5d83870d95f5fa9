"""Configuration of a Transformers or peft model, kept in files that its `from_pretrained` reads."""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.runs.directory import write_file

# By the name of a tensor in a peft model's file its name in the model: peft leaves its own prefixes out.
ADAPTER_NAMES = "adapter_names.json"


def save_config(model: nn.Module, folder: Path, names: Iterable[str]) -> None:
    """Writes config.json, and generation_config.json where the model has one; nothing of any other kind of model.

    Of a peft model: adapter_config.json, and which of the model's tensor `names` are the adapter's. Duck-typed: shoal
    imports nothing of transformers, and of peft where the model is one of its own. Raises: OSError.
    """
    kinds = type(model).__mro__
    if any(k.__name__ == "PeftModel" and k.__module__.startswith("peft.") for k in kinds):
        _save_adapter_config(model, folder, names)
        return
    if not any(k.__name__ == "PreTrainedModel" and k.__module__.startswith("transformers.") for k in kinds):
        return
    folder.mkdir(parents=True, exist_ok=True)
    # Fully sharded modules are of a class that torch makes of the model's own.
    own = next(kind for kind in kinds if not kind.__module__.startswith("torch."))
    config: Any = copy.deepcopy(model.config)
    config.architectures = [own.__name__]
    write_file(folder / "config.json", config.to_json_string())
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None and model.can_generate():  # type: ignore[operator]
        write_file(folder / "generation_config.json", generation.to_json_string())


def _save_adapter_config(model: Any, folder: Path, names: Iterable[str]) -> None:
    """Of the active adapter; peft's own functions say what its files have."""
    folder.mkdir(parents=True, exist_ok=True)
    name = model.active_adapter
    config = copy.deepcopy(model.peft_config[name])
    config.inference_mode = True
    write_file(folder / "adapter_config.json", json.dumps(config.to_dict(), indent=2, sort_keys=True, default=_json))
    stand_ins = {key: torch.empty(0) for key in names}
    of = {id(value): key for key, value in stand_ins.items()}
    saved = importlib.import_module("peft").get_peft_model_state_dict(
        model, state_dict=stand_ins, adapter_name=name, save_embedding_layers=False
    )
    text = json.dumps({key: of[id(value)] for key, value in saved.items()}, indent=2, sort_keys=True)
    write_file(folder / ADAPTER_NAMES, text + "\n")


def _json(value: Any) -> Any:
    """Sets as sorted lists, enumerations as their values, anything else as text."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    return getattr(value, "value", str(value))
