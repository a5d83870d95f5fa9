"""Configuration of a Transformers model, kept in files that its `from_pretrained` reads."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import nn

from shoal.runs.directory import write_file


def save_config(model: nn.Module, folder: Path) -> None:
    """Writes config.json, and generation_config.json where the model has one; nothing of any other kind of model.

    Duck-typed: shoal imports nothing of transformers. Raises: OSError.
    """
    kinds = type(model).__mro__
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
