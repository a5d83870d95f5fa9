"""Parameters that shoal's own tensor parallelism cuts, as its finder proposes before any proof."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from shoal.numerics.operators import tensors_in
from shoal.parallel.model.function_trace import twin
from shoal.parallel.tensor.heads import is_lost
from shoal.parallel.tensor.layers import output_dim, output_dims
from shoal.parallel.tensor.plan import propose
from shoal.parallel.tensor.trace import TensorTrace as Observed
from shoal.parallel.tensor.trace import observe
from shoal.planner.profile.division import CutParameters
from shoal.planner.profile.events import OperatorTrace

# What a proposal asks of widths and heads: the smallest degree there is.
_DEGREE = 2
# Models of no more bytes are followed with numbers where they look at them.
_REAL_BYTES = 1 << 30


def outlined(model: nn.Module | Callable[[], nn.Module]) -> nn.Module | None:
    """The model without memory; None where its constructor computes with values."""
    if isinstance(model, nn.Module):
        return model
    try:
        with torch.device("meta"):
            return model()
    except Exception:
        return None


def shortened(model: nn.Module | Callable[[], nn.Module], trace: OperatorTrace) -> tuple[nn.Module, dict[str, str]]:
    """The outline of a model without repeated equal blocks, {block: the first equal one}.

    Raises: ValueError where it cannot be had.
    """
    outline = twin(model, None) if isinstance(model, nn.Module) else outlined(model)
    if outline is None:
        raise ValueError("the model's constructor computes with values")
    like: dict[str, str] = {}
    for event in trace.events:
        region = trace.regions[event.region]
        if event.name != "stand_in" or event.is_backward or region.like is None or region.block is None:
            continue
        other = trace.regions[region.like].block
        passes = len(event.outputs) == 1 and event.inputs and event.inputs[0].shape == event.outputs[0].shape
        if passes and other is not None and other != region.block:
            like[region.block] = other
    for name in like:
        parent, _, key = name.rpartition(".")
        outline.get_submodule(parent)._modules[key] = _Pass()
    return outline, like


class _Pass(nn.Module):
    """In a block's place, where what comes out looks like what goes in."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return tensors_in((args, kwargs))[0]


def spread(found: CutParameters, like: dict[str, str]) -> CutParameters:
    """A division of the blocks that there are, for those that are like them too."""
    dims, gathered = dict(found.dims), set(found.gathered)
    for name, other in like.items():
        own = {key: f"{name}.{key.removeprefix(f'{other}.')}" for key in found.dims if key.startswith(f"{other}.")}
        dims |= {new: found.dims[key] for key, new in own.items()}
        gathered |= {new for key, new in own.items() if key in found.gathered}
    return CutParameters(dims, frozenset(gathered))


def as_engine(model: nn.Module, loss: Callable[[nn.Module, Any], Any], batch: Any) -> CutParameters:
    """Cuts of shoal's own tensor parallelism: of what is in no pair too, gathered at once if not for the loss alone.

    Raises: what the loss raises on the meta device, unless a small model that looks at numbers runs with zeros.
    """
    trace = _followed(model.train(), loss, batch)
    found = propose(model, trace, _DEGREE)
    names = {id(p): name for name, p in model.named_parameters()}
    dims: dict[str, int] = {}

    def cut(module: str, by: Mapping[str, int]) -> list[str]:
        own = model.get_submodule(module)._parameters
        cuts = {names[id(own[key])]: dim for key, dim in by.items() if own.get(key) is not None}
        dims.update({name: dim for name, dim in cuts.items() if name not in dims})
        return list(cuts)

    for candidate in (pair.candidate for pair in found.pairs):
        for name in candidate.columns:
            cut(name, output_dims(model.get_submodule(name)))
        cut(candidate.row, {"weight": 1 - output_dim(model.get_submodule(candidate.row))})
    whole = []
    for name in (*found.rows, *found.gathered):
        weight, *_ = cut(name, output_dims(model.get_submodule(name)))
        if name in found.gathered and not is_lost(name, model, trace):
            whole.append(weight)
    return CutParameters(dims, frozenset(whole))


def _followed(model: nn.Module, loss: Callable[[nn.Module, Any], Any], batch: Any) -> Observed:
    try:
        return observe(model, loss, batch)
    except Exception:
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        if sum(tensor.nbytes for tensor in tensors.values()) > _REAL_BYTES:
            raise
        with contextlib.suppress(Exception):
            return observe(model, loss, batch, lambda name: torch.zeros(tensors[name].shape))
        raise
