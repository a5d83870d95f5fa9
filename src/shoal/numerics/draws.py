"""Distributions from random words: torch's random functions for all rows of a forward at once.

Each handler takes the operation's own arguments. It returns None if it has no form for them. Then each grain is
computed by itself, with a generator of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
# Bits of a number in [0, 1) that the dtype represents exactly, so that no number is rounded up to 1.
_DIGITS = {torch.float64: 32, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
# Its negative replaces a dropped element in alpha dropout (Klambauer et al., arXiv 1706.02515).
_ALPHA = 1.7580993408473766


class Draws(Protocol):
    """Source of random numbers for successive random operations."""

    def words(self, rows: int, elements: int, device: torch.device) -> Tensor:
        """Return 32 random bits for each element of each row, int32 [rows, elements], for the next operation."""

    def noise(self, rows: int, shape: tuple[int, ...], p: float, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the factors of a dropout in a shape of `rows` samples, for the next operation."""


def uniform(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert random words to evenly spaced numbers in [0, 1), with the dtype's precision but at most 32 bits."""
    digits = _DIGITS[dtype]
    return ((words.long() + 2**31) >> (32 - digits)).to(dtype) * 2.0**-digits


def normal(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert an even number of random words a row to normal numbers (Box and Muller, 1958), computed in float64."""
    numbers = words.double() + (2**31 + 0.5)
    pairs = (numbers * 2.0**-32).unflatten(1, (-1, 2))
    radius, angle = (-2.0 * pairs[..., :1].log()).sqrt(), 2.0 * math.pi * pairs[..., 1:]
    return torch.cat([radius * angle.cos(), radius * angle.sin()], -1).flatten(1).to(dtype)


def exponential(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert random words to exponential numbers of mean 1, computed in float64, none of them 0."""
    return -((words.double() + (2**31 + 0.5)) * 2.0**-32).log().to(dtype)


def _filled(draws: Draws, input: Tensor, numbers: Callable[[Tensor, torch.dtype], Tensor]) -> Tensor | None:
    """Draw new numbers in the shape of `input`; return None if its dtype or shape has no form."""
    if input.dtype not in _DIGITS or input.ndim == 0 or input.numel() == 0:
        return None
    elements = input[0].numel()
    words = draws.words(len(input), elements + elements % 2, input.device)
    return numbers(words, input.dtype)[:, :elements].reshape(input.shape)


def _uniform_(draws: Draws, tensor: Tensor, begin: float = 0.0, end: float = 1.0, **named: float) -> Tensor | None:
    begin, end = named.get("from", begin), named.get("to", end)
    drawn = _filled(draws, tensor, uniform)
    return None if drawn is None else tensor.copy_(drawn.mul_(end - begin).add_(begin))


def _normal_(draws: Draws, tensor: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor | None:
    drawn = _filled(draws, tensor, normal)
    return None if drawn is None else tensor.copy_(drawn.mul_(std).add_(mean))


def _exponential_(draws: Draws, tensor: Tensor, lambd: float = 1.0) -> Tensor | None:
    drawn = _filled(draws, tensor, exponential)
    return None if drawn is None else tensor.copy_(drawn.div_(lambd))


def _bernoulli_(draws: Draws, tensor: Tensor, p: Any = 0.5) -> Tensor | None:
    if isinstance(p, Tensor) or tensor.ndim == 0 or tensor.numel() == 0:
        return None
    words = draws.words(len(tensor), tensor[0].numel(), tensor.device)
    return tensor.copy_((uniform(words, torch.float64) < p).view(tensor.shape))


def _bernoulli(draws: Draws, input: Tensor) -> Tensor | None:
    drawn = _filled(draws, input.detach(), uniform)
    return None if drawn is None else (drawn < input.detach()).to(input.dtype)


def _channels(ndim: int) -> Callable[..., Tensor | None]:
    """Return a handler for dropout of whole channels of [N, C, ...] inputs with `ndim` dims."""

    def dropout(draws: Draws, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if input.ndim != ndim or not 0.0 < p < 1.0 or not input.is_floating_point() or input.numel() == 0:
            return None
        shape = (*input.shape[:2], *[1] * (ndim - 2))
        noise = draws.noise(len(input), shape, p, input.dtype, input.device)
        return input.mul_(noise) if inplace else input * noise

    return dropout


def _alpha_dropout(draws: Draws, input: Tensor, p: float, inplace: bool, *, of_features: bool) -> Tensor | None:
    if not 0.0 < p < 1.0 or input.dtype not in _DIGITS or input.ndim < (2 if of_features else 1) or not input.numel():
        return None
    shape = (*input.shape[:2], *[1] * (input.ndim - 2)) if of_features else tuple(input.shape)
    stays = draws.noise(len(input), shape, p, input.dtype, input.device) != 0.0
    scale = 1.0 / math.sqrt((_ALPHA * _ALPHA * p + 1.0) * (1.0 - p))
    factor = stays.to(input.dtype) * scale
    shift = torch.where(stays, 0.0, -_ALPHA * scale).to(input.dtype) + _ALPHA * scale * p
    return input.mul_(factor).add_(shift) if inplace else input * factor + shift


def _alpha(draws: Draws, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor | None:
    return _alpha_dropout(draws, input, p, inplace, of_features=False)


def _feature_alpha(
    draws: Draws, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor | None:
    return _alpha_dropout(draws, input, p, inplace, of_features=True)


def _rrelu(draws: Draws, input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, *rest: Any, **named: Any) -> Any:
    slopes = _filled(draws, input.detach(), uniform)
    if slopes is None:
        return None
    factor = torch.where(input.detach() <= 0, slopes.mul_(upper - lower).add_(lower), 1.0)
    in_place = named.get("inplace", len(rest) > 1 and rest[1])
    return input.mul_(factor) if in_place else input * factor


def _attention(draws: Draws, *args: Any, **kwargs: Any) -> Tensor | None:
    """Compute scaled dot-product attention step by step, as torch does where no fused kernel drops elements."""
    given = {**dict(zip(_ATTENTION, args, strict=False)), **kwargs}
    if given.keys() - {*_ATTENTION, "scale", "enable_gqa"}:
        return None
    query, key, value = given["query"], given["key"], given["value"]
    mask, scale, p = given.get("attn_mask"), given.get("scale"), given["dropout_p"]
    others = {name: given[name] for name in (*_ATTENTION[3:], "scale", "enable_gqa") if given.get(name) is not None}
    if query.is_cuda and torch._fused_sdp_choice(query, key, value, **others) != 0:
        return None  # a fused kernel, which holds no weights of all pairs in memory
    if given.get("enable_gqa"):
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    root = math.sqrt(1.0 / math.sqrt(query.shape[-1]) if scale is None else scale)
    scores = (query * root) @ (key * root).transpose(-2, -1)
    if given.get("is_causal"):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1)
    if mask is not None:  # torch returns zeros for a query that sees no key
        weights = weights.masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)
    output: Tensor = (
        weights * draws.noise(len(weights), tuple(weights.shape), p, weights.dtype, weights.device)
    ) @ value
    return output


AT_ONCE: dict[Any, Callable[..., Tensor | None]] = {
    Tensor.uniform_: _uniform_,
    Tensor.normal_: _normal_,
    Tensor.exponential_: _exponential_,
    Tensor.bernoulli_: _bernoulli_,
    Tensor.bernoulli: _bernoulli,
    torch.bernoulli: _bernoulli,
    torch.rand_like: functools.partial(_filled, numbers=uniform),
    torch.randn_like: functools.partial(_filled, numbers=normal),
    F.dropout1d: _channels(3),
    F.dropout2d: _channels(4),
    F.dropout3d: _channels(5),
    F.alpha_dropout: _alpha,
    F.feature_alpha_dropout: _feature_alpha,
    F.rrelu: _rrelu,
    F.scaled_dot_product_attention: _attention,
}
SIZED: dict[Any, Callable[[Tensor, torch.dtype], Tensor]] = {torch.rand: uniform, torch.randn: normal}


def at_once(draws: Draws, func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """Return the result of a random operation for all rows, or None if each grain has to be computed by itself."""
    drawn = AT_ONCE.get(func)
    try:
        return None if drawn is None else drawn(draws, *args, **kwargs)
    except TypeError:  # arguments that the handler does not know, such as out= and dtype=
        return None


def of_size(draws: Draws, func: Any, size: Any, options: dict[str, Any]) -> Tensor | None:
    """Return `torch.rand` or `torch.randn` if the first size counts samples; None as in `at_once`."""
    dtype, device = options.get("dtype") or torch.get_default_dtype(), options.get("device") or "cpu"
    if func not in SIZED or options.keys() - {"dtype", "device"}:
        return None
    return _filled(draws, torch.empty(1, dtype=dtype, device=device).expand(tuple(size)), SIZED[func])
