"""Sequence parallelism: between the pairs of a block each rank of the tensor axis has some positions of every sequence.

As in Korthikanti et al. (arXiv 2205.05198): a pair begins with an all-gather of positions instead of a copy, and ends
with a reduce-scatter instead of an all-reduce; norms, dropout and residual sums compute 1/N of the positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.errors import JobError, ShoalError
from shoal.parallel.axis_collectives import TensorAxis, divide, gather, join
from shoal.parallel.sequence.attention import DROPOUTS, Span, dropout_arguments
from shoal.parallel.sequence.trace import Path, tensors_in, with_tensors
from shoal.parallel.tensor.layers import Column, Entry, Row

# Of the hidden state [batch, positions, ...].
SEQUENCE = 1
# A part carries its span: what computes a block again in the backward hands it the same tensor.
_MARK = "_shoal_positions"


class Stream:
    """The sequence that blocks which follow each other are computing; `span` says which positions are here."""

    def __init__(self, axis: TensorAxis) -> None:
        self.axis = axis
        self.span: Span | None = None

    def __deepcopy__(self, memo: Any) -> Stream:
        """A new one: a copied model computes other sequences."""
        return memo.setdefault(id(self), Stream(self.axis))  # type: ignore[no-any-return]

    def open(self, hidden: Tensor) -> Tensor:
        """Begins a sequence: this rank's positions. Collective in the backward: the axis, an all-gather."""
        self.span = Span(hidden.shape[SEQUENCE], self.axis.degree, self.axis.place)
        return self.span.scatter(hidden, SEQUENCE, self.axis)

    def resume(self, hidden: Tensor, block: str) -> Tensor:
        """A part that comes from the block before."""
        span = getattr(hidden, _MARK, None) or self.span
        if span is None or hidden.shape[SEQUENCE] != span.size:
            raise refusal(block, f"its hidden state of shape {list(hidden.shape)} is not what the block before it gave")
        self.span = span
        return hidden

    def mark(self, hidden: Tensor) -> None:
        """Says of which positions a part is that goes to the block after."""
        setattr(hidden, _MARK, self.span)

    def is_part(self, tensor: Any) -> bool:
        """Whether a tensor has this rank's positions only."""
        assert self.span is not None
        return isinstance(tensor, Tensor) and tensor.ndim > SEQUENCE and tensor.shape[SEQUENCE] == self.span.size

    def whole(self, part: Tensor) -> Tensor:
        """All positions, for what is computed whole on each rank. Collective: the axis, an all-gather."""
        assert self.span is not None
        found = gather(part, self.axis, SEQUENCE, (self.span.size,) * self.axis.degree)
        return found.narrow(SEQUENCE, 0, self.span.length)

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


def refusal(block: str, conflict: str) -> ShoalError:
    """The error for a block that is used otherwise than in the first batch."""
    return JobError(
        given=f"tensor.sequence with the block {block}",
        conflict=conflict,
        remedy="call the blocks in evaluation and with all batches as in the first, or write tensor.sequence = false",
    )


# ------------------------------------------------------------------------------------------------------------- pairs


@dataclass
class SequenceEntry(Entry):
    """Where positions enter the slices of several modules: gathered once for all of them."""

    stream: Stream | None = None

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

    stream: Stream

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

    def give(self, model: nn.Module, stream: Stream) -> None:
        """Makes the divided pair take and give positions."""
        entry: Entry = SequenceEntry(stream.axis, len(self.columns), stream=stream)
        if self.around:
            entry = _Inside(stream.axis, len(self.columns))
            surround(model.get_submodule(self.around), JoinRole(stream))
        for name in self.columns:
            model.get_submodule(name).tensor_role = Column(entry)  # type: ignore[assignment]
        model.get_submodule(self.row).tensor_role = SequenceRow(stream.axis, stream)  # type: ignore[assignment]


# ------------------------------------------------------------------------------------------------------------ blocks


