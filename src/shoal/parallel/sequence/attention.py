"""DeepSpeed-Ulysses attention: an all-to-all from some positions of all heads to all positions of some heads, and back.

The method follows DeepSpeed-Ulysses (Jacobs et al., arXiv 2309.14509). Each rank attends from all positions for its
heads, so causal attention is equal work on each rank. Positions are cut into equal pieces; the last ones may be
padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.errors import PlanError, ShoalError
from shoal.parallel.axis_collectives import TensorAxis, through
from shoal.parallel.sequence.positions import PartDropout, Span, refusal
from shoal.plans.accounting.collectives import Heads
from shoal.plans.legal import AT_LEAST_A_HEAD

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def _exchange(pieces: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[torch.Size]], axis: TensorAxis) -> Any:
    """Send the tensors `pieces[i]` to rank i, receive `shapes[i]` from it. Collective: the axis, one all-to-all."""
    flat = torch.cat([tensor.reshape(-1) for to in pieces for tensor in to])
    num_sent = [sum(tensor.numel() for tensor in to) for to in pieces]
    num_received = [sum(shape.numel() for shape in of) for of in shapes]
    there = partial(axis.all_to_all, num_sent=num_sent, num_received=num_received)
    received = through(flat, there, partial(axis.all_to_all, num_sent=num_received, num_received=num_sent))
    parts = iter(received.split([shape.numel() for of in shapes for shape in of]))
    return [[next(parts).view(shape) for shape in of] for of in shapes]


def attend(span: Span, axis: TensorAxis, block: str, args: Any, kwargs: Any) -> Tensor:
    """Compute scaled_dot_product_attention of slices [B, H, size, d], with a mask for all positions.

    Collective: the axis, an all-to-all of query, key and value and one of the result; the same in the backward.
    Raises: JobError for attention that is not within the sequence.
    """
    given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    query, key, value = (_narrowed(given.pop(name)) for name in _NAMES[:3])
    mask = given.pop("attn_mask", None)
    if given.get("dropout_p", 0.0):
        raise dropout_refusal(block, given["dropout_p"])
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        what = f"it attends with a query of shape {list(query.shape)}, which has no dim of heads"
        remedy = "give scaled_dot_product_attention tensors of shape [batch, heads, positions, width]"
        raise refusal(block, what, remedy)
    if {query.shape[2], key.shape[2], value.shape[2]} != {span.size}:
        what = f"it attends from {query.shape[2]} to {key.shape[2]} positions where this rank has {span.size}"
        raise refusal(block, what, "use context = 1: only attention within one sequence is divided")
    if key.shape[1] != value.shape[1] or query.shape[1] % key.shape[1]:
        what = f"it attends with {query.shape[1]}, {key.shape[1]} and {value.shape[1]} heads of query, key and value"
        raise refusal(block, what, "use as many heads of keys as of values, which divide those of the query")
    heads = Heads(query.shape[1], key.shape[1], axis.degree)
    refuse_degree(heads.num_query, axis.degree, block)
    query, key, value = _to_heads(span, axis, heads, (query, key, value))
    repeats = heads.repeats(axis.place)
    if repeats is not None:
        index = torch.tensor(repeats, device=key.device)
        key, value = key.index_select(1, index), value.index_select(1, index)
    given.pop("enable_gqa", None)
    if mask is not None and any(size not in (1, span.length) for size in mask.shape[-2:]):
        what = f"its attention mask is of shape {list(mask.shape)} where the sequence has {span.length} positions"
        raise refusal(block, what, "make the mask outside of the blocks and hand it to them, or use is_causal=True")
    if mask is not None and mask.ndim >= 3 and mask.shape[-3] != 1:  # this rank's heads
        start, stop = heads.bounds(axis.place)
        mask = mask.narrow(-3, start, stop - start)
    result = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **given)
    return _to_positions(span, axis, heads, result)


def _narrowed(tensor: Tensor) -> Tensor:
    """Convert to autocast's dtype before sending."""
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind) and tensor.dtype == torch.float32:
        return tensor.to(torch.get_autocast_dtype(kind))
    return tensor


def _to_heads(span: Span, axis: TensorAxis, heads: Heads, tensors: Sequence[Tensor]) -> list[Tensor]:
    bounds = [[heads.bounds(i), heads.read(i), heads.read(i)] for i in range(axis.degree)]
    pieces = [[t[:, a:b] for t, (a, b) in zip(tensors, to, strict=True)] for to in bounds]
    shapes = [piece.shape for piece in pieces[axis.place]]
    parts = _exchange(pieces, [shapes] * axis.degree, axis)
    wholes = [torch.cat([of[i] for of in parts], 2).narrow(2, 0, span.length) for i in range(len(tensors))]
    return [whole.to(tensor.dtype) for whole, tensor in zip(wholes, tensors, strict=True)]


def _to_positions(span: Span, axis: TensorAxis, heads: Heads, result: Tensor) -> Tensor:
    full = F.pad(result, (0, 0, 0, span.size * span.degree - span.length))
    pieces = [[piece] for piece in full.split(span.size, 2)]
    batch, _, _, width = result.shape
    bounds = map(heads.bounds, range(axis.degree))
    shapes = [[torch.Size((batch, stop - start, span.size, width))] for start, stop in bounds]
    return torch.cat([of[0] for of in _exchange(pieces, shapes, axis)], 1)


def dropout_refusal(block: str, p: float) -> ShoalError:
    """Return the error for attention with dropout."""
    return refusal(
        block,
        f"its attention drops weights (p = {p}), and each rank would have to draw its heads' part of one mask",
        "use attention dropout 0 (in Transformers attn_pdrop, attention_dropout or attention_probs_dropout_prob), "
        "or context = 1",
    )


def refuse_degree(num_heads: int, degree: int, block: str) -> None:
    """Raise PlanError if there are fewer heads than ranks."""
    if degree > num_heads:
        raise PlanError(
            given=f"context = {degree} with {num_heads} attention heads in {block}",
            conflict=AT_LEAST_A_HEAD,
            remedy=f"use a context of at most {num_heads}",
        )


class Sliced(PartDropout):
    """Context in which tensors are slices of sequences: attention covers all positions, dropout uses the whole mask.

    `dropouts`: by number of dims, the sequence's dim of a tensor, or None.
    """

    def __init__(self, span: Span, axis: TensorAxis, block: str, dropouts: Mapping[int, int | None]) -> None:
        super().__init__(span, partial(_dropped_dim, span, block, dropouts))
        self._axis, self._block = axis, block

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return attend(self._span, self._axis, self._block, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)


def _dropped_dim(span: Span, block: str, dropouts: Mapping[int, int | None], input: Tensor) -> int | None:
    """Return the sequence's dim of a dropout's input."""
    dim = dropouts.get(input.ndim, -1)
    if dim is not None and (dim < 0 or input.shape[dim] != span.size):
        what = f"it drops elements of a tensor of shape {list(input.shape)}, which it did not in the first batch"
        raise refusal(block, what, "use dropout on [batch, positions, features], or p = 0")
    return dim
