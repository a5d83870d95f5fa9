"""Sequence parallelism: between the pairs of a block each rank of the tensor axis has some positions of every sequence.

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
    """A sequence between whose parts pairs divide features: what is computed there takes all positions of slices."""

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


@dataclass
class SequenceEntry(Entry):
    """Where positions enter the slices of several modules: gathered once for all of them."""

    stream: FeatureStream | None = None

    def shares(self, value: Tensor) -> bool:
        """To gather is dear."""
        return True

    def into(self, value: Tensor) -> Tensor:
        """All positions."""
        assert self.stream is not None
        return self.stream.join(value)

    def __deepcopy__(self, memo: Any) -> SequenceEntry:
        """A new one, which remembers nothing."""
        copied = self.stream.__deepcopy__(memo) if self.stream is not None else None
        return memo.setdefault(id(self), SequenceEntry(self.axis, self.num_users, stream=copied))  # type: ignore[no-any-return]


@dataclass
class SequenceRow(Row):
    """A row layer that gives this rank's positions; its bias is added to these alone."""

    stream: FeatureStream

    def sum(self, term: Tensor) -> Tensor:
        """This rank's positions of the sum."""
        return self.stream.divide(term)


class _Inside(Entry):
    """Where positions were gathered before the module that holds the columns."""

    def into(self, value: Tensor) -> Tensor:
        """The same."""
        return value

    def shares(self, value: Tensor) -> bool:
        """There is nothing to remember."""
        return False

    def __deepcopy__(self, memo: Any) -> _Inside:
        """Itself: it remembers nothing."""
        return self


@dataclass(frozen=True)
class PairByPositions:
    """A pair's modules by name; positions are gathered where they enter the columns, or the module `around` them."""

    columns: tuple[str, ...]
    row: str
    around: str = ""

    def give(self, model: nn.Module, stream: FeatureStream) -> None:
        """Makes the divided pair take and give positions."""
        entry: Entry = SequenceEntry(stream.axis, len(self.columns), stream=stream)
        if self.around:
            entry = _Inside(stream.axis, len(self.columns))
            surround(model.get_submodule(self.around), JoinRole(stream))
        for name in self.columns:
            model.get_submodule(name).tensor_role = Column(entry)  # type: ignore[assignment]
        model.get_submodule(self.row).tensor_role = SequenceRow(stream.axis, stream)  # type: ignore[assignment]


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
    """A module around the columns of a pair, which asks its input how many positions there are."""

    stream: FeatureStream

    def __call__(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Collective: the axis, an all-gather; in the backward a reduce-scatter."""
        args, kwargs = _with_wholes(self.stream, self.stream.join, args, kwargs)
        return forward(*args, **kwargs)


@dataclass
class WholeRole:
    """A module within a block that needs all positions: it computes them on each rank."""

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