class _Around:
    """The first base of a block's class."""

    sequence_role: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the role says, around the module's own."""
        return self.sequence_role(super().forward, args, kwargs)  # type: ignore[misc]


def surround(module: nn.Module, role: Callable[[Callable[..., Any], Any, Any], Any]) -> None:
    """Makes a module compute as `role` says around its own forward."""
    base = type(module)
    made: Any = type(base.__name__, (_Around, base), {"__module__": base.__module__, "__doc__": base.__doc__})
    module.__class__ = made
    module.sequence_role = role  # type: ignore[assignment]


@dataclass
class BlockRole:
    """A block of which each rank computes some positions; `opens`: they come whole, `closes`: they go out whole."""

    name: str
    hidden: Path
    result: Path
    opens: bool
    closes: bool
    stream: Stream

    def __call__(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Collective: the axis, as the pairs inside; where it closes an all-gather."""
        given = dict(tensors_in([args, kwargs]))
        hidden = given.get(self.hidden)
        if hidden is None:
            raise refusal(self.name, "its hidden state is not where it was in the first batch")
        stream = self.stream
        own = stream.open(hidden) if self.opens else stream.resume(hidden, self.name)
        args, kwargs = with_tensors([args, kwargs], {self.hidden: own})
        with _Masks(stream, own.ndim):
            result = forward(*args, **kwargs)
        outputs = dict(tensors_in(result))
        if outputs.keys() != {self.result}:
            raise refusal(self.name, f"it returned {len(outputs)} tensors, other than in the first batch")
        if self.closes:
            return with_tensors(result, {self.result: stream.whole(outputs[self.result])})
        stream.mark(outputs[self.result])
        return result


@dataclass
class JoinRole:
    """A module around the columns of a pair, which asks its input how many positions there are."""

    stream: Stream

    def __call__(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Collective: the axis, an all-gather; in the backward a reduce-scatter."""
        args, kwargs = _with_wholes(self.stream, self.stream.join, args, kwargs)
        return forward(*args, **kwargs)


@dataclass
class WholeRole:
    """A module within a block that needs all positions: it computes them on each rank."""

    stream: Stream

    def __call__(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Collective: the axis, an all-gather in the forward and one in the backward."""
        stream = self.stream
        args, kwargs = _with_wholes(stream, stream.whole, args, kwargs)
        result = forward(*args, **kwargs)
        assert stream.span is not None
        length = stream.span.length
        outputs = {p: t for p, t in tensors_in(result) if t.ndim > 2 and t.shape[SEQUENCE] == length}
        return with_tensors(result, {path: stream.part(tensor) for path, tensor in outputs.items()})


def _with_wholes(stream: Stream, make: Callable[[Tensor], Tensor], args: Any, kwargs: Any) -> Any:
    """Arguments with all positions in the place of parts."""
    made: dict[int, Tensor] = {}  # the same tensor may be query, key and value
    found: dict[Path, Tensor] = {}
    for path, tensor in tensors_in([args, kwargs]):
        if stream.is_part(tensor) and tensor.is_floating_point() and tensor.ndim > 2:
            if id(tensor) not in made:
                made[id(tensor)] = make(tensor)
            found[path] = made[id(tensor)]
    return with_tensors([args, kwargs], found)


class _Masks(TorchFunctionMode):
    """A context in which dropout of a part drops what it would of the whole."""

    def __init__(self, stream: Stream, ndim: int) -> None:
        super().__init__()
        self._stream, self._ndim = stream, ndim

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DROPOUTS:
            input, p, active, in_place = dropout_arguments(*args, **kwargs)
            span = self._stream.span
            if active and span is not None and input.ndim == self._ndim and self._stream.is_part(input):
                shape = list(input.shape)
                shape[SEQUENCE] = span.length
                # A copy: autograd keeps no more of the mask than the part needs.
                mask = span.own(F.dropout(input.new_ones(shape), p, True), SEQUENCE).clone()
                return input.mul_(mask) if in_place else input * mask
        return func(*args, **kwargs)
