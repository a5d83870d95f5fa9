"""Numerical equivalence tests: a module in float64 on random numbers, computed in two ways."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.parallel.model.function_trace import DROPOUTS

# In float64 both results agree to about 1e-13, and if the user's code goes through float32 to about 1e-6. A wrong cut
# changes the first digits.
TOLERANCE = 1e-4
# A gradient that is zero but for rounding (of a bias before a softmax) is compared on the scale of the largest
# gradient.
_FLOOR = 1e-2
# Initial values are often zeros and ones, which would hide an error.
_NOISE = 0.05
SEED = 20205198

Values = Callable[[str], Tensor]


@dataclass(frozen=True)
class ModelTrial:
    """Whole model (possibly on the meta device) with its loss, a small batch, and the initial values by name."""

    model: nn.Module
    loss: Callable[[nn.Module, Any], Any]
    batch: Any
    values: Values


def materialised(
    model: nn.Module,
    owner: str,
    values: Values | None,
    generator: torch.Generator,
    given: Mapping[int, nn.Parameter] | None = None,
) -> nn.Module:
    """Return a copy of one module of the model in float64, with the model's values and some noise, or random values.

    `given`: other parameters to use instead of the module's own, by the ids of the module's own.
    """
    module = model.get_submodule(owner)
    named = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
    memo: dict[int, Any] = dict(given or {})
    for parameter in module.parameters():
        if id(parameter) in memo:
            continue
        noise = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
        if values is None:
            memo[id(parameter)] = nn.Parameter(noise)
            continue
        value = values(named[id(parameter)]).detach().to("cpu", torch.float64)
        scale = _NOISE + float(value.std()) * _NOISE if value.numel() > 1 else _NOISE
        memo[id(parameter)] = nn.Parameter(value + scale * noise)
    for buffer in module.buffers():
        if values is None and buffer.is_floating_point():
            memo[id(buffer)] = torch.randn(buffer.shape, dtype=torch.float64, generator=generator)
            continue
        if values is None:  # zeros, which are valid as index and count
            memo[id(buffer)] = torch.full(buffer.shape, buffer.dtype == torch.bool, dtype=buffer.dtype)
            continue
        value = values(named[id(buffer)]).detach().to("cpu")
        memo[id(buffer)] = value.double() if value.is_floating_point() else value.clone()
    return copy.deepcopy(module, memo)


class WithoutDropout(TorchFunctionMode):
    """Context without dropout. `inside_attention`: also without dropout of fused attention's weights."""

    def __init__(self, *, inside_attention: bool = False) -> None:
        super().__init__()
        self._inside_attention = inside_attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention and self._inside_attention:
            args, kwargs = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args, {**kwargs}
            kwargs.pop("dropout_p", None)
        return func(*args, **kwargs)


def gradients(outputs: Sequence[Tensor], leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients, by the leaves' names, of a random weighted sum of the outputs; zeros for unused leaves."""
    generator = torch.Generator().manual_seed(SEED)
    total: Any = 0.0
    for output in outputs:
        total = total + (output * torch.randn(output.shape, dtype=torch.float64, generator=generator).to(output)).sum()
    results = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    pairs = zip(leaves.items(), results, strict=True)
    return {name: torch.zeros_like(leaf) if g is None else g.contiguous() for (name, leaf), g in pairs}


def floor_of(values: Iterable[Tensor]) -> float:
    """Return the norm below which gradients are compared on this scale."""
    return _FLOOR * max(float(gradient.norm()) for gradient in values)


def is_same(value: Tensor, wanted: Tensor, floor: float = 0.0) -> bool:
    """Return True if two tensors agree but for rounding. Values smaller than `floor` are compared on that scale."""
    if value.shape != wanted.shape:
        return False
    if not value.is_floating_point():
        return bool(torch.equal(value, wanted))
    distance, size = float((value.double() - wanted.double()).norm()), float(wanted.double().norm())
    return math.isfinite(distance) and distance <= TOLERANCE * max(size, floor)
