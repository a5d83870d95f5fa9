"""A model in the precision of its plan, and which of its linear layers multiply in float8."""

from __future__ import annotations

import torch
from torch import nn

from shoal.errors import JobError
from shoal.numerics.float8 import BLOCK, Float8, make_float8
from shoal.numerics.precision import Precision
from shoal.parallel.model.structure import repeated_blocks

# Smaller layers take longer to round than a narrower product saves.
_SMALLEST = 128
_MULTIPLE = 16
_ROUTERS = ("gate", "router")


def in_precision(model: nn.Module, precision: Precision) -> nn.Module:
    """Convert a whole model in place, before any axis divides it, and return it.

    With `precision.products` in float8, linear layers of repeated blocks multiply in it. The head, embeddings, norms,
    routers of experts, stacked experts and small layers stay in the dtype of the compute.
    Raises: JobError as `Precision.apply`, or if no layer would multiply in float8.
    """
    precision.apply(model)
    if precision.linear == "same":
        return model
    blocks = precision.linear == "float8_blocks"
    layers = float8_layers(model, BLOCK if blocks else _MULTIPLE)
    if not layers:
        sizes = f"multiples of {BLOCK}" if blocks else f"at least {_SMALLEST}, in multiples of {_MULTIPLE}"
        raise JobError(
            given=f'precision.products = "{precision.linear}" for a model without a layer that could use it',
            conflict=f"float8 is for linear layers of repeated blocks, with input and output features of {sizes}",
            remedy='precision.products = "same" (--precision bf16), or wider layers',
        )
    for layer in layers:
        make_float8(layer, Float8(blocks, always=precision.compute == torch.float64))
    return model


def float8_layers(model: nn.Module, multiple: int) -> list[nn.Linear]:
    """Return the linear layers of a whole model that may multiply in float8."""
    return [
        layer
        for block in repeated_blocks(model)
        for parent in block.module.modules()
        for name, layer in parent.named_children()
        if type(layer) is nn.Linear
        and not (name in _ROUTERS and hasattr(parent, "experts"))
        and all(size >= _SMALLEST and size % multiple == 0 for size in (layer.in_features, layer.out_features))
    ]
