"""Fused kernels: functions that a device runs as one kernel, traced as one operator instead of torch's decomposition.

During a trace they replace torch's composite functions at a dispatch key that every call passes. This also covers
calls from within other torch functions, which no dispatch mode sees.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from shoal.numerics.hashed_draws import noise_of

_DEFINED = torch.library.Library("shoal_profiling", "DEF")
_DEFINED.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float dropout, bool is_causal) -> (Tensor, Tensor)"
)
_DEFINED.define(
    "attention_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor out,"
    " Tensor logsumexp, bool is_causal) -> (Tensor, Tensor, Tensor)"
)
_DEFINED.define("rms_norm(Tensor input, Tensor? weight, int width) -> (Tensor, Tensor)")
_DEFINED.define("rms_norm_backward(Tensor gradient, Tensor input, Tensor? weight, Tensor scale) -> (Tensor, Tensor)")
_HOW = "Tensor[] state, Tensor[] weights, int layers, bool both, bool batch_first"
_DEFINED.define(f"lstm(Tensor input, {_HOW}) -> (Tensor, Tensor, Tensor, Tensor)")
_DEFINED.define(
    f"lstm_backward(Tensor gradient, Tensor input, Tensor out, Tensor reserve, {_HOW}) -> (Tensor, Tensor[], Tensor[])"
)
_ops = torch.ops.shoal_profiling

# For each step and layer, the backward of an LSTM needs the four gates, the cell and its tanh.
SAVED_VECTORS = 6


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    # The layout of flash attention: merging the heads afterwards is a view.
    shape = (*query.shape[:-1], value.shape[-1])
    if query.ndim == 4 and query.stride(1) < query.stride(2):
        out = query.new_empty((shape[0], shape[2], shape[1], shape[3])).transpose(1, 2)
    else:
        out = query.new_empty(shape)
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


def _attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _rms_norm(input: Tensor, weight: Tensor | None, width: int) -> tuple[Tensor, Tensor]:
    dtype = input.dtype if weight is None else torch.promote_types(input.dtype, weight.dtype)
    return torch.empty_like(input, dtype=dtype), input.new_empty((input.numel() // width,), dtype=torch.float32)


def _rms_norm_backward(gradient: Tensor, input: Tensor, weight: Tensor | None, scale: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(input), torch.empty_like(scale if weight is None else weight)


def _lstm(
    input: Tensor, state: list[Tensor], weights: list[Tensor], layers: int, both: bool, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden = state[0].shape[-1]
    ways = layers * (1 + both)
    steps = input.numel() // input.shape[-1]
    out = input.new_empty((*input.shape[:-1], hidden * (1 + both)))
    reserve = input.new_empty((ways * steps * hidden * SAVED_VECTORS,))
    return out, torch.empty_like(state[0]), torch.empty_like(state[1]), reserve


def _lstm_backward(
    gradient: Tensor, input: Tensor, out: Tensor, reserve: Tensor, state: list[Tensor], *rest: Any
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    return torch.empty_like(input), [torch.empty_like(s) for s in state], [torch.empty_like(w) for w in rest[0]]


_SHAPES: dict[str, Callable[..., Any]] = {
    "attention": _attention,
    "attention_backward": _attention_backward,
    "rms_norm": _rms_norm,
    "rms_norm_backward": _rms_norm_backward,
    "lstm": _lstm,
    "lstm_backward": _lstm_backward,
}
for _name, _shapes in _SHAPES.items():
    torch.library.register_fake(f"shoal_profiling::{_name}", _shapes, lib=_DEFINED)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        query, key, value, mask, dropout, is_causal = arguments
        out, logsumexp = _ops.attention(query, key, value, mask, dropout, is_causal)
        ctx.save_for_backward(query, key, value, mask, out, logsumexp)
        ctx.is_causal = is_causal
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        saved = ctx.saved_tensors  # read once: checkpoint allows one access
        of_inputs, mask = _ops.attention_backward(gradients[0], *saved, ctx.is_causal), saved[3]
        of_mask = torch.empty_like(mask) if mask is not None and ctx.needs_input_grad[3] else None
        return (*of_inputs, of_mask, None, None)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        input, weight, width = arguments
        out, scale = _ops.rms_norm(input, weight, width)
        ctx.save_for_backward(input, weight, scale)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        input, weight, scale = ctx.saved_tensors
        of_input, of_weight = _ops.rms_norm_backward(gradients[0], input, weight, scale)
        return of_input, of_weight if weight is not None else None, None


class _LSTM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        layers, both, batch_first, input, h, c, *weights = arguments
        out, last_h, last_c, reserve = _ops.lstm(input, [h, c], weights, layers, both, batch_first)
        ctx.how = layers, both, batch_first
        ctx.save_for_backward(input, out, reserve, h, c, *weights)
        return out, last_h, last_c

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        input, out, reserve, h, c, *weights = ctx.saved_tensors
        of_input, of_state, of_weights = _ops.lstm_backward(
            gradients[0], input, out, reserve, [h, c], weights, *ctx.how
        )
        return None, None, None, of_input, *of_state, *of_weights


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **options: Any
) -> Tensor:
    """Return attention as one fused operator, without repeating keys and values that have fewer heads.

    `rest`: the dropout probability and whether the attention is causal.
    """
    dropout, is_causal = [*rest, *(0.0, False)[len(rest) :]][:2]
    dropout, is_causal = options.get("dropout_p", dropout), options.get("is_causal", is_causal)
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (t.to(dtype) if t.is_floating_point() else t for t in (query, key, value))
    return _Attention.apply(query, key, value, attn_mask, dropout, is_causal)  # type: ignore[no-any-return,no-untyped-call]


def lstm(input: Tensor, state: Any, weights: Any, *options: Any) -> Any:
    """Replace `torch.lstm` for padded sequences.

    `options`: biases, layers, dropout, training, bidirectional, batch first.
    """
    _, layers, _, _, both, batch_first = options  # dropout is part of the kernel and saves only bits
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else input.dtype
    tensors = [t.to(dtype) for t in (input, *state, *weights)]
    return _LSTM.apply(layers, both, batch_first, *tensors)  # type: ignore[no-untyped-call]


def rms_norm(input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: Any = None) -> Tensor:
    """Return RMS norm as one kernel in the forward and one in the backward, as on GPUs."""
    return _RMSNorm.apply(input, weight, math.prod(normalized_shape))  # type: ignore[no-any-return,no-untyped-call]


def dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """Return dropout as one kernel that saves a boolean mask, as on GPUs."""
    if not train or p == 0.0:
        return input
    return torch.ops.aten.native_dropout(input, p, True)[0]  # type: ignore[no-any-return]


def dropout_by_grain(input: Tensor, p: float, train: bool) -> Tensor:
    """Return the dropout of `GrainScope`: it hashes and scales a mask in the input's dtype, then multiplies."""
    if not train or p == 0.0:
        return input
    with torch.no_grad():
        keys = torch.empty(2, len(input), dtype=torch.int32)
        columns = torch.empty(math.prod(input.shape[1:]), dtype=torch.int32)
        noise = noise_of(input.shape, p, input.dtype, keys, columns)
    return input * noise


