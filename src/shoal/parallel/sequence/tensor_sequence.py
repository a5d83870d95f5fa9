"""Sequence parallelism: between the layer pairs of a block each rank of the tensor axis has some positions.

As in Korthikanti et al. (arXiv 2205.05198): a pair begins with an all-gather of positions instead of a copy, and ends
with a reduce-scatter instead of an all-reduce; norms, dropout and residual sums compute 1/N of the positions.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import JobError, ShoalError
from shoal.parallel.axis_collectives import divide, join
from shoal.parallel.sequence.positions import (
    SEQUENCE,
    BlockRole,
    PartDropout,
    Path,
    Span,
    Stream,
    surround,
    tensors_by_path,
    with_tensors,
)
from shoal.parallel.tensor.layers import Column, Entry, Row


class FeatureStream(Stream):
    """Sequence whose pairs divide features: their modules take all positions of slices."""

    def refusal(self, block: str, conflict: str, remedy: str) -> ShoalError:
        """The error for a block that is used otherwise than in the first batch."""
        return JobError(
            given=f"tensor.sequence with the block {block}",
            conflict=conflict,
            remedy="call the blocks in evaluation and with all batches as in the first, or write "
            "tensor.sequence = false",
        )

    def is_part(self, tensor: Any) -> bool:
        """Whether a tensor has this rank's positions only."""
        assert self.span is not None
        return isinstance(tensor, Tensor) and tensor.ndim > SEQUENCE and tensor.shape[SEQUENCE] == self.span.size

    def part(self, whole: Tensor) -> Tensor:
        """This rank's positions of what is whole on each. Collective in the backward: the axis, an all-gather."""
        assert self.span is not None
        return self.span.scatter(whole, SEQUENCE, self.axis)

    def join(self, part: Tensor) -> Tensor:
        """All positions, on their way into slices. Collective: the axis, an all-gather; back a reduce-scatter."""
        assert self.span is not None
        return join(part, self.axis, SEQUENCE).narrow(SEQUENCE, 0, self.span.length)

    def divide(self, term: Tensor) -> Tensor:
        """This rank's positions of the sum of the ranks' terms. Collective: the axis, a reduce-scatter."""
        assert self.span is not None
        missing = self.span.size * self.axis.degree - self.span.length
        return divide(F.pad(term, (0, 0) * (term.ndim - 2) + (0, missing)) if missing else term, self.axis, SEQUENCE)


# ------------------------------------------------------------------------------------------------------------- pairs


@dataclass(frozen=True)
class PairByPositions:
    """Modules of a pair by name; positions are gathered at the columns, or at the module `around` them."""

    columns: tuple[str, ...]
    row: str
    around: str = ""

    def give(self, model: nn.Module, stream: FeatureStream) -> None:
        """Makes the divided pair take and give positions."""
        entry = Entry(stream.join, len(self.columns), always=True)  # to gather is dear
        if self.around:
            entry = Entry(_same)
            surround(model.get_submodule(self.around), JoinRole(stream))
        for name in self.columns:
            model.get_submodule(name).tensor_role = Column(entry)  # type: ignore[assignment]
        model.get_submodule(self.row).tensor_role = Row(stream.divide)  # type: ignore[assignment]


def _same(tensor: Tensor) -> Tensor:
    return tensor


# ------------------------------------------------------------------------------------------------------------ blocks


@dataclass
class FeatureBlockRole(BlockRole):
    """A block that computes some positions between its pairs, of which each divides features of all of them."""

    stream: FeatureStream

    def dropouts(self, span: Span, ndim: int) -> AbstractContextManager[Any]:
        """Dropout of tensors that look like the hidden state is that of a part."""
        return PartDropout(span, lambda t: SEQUENCE if t.ndim == ndim and self.stream.is_part(t) else None)


@dataclass
class JoinRole:
    """Module around the columns of a pair that reads the number of positions from its input."""

    stream: FeatureStream

    def __call__(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Collective: the axis, an all-gather; in the backward a reduce-scatter."""
        args, kwargs = _with_wholes(self.stream, self.stream.join, args, kwargs)
        return forward(*args, **kwargs)


@dataclass
class WholeRole:
    """Module within a block that needs all positions, and computes them on each rank."""

    stream: FeatureStream

    def __call__(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Collective: the axis, an all-gather in the forward and one in the backward."""
        stream = self.stream
        args, kwargs = _with_wholes(stream, stream.whole, args, kwargs)
        result = forward(*args, **kwargs)
        assert stream.span is not None
        length = stream.span.length
        outputs = {p: t for p, t in tensors_by_path(result) if t.ndim > 2 and t.shape[SEQUENCE] == length}
        return with_tensors(result, {path: stream.part(tensor) for path, tensor in outputs.items()})


def _with_wholes(stream: FeatureStream, make: Callable[[Tensor], Tensor], args: Any, kwargs: Any) -> Any:
    """Arguments with all positions in the place of parts."""
    made: dict[int, Tensor] = {}  # the same tensor may be query, key and value
    found: dict[Path, Tensor] = {}
    for path, tensor in tensors_by_path([args, kwargs]):
        if stream.is_part(tensor) and tensor.is_floating_point() and tensor.ndim > 2:
            if id(tensor) not in made:
                made[id(tensor)] = make(tensor)
            found[path] = made[id(tensor)]
    return with_tensors([args, kwargs], found)
