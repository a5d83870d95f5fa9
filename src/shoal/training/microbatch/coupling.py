"""Coupled samples: detection of the module that mixes a batch's samples, so that the loss is not a sum over grains.

Each module call is compared between a forward of the whole batch and forwards of single grains. The first call with
equal input rows and different output rows is the cause. A row of any size is stored as one number.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_leaves, tree_map

from shoal.data.loader import Microbatch
from shoal.data.source import digest_of_samples
from shoal.numerics.operators import is_strided, row_runs

Sums = tuple[float, float]

MIXES = "the model mixes samples of a batch"
IN_THE_LOSS = f"{MIXES}, in the loss function"
PADS = "a sample's loss depends on the length of the longest sample of its grain, to which the others are padded"
UNPADDED = (
    "give the model a packed sequence (torch.nn.utils.rnn.pack_padded_sequence) or a mask of what is padding, or let "
    "collate pad every batch to one fixed length"
)
REREAD = "train_data gives the same sample other values when it is read again"
# Relative tolerance for rounding, by bytes of the dtype. float32 through a deep model stays below the first (measured:
# 1e-5 after 48 blocks), float64 far below the second. The effect of samples on each other exceeds both in a batch of
# less than a thousand.
_ROUNDING = {4: 1e-3, 8: 1e-7}


@dataclass(frozen=True)
class _LeafRows:
    """Rows of one tensor in no order: one number for each row, and the norm of the largest row."""

    numbers: Tensor
    size: float

    @classmethod
    def of(cls, tensor: Tensor) -> _LeafRows:
        if not is_strided(tensor):
            rows = pad_sequence(row_runs(tensor, [1] * tensor.size(0)), batch_first=True).double()
        else:
            rows = tensor.detach().reshape(len(tensor), -1).double()
        weights = torch.arange(rows.shape[1], dtype=torch.float64, device=rows.device).add_(1.0).cos_()
        size = float(rows.square().sum(1).max().sqrt()) if rows.numel() else 0.0
        return cls((rows @ weights).cpu(), size)


@dataclass(frozen=True)
class _RowsCall:
    """One call of a module, with the rows of its inputs and outputs."""

    name: str
    kind: str
    given: list[_LeafRows]
    gave: list[_LeafRows]


_Calls = dict[tuple[str, int], _RowsCall]  # by module name and number of the call


def _rows(value: Any) -> list[_LeafRows]:
    return [
        _LeafRows.of(leaf)
        for leaf in tree_leaves(value)
        if isinstance(leaf, Tensor) and leaf.ndim and leaf.size(0) and not leaf.is_complex()
    ]


@contextlib.contextmanager
def _watching(model: nn.Module) -> Iterator[_Calls]:
    """Record the module calls in this context in the order in which they end: submodules before their parent."""
    calls: _Calls = {}
    names = {module: name for name, module in model.named_modules()}
    counts: Counter[str] = Counter()

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        name = names[module]
        calls[name, counts[name]] = _RowsCall(name, type(module).__name__, _rows((args, kwargs)), _rows(output))
        counts[name] += 1

    handles = [module.register_forward_hook(note, with_kwargs=True) for module in names]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _differ(whole: list[_LeafRows], parts: list[list[_LeafRows]], rounding: float) -> bool:
    """Return True if a batch's rows differ from its grains' rows. Tensors without a row per sample are ignored."""
    if any(len(part) != len(whole) for part in parts):
        return True
    for place, rows in enumerate(whole):
        apart = torch.cat([part[place].numbers for part in parts])
        if len(apart) != len(rows.numbers):
            continue
        size = max(rows.size, *(part[place].size for part in parts))
        # Views of a sample may be adjacent or far apart, so rows are compared without their order.
        far = (rows.numbers.sort().values - apart.sort().values).abs().max()
        if float(far) > rounding * size:
            return True
    return False


def compare(
    model: nn.Module,
    loss: Callable[[Any], Sums],
    whole: Microbatch,
    parts: Sequence[Microbatch],
    itemsize: int,
) -> tuple[Sums, list[Sums], str]:
    """Return the sums of a batch, the sums of its grains, and a phrase on where its samples are mixed.

    `itemsize`: bytes of the compute dtype. Raises: errors of the loss.
    """
    with _watching(model) as together:
        fused = loss(whole)
    apart, sums = [], []
    for part in parts:
        with _watching(model) as calls:
            sums.append(loss(part))
        apart.append(calls)
    if digest_of_samples(whole.read(whole.grains, whole.ids).batch) != digest_of_samples(whole.batch):
        return fused, sums, REREAD
    # Why the pair of the loss is not a sum, if its numbers show it.
    weights = [weight for _, weight in sums]
    if fused[1] != math.fsum(weights):
        same = " as of each of them" if set(weights) == {fused[1]} else ""
        return fused, sums, f"the weight of several grains is {fused[1]:.6g}{same}, and not the sum of theirs"
    mean = math.fsum(t * w for t, w in sums) / fused[1] if fused[1] else math.nan
    if len(sums) > 1 and fused[0] and math.isclose(fused[0], mean, rel_tol=_ROUNDING[4] ** 2):
        return fused, sums, "the total of several grains is the mean of theirs, and not the sum"
    padded = _padded(loss, whole, parts, fused)
    if padded:
        return fused, sums, padded
    rounding = _ROUNDING[itemsize]
    for key, call in together.items():
        others = [calls[key] for calls in apart if key in calls]
        if len(others) < len(apart):
            continue
        if _differ(call.given, [other.given for other in others], rounding):
            if not call.name and _differ(_rows(whole.batch), [_rows(part.batch) for part in parts], rounding):
                reason = "what collate makes of a sample depends on the others of its batch, and the loss on that"
                return fused, sums, reason
            if not call.name:
                return fused, sums, IN_THE_LOSS
            continue
        if _differ(call.gave, [other.gave for other in others], rounding):
            where = f"module {call.name!r} ({call.kind})" if call.name else f"the forward of {call.kind} itself"
            return fused, sums, f"{MIXES}, in {where}"
    return fused, sums, IN_THE_LOSS


def _padded(loss: Callable[[Any], Sums], whole: Microbatch, parts: Sequence[Microbatch], fused: Sums) -> str:
    """Return a phrase with the longest sample if only padding mixes the samples, otherwise an empty string.

    In that case the loss is a sum over grains cut from the whole batch, where all samples have the same padding.
    """
    longest = _longest(whole, parts)
    if longest is None:
        return ""
    sums, start = [], 0
    for part in parts:
        end = start + part.num_samples

        def rows(leaf: Any, start: int = start, end: int = end) -> Any:
            by_sample = isinstance(leaf, Tensor) and leaf.ndim and leaf.size(0) == whole.num_samples
            return leaf[start:end] if by_sample else leaf

        try:
            sums.append(loss(replace(part, batch=tree_map(rows, whole.batch))))
        except Exception:  # the batch cannot be cut into rows
            return ""
        start = end
    scale = math.fsum(abs(total) for total, _ in sums)
    is_sum = abs(fused[0] - math.fsum(total for total, _ in sums)) <= _ROUNDING[4] ** 2 * scale
    return f"{PADS}: {longest}" if is_sum else ""


def _longest(whole: Microbatch, parts: Sequence[Microbatch]) -> str | None:
    """Describe the longest sample and the tensor with its length. Return None if all grains have equal lengths."""
    trees = [tree_leaves(part.batch) for part in parts]
    for number, leaf in enumerate(tree_leaves(whole.batch)):
        same = [leaves[number] for leaves in trees if len(leaves) > number]
        if len(same) < len(parts) or not all(isinstance(one, Tensor) and one.ndim > 1 for one in (leaf, *same)):
            continue
        if any(one.is_nested or one.ndim != leaf.ndim for one in (leaf, *same)):
            continue
        for dim in range(1, leaf.ndim):
            lengths = [one.size(dim) for one in same]
            if min(lengths) == max(lengths):
                continue
            long, short = (parts[lengths.index(most)] for most in (max(lengths), min(lengths)))
            alone = [tree_leaves(sample.batch)[number].size(dim) for sample in long.samples()]
            sample = int(long.ids[0][alone.index(max(alone))])
            return (
                f"in grain {long.grains[0].index} it is sample {sample}, by which tensor {number} of the batch has "
                f"length {max(lengths)}; in grain {short.grains[0].index} the tensor has length {min(lengths)}"
            )
    return None


def by_grain(coupled: str, grain_size: int, global_batch: int) -> str:
    """Return a sentence on the verified numbers if the forward mixes samples; empty if the loss or collate does."""
    place = coupled.partition(": ")[0]
    if place == PADS:
        remedy = f"where the dependence is not meant, {UNPADDED}"
    elif place.startswith(MIXES) and place != IN_THE_LOSS:
        remedy = "write Job(grains=1) for the whole batch, on one data rank, or Job(fuse=False) where grains are meant"
    else:
        return ""
    return (
        f"the numbers are those of grains of {grain_size} samples, not of the whole batch of {global_batch}, "
        f"since {place}: {remedy}"
    )


def meaning(coupled: str, grain_size: int, global_batch: int) -> str:
    """Return the consequence of coupled samples for the result, and the change to the job that avoids it."""
    if coupled == REREAD:
        return (
            "no two runs learn from the same values; draw from torch's, Python's or numpy's global generators, which "
            "shoal seeds for each grain, and count no reads"
        )
    if coupled.startswith(PADS):
        return f"the loss is the same on any number of devices; for one that does not depend on padding, {UNPADDED}"
    if MIXES not in coupled:
        return (
            "what a step learns depends on Job(grains=...), not on devices; return sums over samples, and their weight"
        )
    seen = f"each sample sees those of its own grain alone, {grain_size} at most, on any number of devices; "
    if coupled == IN_THE_LOSS:
        return (
            f"{seen}for a loss over the whole batch of {global_batch}, on any layout, write Job(outputs=lambda "
            "model, batch: model(batch[0]), loss=lambda outputs, batch: (total, weight)), where outputs and batch are "
            "those of the whole batch"
        )
    return f"{seen}with Job(grains=1) it sees the whole batch of {global_batch}, on one data rank"
