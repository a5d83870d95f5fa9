"""Parameters that shoal's tensor parallelism cuts, decided as in a run except for the numeric proofs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.numerics.operators import replace_leaves, tensors_in
from shoal.parallel.model.value_free import construction, twin
from shoal.parallel.tensor.heads import is_lost
from shoal.parallel.tensor.layers import output_dim, output_dims
from shoal.parallel.tensor.plan import decide, follow
from shoal.planner.profile.division import CutParameters
from shoal.planner.profile.events import OperatorTrace

# Widths and heads need to be divisible only by the smallest possible degree.
_DEGREE = 2
# Models up to this size are run with real numbers if their code reads tensor values.
_REAL_BYTES = 1 << 30


def outlined(model: nn.Module | Callable[[], nn.Module]) -> nn.Module | None:
    """Return the model on the meta device, or None if its constructor reads tensor values."""
    if isinstance(model, nn.Module):
        return model
    try:
        with construction():
            return model()
    except Exception:
        return None


def shortened(model: nn.Module | Callable[[], nn.Module], trace: OperatorTrace) -> tuple[nn.Module, dict[str, str]]:
    """Return the model on the meta device without repeated equal blocks, and {removed block: the first equal one}.

    Raises: ValueError if the model's constructor reads tensor values.
    """
    outline = twin(model, lambda _, t: t.detach().to("meta")) if isinstance(model, nn.Module) else outlined(model)
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
    for name, other in like.items():
        parent, _, key = name.rpartition(".")
        outline.get_submodule(parent)._modules[key] = _Pass(outline.get_submodule(other))
    return outline, like


class _Pass(nn.Module):
    """Replacement of a shape-preserving block: returns its input in the structure of `like`'s output."""

    def __init__(self, like: nn.Module) -> None:
        super().__init__()
        self._output: list[Any] = []  # a list, so that copies of both modules still share it
        like.register_forward_hook(_OutputOf(self._output))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = tensors_in((args, kwargs))[0]
        return replace_leaves(self._output[-1], Tensor, lambda _: given)


class _OutputOf:
    """Forward hook that stores a module's last output."""

    def __init__(self, output: list[Any]) -> None:
        self._output = output

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._output[:] = [output]


def spread(found: CutParameters, like: dict[str, str]) -> CutParameters:
    """Extend a division to the blocks that equal the divided ones."""
    dims, gathered = dict(found.dims), set(found.gathered)
    for name, other in like.items():
        own = {key: f"{name}.{key.removeprefix(f'{other}.')}" for key in found.dims if key.startswith(f"{other}.")}
        dims |= {new: found.dims[key] for key, new in own.items()}
        gathered |= {new for key, new in own.items() if key in found.gathered}
    return CutParameters(dims, frozenset(gathered))


def as_engine(model: nn.Module, loss: Callable[[nn.Module, Any], Any], batch: Any) -> CutParameters:
    """Return the parameters that shoal's tensor parallelism cuts, including layers outside of pairs.

    Layers outside of pairs gather their outputs at once, unless only the loss reads them.
    Raises: PlanError if nothing is cut, or if the loss of a large model reads tensor values; small ones run on zeros.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    trace = follow(
        model.train(), loss, batch, lambda name: torch.zeros(tensors[name].shape), _DEGREE, most_bytes=_REAL_BYTES
    )
    found = decide(model, trace, None, _DEGREE)
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
