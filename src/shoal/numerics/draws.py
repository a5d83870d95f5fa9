"""Random numbers for the rows of several grains, from one generator per grain or by position in one shared stream.

Drawing by position takes a few operators for all grains of a forward, so jobs with many grains use it. Each random
operation draws from one stream of 64-bit words, keyed by (seed, step, operation). A sample's words are at the sample's
position in the global batch, whichever grains share the forward. The stream is PCG64DXSM (O'Neill, PCG, 2014; numpy's
next default). It jumps to any position in constant time, and numpy keeps its bits from version to version. Only CPU
tensors are drawn by position: decision 0029.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
# Bits of a number in [0, 1) that the dtype represents exactly, so that no number is rounded up to 1.
_DIGITS = {torch.float64: 32, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


class Draws(Protocol):
    """Source of random words for successive random operations."""

    def words(self, rows: int, elements: int) -> Tensor:
        """Return 32 random bits for each element of each row, int32 [rows, elements], for the next operation."""


def words_at(key: int, start: int, rows: int, elements: int) -> Tensor:
    """Return 32 random bits for each element of `rows` samples from position `start` on, int32 [rows, elements]."""
    per_row = (elements + 1) // 2  # two elements per word; half of a row's last word may stay unused
    source = np.random.PCG64DXSM(key)
    source.advance(start * per_row)
    drawn = torch.from_numpy(source.random_raw(rows * per_row).view(np.int32))
    return drawn.view(rows, 2 * per_row)[:, :elements]


def fill_kept(noise: Tensor, parts: list[Tensor], keep: float, generators: list[torch.Generator]) -> None:
    """Fill `noise` at random with ones, with probability `keep`, and zeros.

    `parts` are views of the rows of `noise`; each part draws from its own generator. On the CPU an element takes 32
    random bits, two elements per word. `bernoulli_` makes a 64-bit double for each element there and takes more than
    twice as long, 5 % of a GPT's step. All other work runs once for all parts.
    """
    if not noise.is_cpu:
        for rows, generator in zip(parts, generators, strict=True):
            rows.bernoulli_(keep, generator=generator)
        return
    counts = [(rows.numel() + 1) // 2 for rows in parts]
    words = torch.empty(sum(counts), dtype=torch.int64)
    drawn = words.split(counts)
    for own, generator in zip(drawn, generators, strict=True):
        own.random_(-(2**63), None, generator=generator)
    bits = words.view(torch.int32)
    if bits.numel() != noise.numel():  # half of a part's last word stays unused
        bits = torch.cat([own.view(torch.int32)[: rows.numel()] for own, rows in zip(drawn, parts, strict=True)])
    noise.copy_(keep_mask(bits, keep).view_as(noise))


def under(generator: torch.Generator, call: Callable[[], Any]) -> Any:
    """Run `call` with the device's global generator in the state of `generator`, then restore the global generator."""
    device = generator.device
    own = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index or 0]
    before = own.get_state()
    own.set_state(generator.get_state())
    try:
        return call()
    finally:
        own.set_state(before)


def keep_mask(words: Tensor, keep: float) -> Tensor:
    """Convert random words to booleans, True with probability `keep`."""
    return words < min(round(keep * 2**32) - 2**31, 2**31 - 1)


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


def _filled(draws: Draws, input: Tensor, numbers: Callable[[Tensor, torch.dtype], Tensor]) -> Tensor | None:
    """Draw new numbers in the shape of `input`; return None if they cannot be drawn by position."""
    if input.dtype not in _DIGITS or input.ndim == 0 or input.numel() == 0:
        return None
    elements = input[0].numel()
    words = draws.words(len(input), elements + elements % 2)
    return numbers(words, input.dtype)[:, :elements].reshape(input.shape)


def _uniform_(draws: Draws, tensor: Tensor, begin: float = 0.0, end: float = 1.0, **named: float) -> Tensor | None:
    begin, end = named.get("from", begin), named.get("to", end)
    drawn = _filled(draws, tensor, uniform)
    return None if drawn is None else tensor.copy_(drawn.mul_(end - begin).add_(begin))


