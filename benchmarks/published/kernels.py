"""Operators that frameworks fuse into one kernel, as operators of torch: a trace shows one read and one write of each.

They compute what they say on any device; the planner traces them on tensors without numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn import functional


@custom_op("published::bias_gelu", mutates_args=())
def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """gelu(x + bias); x (..., features), bias (features)."""
    return functional.gelu(x + bias, approximate="tanh")


@custom_op("published::bias_gelu_backward", mutates_args=())
def bias_gelu_backward(gradient: Tensor, x: Tensor, bias: Tensor) -> Tensor:
    """The gradient of x."""
    return torch.ops.aten.gelu_backward(gradient, x + bias, approximate="tanh")  # type: ignore[no-any-return]


@custom_op("published::dropout_add", mutates_args=())
def dropout_add(x: Tensor, bias: Tensor, residual: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """(dropout(x + bias) + residual, the mask)."""
    mask = torch.rand_like(x) >= p
    return (x + bias) * mask / (1 - p) + residual, mask


@custom_op("published::dropout_add_backward", mutates_args=())
def dropout_add_backward(gradient: Tensor, mask: Tensor, p: float) -> Tensor:
    """The gradient of x; the residual's is the gradient itself."""
    return gradient * mask / (1 - p)


@custom_op("published::scores_softmax", mutates_args=())
def scores_softmax(scores: Tensor, scale: float, causal: bool) -> Tensor:
    """softmax(scale x scores) over the last dim, causally masked or not; scores (..., queries, keys)."""
    scores = scores.float() * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1)


@custom_op("published::scores_softmax_backward", mutates_args=())
def scores_softmax_backward(gradient: Tensor, output: Tensor, scale: float) -> Tensor:
    """The gradient of the scores."""
    product = gradient * output
    return scale * (product - output * product.sum(-1, keepdim=True))


@custom_op("published::swiglu", mutates_args=())
def swiglu(x: Tensor) -> Tensor:
    """silu(gate) x up, where x (..., 2 features) holds both side by side."""
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


@custom_op("published::swiglu_backward", mutates_args=())
def swiglu_backward(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient of both halves."""
    gate, up = x.chunk(2, dim=-1)
    gate_gradient = torch.ops.aten.silu_backward(gradient * up, gate)
    return torch.cat((gate_gradient, gradient * functional.silu(gate)), dim=-1)


@custom_op("published::rotate", mutates_args=())
def rotate(x: Tensor, backward: bool) -> Tensor:
    """Rotary position embedding of x (batch, heads, positions, width), or its inverse."""
    half = x.shape[-1] // 2
    places = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)
    angles = places[:, None] * 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    sine, cosine = angles.sin() * (-1 if backward else 1), angles.cos()
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cosine - b * sine, a * sine + b * cosine), dim=-1).to(x.dtype)


for operator in (bias_gelu, bias_gelu_backward, dropout_add_backward, scores_softmax, scores_softmax_backward):
    operator.register_fake(lambda x, *rest: torch.empty_like(x))
swiglu.register_fake(lambda x: x.new_empty(*x.shape[:-1], x.shape[-1] // 2))
swiglu_backward.register_fake(lambda gradient, x: torch.empty_like(x))
rotate.register_fake(lambda x, backward: torch.empty_like(x))
dropout_add.register_fake(lambda x, b, r, p: (torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)))


def _keep(*places: int) -> Any:
    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*(inputs[i] for i in places))

    return setup


def _keep_output(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)  # a mask has no gradient, not even zeros
    ctx.save_for_backward(output[1] if isinstance(output, tuple) else output)
    ctx.number = next(value for value in inputs if isinstance(value, float))


def _of_bias(gradient: Tensor) -> Tensor:
    return gradient.flatten(0, -2).sum(0)


def _bias_gelu(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    found = bias_gelu_backward(gradient, *context.saved_tensors)
    return found, _of_bias(found)


def _dropout_add(context: Any, gradient: Tensor, _mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, None]:
    found = dropout_add_backward(gradient, *context.saved_tensors, context.number)
    return found, _of_bias(found), gradient, None


bias_gelu.register_autograd(_bias_gelu, setup_context=_keep(0, 1))
dropout_add.register_autograd(_dropout_add, setup_context=_keep_output)
scores_softmax.register_autograd(
    lambda context, g: (scores_softmax_backward(g, *context.saved_tensors, context.number), None, None),
    setup_context=_keep_output,
)
swiglu.register_autograd(lambda context, g: swiglu_backward(g, *context.saved_tensors), setup_context=_keep(0))
rotate.register_autograd(lambda context, g: (rotate(g, True), None), setup_context=_keep())
