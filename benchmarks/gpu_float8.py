"""Claim: none yet: linear layers in float8 with one scale a tensor, by hand, which a part of `scripts/gpu` times.

Repeat with `scripts/gpu --parts float8` on a machine with a GPU. shoal's own layers in float8 have scales of
rows (`--precision fp8`); the part says what scales of whole tensors would bring on a model of 1 B parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_NARROW, _OF_GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2


def narrow(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The tensor in float8, and the factor that was taken out of it: float32 []."""
    factor = tensor.abs().amax().float().clamp(min=1e-12) / torch.finfo(dtype).max
    return (tensor / factor.to(tensor.dtype)).to(dtype), factor


def product(a: Tensor, b: Tensor, factor_a: Tensor, factor_b: Tensor) -> Tensor:
    """a @ b.T of rows in float8."""
    out: Tensor = torch._scaled_mm(a, b.t(), scale_a=factor_a, scale_b=factor_b, out_dtype=torch.bfloat16)
    return out


class _Float8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:
        own, factor = narrow(input, _NARROW)
        of_weight, weight_factor = narrow(weight, _NARROW)
        ctx.save_for_backward(own, factor, of_weight, weight_factor)
        return product(own, of_weight, factor, weight_factor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        own, factor, of_weight, weight_factor = ctx.saved_tensors
        narrowed, of_gradient = narrow(gradient, _OF_GRADIENTS)
        of_input = product(narrowed, of_weight.t().contiguous(), of_gradient, weight_factor)
        of_weights = product(narrowed.t().contiguous(), own.t().contiguous(), of_gradient, factor)
        return of_input, of_weights


class Float8Linear(nn.Linear):
    """A linear layer without a bias that multiplies in float8, where autocast is on."""

    def forward(self, input: Tensor) -> Tensor:
        if not torch.is_autocast_enabled(input.device.type):
            return F.linear(input, self.weight)
        flat, weight = input.flatten(0, -2).bfloat16(), self.weight.bfloat16()
        out: Tensor = _Float8Product.apply(flat, weight)  # type: ignore[no-untyped-call]
        return out.unflatten(0, input.shape[:-1])


def with_float8(model: nn.Module) -> nn.Module:
    """The model, whose linear layers without a bias in its blocks multiply in float8; the head does not."""
    for name, module in model.named_modules():
        if type(module) is nn.Linear and module.bias is None and "layers." in name:
            module.__class__ = Float8Linear
    return model
