"""Kernels that training frameworks fuse by hand, as operators of one launch each with the operands that theirs have.

They have shapes only: what they compute is known, what matters here is what they read, write and keep.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_DEFINED = torch.library.Library("published", "DEF")
_ops = torch.ops.published


def _define(schema: str, like: Any) -> None:
    _DEFINED.define(schema)
    torch.library.register_fake(f"published::{schema.partition('(')[0]}", like, lib=_DEFINED)


_define("bias_gelu(Tensor x, Tensor bias) -> Tensor", lambda x, bias: torch.empty_like(x))
_define("bias_gelu_backward(Tensor gradient, Tensor x, Tensor bias) -> Tensor", lambda g, x, bias: torch.empty_like(x))
_define("swiglu(Tensor gate, Tensor up) -> Tensor", lambda gate, up: torch.empty_like(up))
_define(
    "swiglu_backward(Tensor gradient, Tensor gate, Tensor up) -> (Tensor, Tensor)",
    lambda g, gate, up: (torch.empty_like(gate), torch.empty_like(up)),
)
_define(
    "dropout_add(Tensor x, Tensor? bias, Tensor residual, float p) -> (Tensor, Tensor)",
    lambda x, bias, residual, p: (torch.empty_like(residual), torch.empty_like(x, dtype=torch.bool)),
)
_define(
    "dropout_add_backward(Tensor gradient, Tensor mask, ScalarType dtype) -> Tensor",
    lambda g, mask, dtype: torch.empty_like(g, dtype=dtype),
)
_define("masked_softmax(Tensor scores) -> Tensor", torch.empty_like)
_define("masked_softmax_backward(Tensor gradient, Tensor out) -> Tensor", lambda g, out: torch.empty_like(out))
_define("rotate(Tensor x, Tensor angles) -> Tensor", lambda x, angles: torch.empty_like(x))
_define(
    "cross_entropy(Tensor logits, Tensor targets) -> (Tensor, Tensor)",
    lambda logits, targets: (
        logits.new_empty(targets.shape, dtype=torch.float32),
        logits.new_empty(targets.shape, dtype=torch.float32),
    ),
)
# In place of the logits, which nobody needs any more.
_define(
    "cross_entropy_backward(Tensor gradient, Tensor(a!) logits, Tensor logsumexp, Tensor targets) -> ()",
    lambda gradient, logits, logsumexp, targets: None,
)


class BiasGelu(torch.autograd.Function):
    """gelu(x + bias)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, bias)
        return _ops.bias_gelu(x, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        of_x = _ops.bias_gelu_backward(gradient, *ctx.saved_tensors)
        return of_x, of_x.flatten(0, -2).sum(0)


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _ops.swiglu(gate, up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _ops.swiglu_backward(gradient, *ctx.saved_tensors)


class DropoutAdd(torch.autograd.Function):
    """residual + dropout(x + bias)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, residual: Tensor, p: float) -> Tensor:
        out, mask = _ops.dropout_add(x, bias, residual, p)
        ctx.save_for_backward(mask if p else None)
        ctx.dtype, ctx.biased = x.dtype, bias is not None
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        of_x = gradient.to(ctx.dtype) if mask is None else _ops.dropout_add_backward(gradient, mask, ctx.dtype)
        return of_x, of_x.flatten(0, -2).sum(0) if ctx.biased else None, gradient, None


class MaskedSoftmax(torch.autograd.Function):
    """softmax(scale * scores + mask) over the last dim."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        out = _ops.masked_softmax(scores)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _ops.masked_softmax_backward(gradient, *ctx.saved_tensors)


class Rotate(torch.autograd.Function):
    """Rotary positions of [B, T, heads, width] by angles [T, width]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, angles: Tensor) -> Tensor:
        ctx.save_for_backward(angles)
        return _ops.rotate(x, angles)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _ops.rotate(gradient, *ctx.saved_tensors), None


class CrossEntropy(torch.autograd.Function):
    """The loss of each row of logits [N, V]; keeps them as they are, and turns them into their gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        loss, logsumexp = _ops.cross_entropy(logits, targets)
        ctx.save_for_backward(logits, logsumexp, targets)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        logits, logsumexp, targets = ctx.saved_tensors
        _ops.cross_entropy_backward(gradient, logits, logsumexp, targets)
        return logits, None
