"""Adapters of other packages' models to torch modules that the engine trains."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from shoal.errors import JobError


def adapted(model: Any) -> Any:
    """Return the model as a plain torch module. Keras models and layers of bitsandbytes are adapted in place.

    Raises: JobError for a Keras model of another backend, or one without weights yet; as `quantized.replace_layers`.
    """
    if isinstance(model, nn.Module) and "bitsandbytes" in sys.modules:
        from shoal.parallel.model.adapters.quantized import replace_layers

        replace_layers(model)
    if not any(base.__module__.startswith("keras.src.") for base in type(model).__mro__):
        return model
    if not isinstance(model, nn.Module):
        raise JobError(
            given=f"model() returned a Keras {type(model).__name__} whose backend is not torch",
            conflict="the engine trains torch modules, and Keras chooses its backend when it is imported",
            remedy='write os.environ["KERAS_BACKEND"] = "torch" before the first import of keras',
        )
    from shoal.parallel.model.adapters.keras import adapt

    return adapt(model)