def _normal_(draws: Draws, tensor: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor | None:
    drawn = _filled(draws, tensor, normal)
    return None if drawn is None else tensor.copy_(drawn.mul_(std).add_(mean))


def _bernoulli_(draws: Draws, tensor: Tensor, p: Any = 0.5) -> Tensor | None:
    if isinstance(p, Tensor) or tensor.ndim == 0 or tensor.numel() == 0:
        return None
    return tensor.copy_(keep_mask(draws.words(len(tensor), tensor[0].numel()), p).view(tensor.shape))


def _bernoulli(draws: Draws, input: Tensor) -> Tensor | None:
    drawn = _filled(draws, input.detach(), uniform)
    return None if drawn is None else (drawn < input.detach()).to(input.dtype)


def _channels(ndim: int) -> Callable[..., Tensor | None]:
    """Return a handler for dropout of whole channels of [N, C, ...] inputs with `ndim` dims."""

    def dropout(draws: Draws, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if input.ndim != ndim or not 0.0 < p < 1.0 or inplace or not input.is_floating_point():
            return None
        mask = keep_mask(draws.words(*input.shape[:2]), 1.0 - p).view(*input.shape[:2], *[1] * (ndim - 2))
        return input * mask.to(input.dtype).div_(1.0 - p)

    return dropout


def _attention(draws: Draws, *args: Any, **kwargs: Any) -> Tensor | None:
    """Compute scaled dot-product attention step by step, as torch does on CPUs with dropout."""
    given = {**dict(zip(_ATTENTION, args, strict=False)), **kwargs}
    if given.keys() - {*_ATTENTION, "scale", "enable_gqa"}:
        return None
    query, key, value = given["query"], given["key"], given["value"]
    mask, scale, keep = given.get("attn_mask"), given.get("scale"), 1.0 - given["dropout_p"]
    if given.get("enable_gqa"):
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    root = math.sqrt(1.0 / math.sqrt(query.shape[-1]) if scale is None else scale)
    scores = (query * root) @ (key * root).transpose(-2, -1)
    if given.get("is_causal"):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1)
    if mask is not None:  # torch returns zeros for a query that sees no key
        weights = weights.masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)
    noise = keep_mask(draws.words(len(weights), weights[0].numel()), keep).view(weights.shape).to(weights.dtype)
    output: Tensor = (weights * noise.div_(keep)) @ value
    return output


# Handlers take the operation's own arguments. None: nothing was drawn, and each grain is computed by itself.
AT_ONCE: dict[Any, Callable[..., Tensor | None]] = {
    Tensor.uniform_: _uniform_,
    Tensor.normal_: _normal_,
    Tensor.bernoulli_: _bernoulli_,
    Tensor.bernoulli: _bernoulli,
    torch.bernoulli: _bernoulli,
    torch.rand_like: functools.partial(_filled, numbers=uniform),
    torch.randn_like: functools.partial(_filled, numbers=normal),
    F.dropout1d: _channels(3),
    F.dropout2d: _channels(4),
    F.dropout3d: _channels(5),
    F.scaled_dot_product_attention: _attention,
}
SIZED: dict[Any, Callable[[Tensor, torch.dtype], Tensor]] = {torch.rand: uniform, torch.randn: normal}


def at_once(draws: Draws, func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """Return the result of a random operation for all rows, or None if each grain has to be computed by itself."""
    drawn = AT_ONCE.get(func)
    if drawn is None or any(isinstance(a, Tensor) and not a.is_cpu for a in (*args, *kwargs.values())):
        return None
    try:
        return drawn(draws, *args, **kwargs)
    except TypeError:  # arguments that the handler does not know, such as out= and dtype=
        return None


def of_size(draws: Draws, func: Any, size: Any, options: dict[str, Any]) -> Tensor | None:
    """Return `torch.rand` or `torch.randn` if the first size counts samples; None as in `at_once`."""
    dtype = options.get("dtype") or torch.get_default_dtype()
    if (
        func not in SIZED
        or options.keys() - {"dtype", "device"}
        or torch.device(options.get("device") or "cpu").type != "cpu"
    ):
        return None
    return _filled(draws, torch.empty(1, dtype=dtype).expand(tuple(size)), SIZED[func])
