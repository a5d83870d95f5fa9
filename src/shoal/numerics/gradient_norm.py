"""Euclidean norm of all gradients, accurate to 1e-6 and identical on every layout that keeps parameters whole.

torch's own float32 norm adds one square after the other and loses accuracy: 3e-5 at 2.4 M elements, 3e-3 at 39 M.
Adding in float64 takes four times as long. Here a gradient is reduced to the norms of short rows in float32, and only
these norms are added in float64. That takes as long as torch's norm: benchmarks/gradient_norm.py.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shoal.numerics import device_reads
from shoal.numerics.operators import as_real

# A float32 sum of 256 squares in eight lanes is off by about 36 u at most, and a norm by 18 u, which is 1e-6.
# The worst measured error is 2.1e-7, for constants, which all round the same way. Random numbers stay below 1e-8.
_ROW = 256
# Up to this size, a copy to float64 is faster than another kernel.
_SMALL = 4096
# Squares of numbers near the ends of float32's range leave the range. Elements below 1e-19 lose bits; 10^9 of them add
# less than 1e-9 to the square of a norm above this bound.
_LEAST = 1e-10
# On a GPU one kernel adds the squares of all of them in float64, in which float32's squares stay in range.
_FOR_MANY = {(torch.float32, True)}
_device, _layout = operator.attrgetter("device"), operator.attrgetter("layout")
# Float64 sums in different orders agree in these bits of the norm, unless it lies within 1e-15 of a tie.
_BITS, _WIDE_BITS = 24, 40


def global_norm(gradients: Sequence[Tensor]) -> float:
    """Return the Euclidean norm over all gradients: dense or sparse, real or complex, of any floating dtypes."""
    norm = norm_tensor(gradients)
    return settled(gradients, float(norm) if norm is not None else 0.0)


def settled(gradients: Sequence[Tensor], norm: float) -> float:
    """Return the norm over all gradients from the value of `norm_tensor`; recompute it if squares left the range."""
    if _LEAST < norm < math.inf:
        return norm
    # Squares may have left the range: divide the gradients by their largest absolute value.
    dense = [_dense(g) if g.layout is not torch.strided else g for g in gradients]
    largest = max((float(g.abs().max()) for g in dense if g.numel()), default=0.0)
    if math.isnan(norm) or not math.isfinite(largest) or not largest:
        return norm if not math.isfinite(norm) else largest
    wide = (g.to(torch.promote_types(g.dtype, torch.float64)) / largest for g in dense)
    return largest * math.hypot(*(float(norm_tensor([g])) for g in wide))  # type: ignore[arg-type]


def is_settled(norm: Tensor) -> Tensor:
    """Check on the device, bool [], whether `settled` and `rounded` would return `rounded_tensor(norm)`."""
    return (norm > _LEAST) & torch.isfinite(rounded_tensor(norm))


def rounded_tensor(norm: Tensor) -> Tensor:
    """Round a norm, float64 [], to float32's 24 bits, as `rounded` does for models without float64.

    The result is infinite beyond float32's range.
    """
    return norm.float().double()


def rounded(norm: float, dtypes: Iterable[torch.dtype]) -> float:
    """Round `norm` to the bits that no order of float64 sums changes; `dtypes` are those of the model's parameters."""
    if not math.isfinite(norm):
        return norm
    bits = _WIDE_BITS if {torch.float64, torch.complex128} & set(dtypes) else _BITS
    mantissa, exponent = math.frexp(norm)
    return math.ldexp(round(math.ldexp(mantissa, bits)), exponent - bits)


def norm_tensor(gradients: Sequence[Tensor]) -> Tensor | None:
    """Return the norm, float64 [] on the gradients' device, as far as squares stay in range; None without gradients."""
    if not gradients:
        return None
    if set(map(_layout, gradients)) != {torch.strided}:
        gradients = [gradient if gradient.layout is torch.strided else _dense(gradient) for gradient in gradients]
    if _is_for_one_kernel(gradients):
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norm_parts(gradients)))
        return norm
    large, small = _by_size(tuple(map(Tensor.numel, gradients)))
    pieces: list[Tensor] = []  # few elements, with the same norm as the gradients
    for place in large:
        pieces += _rows(gradients[place])
    pieces += [gradients[place] for place in small]
    if len(set(map(_device, pieces))) > 1:
        pieces = [piece.cpu() for piece in pieces]
    # One call: a view of each piece would take four times as long.
    flat = torch._C._nn.flatten_dense_tensors(pieces)
    norm = torch.linalg.vector_norm(as_real(flat).flatten() if flat.is_complex() else flat, dtype=torch.float64)
    return norm


def norm_parts(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return numbers, float64 [], with the same norm as the gradients: on a GPU the norm of each one."""
    if gradients and _is_for_one_kernel(gradients):
        return list(torch._foreach_norm(list(gradients), dtype=torch.float64))
    norm = norm_tensor(gradients)
    return [] if norm is None else [norm]


def _is_for_one_kernel(gradients: Sequence[Tensor]) -> bool:
    return device_reads.waits(gradients[0].device) and {(g.dtype, g.numel() > 0) for g in gradients} == _FOR_MANY


@functools.lru_cache(maxsize=64)
def _by_size(sizes: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Return the places of the large gradients, and the places of the small ones."""
    large = [place for place, size in enumerate(sizes) if size > _SMALL]
    return large, [place for place, size in enumerate(sizes) if size <= _SMALL]


def _rows(gradient: Tensor) -> list[Tensor]:
    """Return the norms of a gradient's short rows, and the remaining elements; only memory with gaps is copied."""
    if gradient.is_complex():
        gradient = as_real(gradient).flatten()
    if not gradient.is_contiguous():
        gradient = gradient.permute(sorted(range(gradient.ndim), key=gradient.stride, reverse=True)).contiguous()
    size = gradient.numel()
    width = _row_width(size)
    dtype = torch.float32 if gradient.itemsize < 4 else None
    if size % width == 0:
        return [torch.linalg.vector_norm(gradient.view(-1, width), dim=1, dtype=dtype)]
    flat, whole = gradient.view(-1), size // width * width
    return [torch.linalg.vector_norm(flat[:whole].view(-1, width), dim=1, dtype=dtype), flat[whole:]]


@functools.lru_cache(maxsize=4096)
def _row_width(size: int) -> int:
    """Return the length of rows for `size` elements: a divisor of `size` if there is one in range, else `_ROW`."""
    return next((width for width in range(_ROW, _ROW // 4, -1) if size % width == 0), _ROW)


def _dense(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.layout is torch.sparse_coo else gradient.values()


def clip_values(gradients: Sequence[Tensor], limit: float | None) -> None:
    """Clip each element of the gradients to [-limit, limit] in place; None clips nothing."""
    if limit is not None and gradients:
        torch._foreach_clamp_min_(list(gradients), -limit)
        torch._foreach_clamp_max_(list(gradients), limit)
