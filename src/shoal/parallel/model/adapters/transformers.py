"""Configuration of a Transformers or peft model, stored in files that `from_pretrained` reads."""

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

# For each tensor in a peft model's file, its name in the model: peft omits its own prefixes.
ADAPTER_NAMES = "adapter_names.json"


def save_config(model: nn.Module, folder: Path, names: Iterable[str]) -> None:
    """Write config.json, and generation_config.json if the model has one. Other kinds of model write nothing.

    A peft model writes adapter_config.json, and which of the model's tensor `names` belong to the adapter. The check is
    by class name: shoal never imports transformers, and imports peft only for a peft model. Raises: OSError.
    """
    kinds = type(model).__mro__
    if any(k.__name__ == "PeftModel" and k.__module__.startswith("peft.") for k in kinds):
        peft: Any = model
        folder.mkdir(parents=True, exist_ok=True)
        name = peft.active_adapter
        adapter = copy.deepcopy(peft.peft_config[name])
        adapter.inference_mode = True
        text = json.dumps(adapter.to_dict(), indent=2, sort_keys=True, default=_json)
        write_file(folder / "adapter_config.json", text)
        stand_ins = {key: torch.empty(0) for key in names}
        key_of = {id(value): key for key, value in stand_ins.items()}
        saved = importlib.import_module("peft").get_peft_model_state_dict(
            peft, state_dict=stand_ins, adapter_name=name, save_embedding_layers=False
        )
        text = json.dumps({key: key_of[id(value)] for key, value in saved.items()}, indent=2, sort_keys=True)
        write_file(folder / ADAPTER_NAMES, text + "\n")
        return
    if not any(k.__name__ == "PreTrainedModel" and k.__module__.startswith("transformers.") for k in kinds):
        return
    folder.mkdir(parents=True, exist_ok=True)
    # A fully sharded module's class is derived by torch from the model's own.
    own = next(kind for kind in kinds if not kind.__module__.startswith("torch."))
    config: Any = copy.deepcopy(model.config)
    config.architectures = [own.__name__]
    write_file(folder / "config.json", config.to_json_string())
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None and model.can_generate():  # type: ignore[operator]
        write_file(folder / "generation_config.json", generation.to_json_string())


def _json(value: Any) -> Any:
    """Convert sets to sorted lists, enumerations to their values, anything else to text."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    return getattr(value, "value", str(value))
