"""Engine pairs: which parameters shoal's own tensor parallelism cuts, as its finder proposes before any proof."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoal.parallel.tensor.heads import is_lost
from shoal.parallel.tensor.layers import kind
from shoal.parallel.tensor.plan import Proposal, propose
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


@contextlib.contextmanager
def shortened(
    model: nn.Module | Callable[[], nn.Module], trace: OperatorTrace
) -> Iterator[tuple[nn.Module, dict[str, str]]]:
    """The outline of a model without the blocks that are like another one, {block: the one that it is like}.

    Raises: ValueError where it cannot be had.
    """
    outline = outlined(model)
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
    held: list[tuple[nn.Module, str, Any]] = []
    for name in like:
        parent, _, key = name.rpartition(".")
        holder = outline.get_submodule(parent)
        held.append((holder, key, holder._modules[key]))
        holder._modules[key] = _Pass()
    try:
        yield outline, like
    finally:
        for holder, key, module in held:
            holder._modules[key] = module


class _Pass(nn.Module):
    """In a block's place, where what comes out looks like what goes in."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))


def spread(found: CutParameters, like: dict[str, str]) -> CutParameters:
    """A division of the blocks that there are, for those that are like them too."""
    dims, gathered = dict(found.dims), set(found.gathered)
    for name, other in like.items():
        own = {key: f"{name}.{key.removeprefix(f'{other}.')}" for key in found.dims if key.startswith(f"{other}.")}
        dims |= {new: found.dims[key] for key, new in own.items()}
        gathered |= {new for key, new in own.items() if key in found.gathered}
    return CutParameters(dims, frozenset(gathered))


def as_engine(model: nn.Module, loss: Callable[[nn.Module, Any], Any], batch: Any) -> CutParameters:
    """What shoal's own tensor parallelism cuts: what is in no pair too, gathered at once if not for the loss alone.

    Raises: what the loss raises on the meta device, unless a small model that looks at numbers runs with zeros.
    """
    trace = _followed(model.train(), loss, batch)
    found = propose(model, trace, _DEGREE)
    names = {id(p): name for name, p in model.named_parameters()}
    gathered = (name for name in found.gathered if not is_lost(name, model, trace))
    weights = frozenset(names[id(model.get_submodule(name)._parameters["weight"])] for name in gathered)
    return CutParameters(_dims(model, found, found.gathered), weights)


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


def _dims(model: nn.Module, found: Proposal, columns: tuple[str, ...]) -> dict[str, int]:
    """By parameter: the dim that is cut."""
    names = {id(p): name for name, p in model.named_parameters()}
    dims: dict[str, int] = {}

    def note(module: str, weight: int, bias: int | None) -> None:
        own = model.get_submodule(module)._parameters
        for key, dim in (("weight", weight), ("bias", bias)):
            parameter = own.get(key)
            if parameter is not None and dim is not None:
                dims.setdefault(names[id(parameter)], dim)

    def outer(module: str) -> int:
        layer = model.get_submodule(module)
        return 1 if kind(layer) == "transposed" or getattr(layer, "transposed", False) else 0

    for pair in found.pairs:
        for name in pair.columns:
            note(name, outer(name), 0)
        note(pair.row, 1 - outer(pair.row), None)
    for name in found.rows:
        note(name, 0, None)
    for name in columns:
        note(name, outer(name), 0)
    return dims