# Operators that autocast computes in float32 on CUDA but not on the CPU: docs.pytorch.org/docs/stable/amp.html.
_WIDENED = """
    layer_norm group_norm softmax.int log_softmax.int nll_loss exp expm1 log log10 log1p log2 reciprocal rsqrt
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar prod cumsum cumprod softplus sum sum.dim_IntList mse_loss l1_loss
    smooth_l1_loss huber_loss kl_div binary_cross_entropy_with_logits norm.Scalar norm.ScalarOpt_dim
    cosine_similarity
""".split()  # noqa: SIM905
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def _widened(operator: Any) -> Callable[..., Any]:
    """Return the operator on tensors that are cast to float32."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            narrow = torch.bfloat16, torch.float16
            wide = [a.float() if isinstance(a, Tensor) and a.dtype in narrow else a for a in args]
            return operator(*wide, **kwargs)

    return call


@contextlib.contextmanager
def as_on(device: str, by_grain: bool) -> Iterator[None]:
    """Compute with fake CPU tensors as a `device` of this type would, within the context.

    The context changes CPU operators for the whole process, so nothing else may run meanwhile.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("scaled_dot_product_attention", scaled_dot_product_attention, "AutogradCPU")
        if by_grain or device != "cpu":
            library.impl("dropout", dropout_by_grain if by_grain else dropout, "AutogradCPU")
        if device != "cpu":
            library.impl("rms_norm", rms_norm, "AutogradCPU")
            library.impl("lstm.input", lstm, "AutogradCPU")
            for name in _WIDENED:
                base, _, overload = name.partition(".")
                if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU"):
                    operator = getattr(getattr(torch.ops.aten, base), overload or "default")
                    library.impl(name, _widened(operator), "AutocastCPU")
        yield
    finally:
        library._destroy()
