"""Rounding error of single layers against float64, for a model too large for a whole copy in float64."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from shoal.numerics.precision import Precision

# So many layers, spread evenly over the model: each with its input and output is computed in float64 by itself.
NUM_LAYERS = 8


@dataclass
class _LayerCall:
    """The first call of a layer, and the gradient that its output got."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gradient: Tensor | None = None


class SampledLayers:
    """Context that records some layers' inputs and gradients; `rounding` then computes them again by themselves."""

    def __init__(self, model: nn.Module) -> None:
        layers = {
            name: module
            for name, module in model.named_modules()
            if not list(module.children()) and any(p.requires_grad for p in module.parameters())
        }
        every = -(-len(layers) // NUM_LAYERS)
        self._layers = dict(list(layers.items())[::every])
        self._calls: dict[nn.Module, _LayerCall] = {}

    def __enter__(self) -> SampledLayers:
        self._handles = [layer.register_forward_hook(self._note, with_kwargs=True) for layer in self._layers.values()]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _note(self, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        out = _first(output)
        if layer not in self._calls and out is not None and out.requires_grad:
            call = self._calls[layer] = _LayerCall(*tree_map(_detached, (args, kwargs)))
            out.register_hook(lambda gradient: setattr(call, "gradient", _detached(gradient)))

    def rounding(self, precision: Precision) -> dict[str, float]:
        """By layer: the largest distance of its output or a gradient from float64, relative to that; one at a time."""
        found = {}
        for name, layer in self._layers.items():
            call = self._calls.get(layer)
            if call is None or call.gradient is None:
                continue
            with torch.enable_grad():
                try:
                    wide = _computed(layer, call, None)
                except (RuntimeError, TypeError, NotImplementedError):  # not in float64
                    continue
                plain = _computed(layer, call, precision)
            found[name] = max(_relative(a, b) for a, b in zip(plain, wide, strict=True))
        return found


def _computed(layer: nn.Module, call: _LayerCall, precision: Precision | None) -> list[Tensor]:
    """Output and gradients of a copy of the layer, in float64 where there is no precision."""
    own = copy.deepcopy(layer)
    own.zero_grad(set_to_none=True)
    args, kwargs, gradient = call.args, call.kwargs, call.gradient
    assert gradient is not None
    if precision is None:
        own.double()
        args, kwargs, gradient = tree_map(_double, (args, kwargs, gradient))
        out = _first(own(*args, **kwargs))
    else:
        with precision.products(), precision.autocast():
            out = _first(own(*args, **kwargs))
    assert out is not None
    out.backward(gradient)
    gradients = [p.grad for p in own.parameters() if p.grad is not None]
    return [out.detach(), *(g.to_dense() if g.is_sparse else g for g in gradients)]


def _first(output: Any) -> Tensor | None:
    found = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    return found[0] if found else None


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _relative(value: Tensor, true: Tensor) -> float:
    size = float(true.norm())
    return float((value.double() - true).norm()) / size if size else 0.0
