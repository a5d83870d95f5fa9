"""Blocks on some positions of every sequence, for both context and sequence parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.errors import JobError, ShoalError
from shoal.parallel.axis_collectives import TensorAxis, gather, slice_of
from shoal.parallel.model.trial import DROPOUTS, dropout_arguments
from shoal.parallel.tensor.layers import with_base
from shoal.plans.accounting.collectives import num_positions

# The sequence's dim of the hidden state [batch, positions, ...].
SEQUENCE = 1
# A part carries its span: a recomputation of the block in the backward receives the same tensor.
_MARK = "_shoal_span"

# Path of a tensor in the arguments [args, kwargs] of a call.
Path = tuple[Any, ...]


def tensors_by_path(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yield the tensors in tuples, lists and dicts with their paths, without those in other objects."""
    if isinstance(value, Tensor):
        yield path, value
    elif type(value) in (tuple, list):
        for i, item in enumerate(value):
            yield from tensors_by_path(item, (*path, i))
    elif type(value) is dict:
        for key, item in value.items():
            yield from tensors_by_path(item, (*path, key))


def with_tensors(value: Any, tensors: dict[Path, Tensor], path: Path = ()) -> Any:
    """Return the same structure with `tensors` at their paths."""
    if isinstance(value, Tensor):
        return tensors.get(path, value)
    if type(value) in (tuple, list):
        return type(value)(with_tensors(item, tensors, (*path, i)) for i, item in enumerate(value))
    if type(value) is dict:
        return {key: with_tensors(item, tensors, (*path, key)) for key, item in value.items()}
    return value


@dataclass(frozen=True)
class Span:
    """Positions of a sequence of `length` on the rank at `place`: `size` positions from `place * size`."""

    length: int
    degree: int
    place: int

    @property
    def size(self) -> int:
        """Number of positions on each rank; positions after the sequence's end are copies of its last one."""
        return num_positions(self.length, self.degree)

    def padded(self, tensor: Tensor, dim: int) -> Tensor:
        """Repeat the last position of `tensor` along `dim` so that all ranks have equally many."""
        missing = self.size * self.degree - self.length
        if not missing:
            return tensor
        shape = [missing if d == dim % tensor.ndim else -1 for d in range(tensor.ndim)]
        return torch.cat([tensor, tensor.narrow(dim, self.length - 1, 1).expand(shape)], dim)

    def own(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's positions of a whole tensor."""
        return self.padded(tensor, dim).narrow(dim, self.place * self.size, self.size)

    def scatter(self, tensor: Tensor, dim: int, axis: TensorAxis) -> Tensor:
        """Return this rank's positions, a copy. Collective in the backward: the axis, an all-gather of its gradient."""
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return self.own(tensor, dim).clone()
        return slice_of(self.padded(tensor, dim), axis, dim % tensor.ndim, (self.size,) * self.degree)


class Stream:
    """Sequence of consecutive blocks; `span` describes this rank's positions."""

    def __init__(self, axis: TensorAxis) -> None:
        self.axis = axis
        self.span: Span | None = None

    def __deepcopy__(self, memo: Any) -> Self:
        """Return a new stream: a copied model computes other sequences."""
        return memo.setdefault(id(self), type(self)(self.axis))  # type: ignore[no-any-return]

    def refusal(self, block: str, conflict: str, remedy: str) -> ShoalError:
        """Return the error for a block with another use than in the first batch."""
        return refusal(block, conflict, remedy)

    def open(self, hidden: Tensor) -> Span:
        """Begin a sequence."""
        self.span = Span(hidden.shape[SEQUENCE], self.axis.degree, self.axis.place)
        return self.span

    def resume(self, hidden: Tensor, block: str) -> Span:
        """Return the span of a part that comes from the previous block."""
        span = getattr(hidden, _MARK, None) or self.span
        if span is None or hidden.shape[SEQUENCE] != span.size:
            raise self.refusal(
                block,
                f"its hidden state of shape {list(hidden.shape)} is not what the block before it gave",
                "call the blocks one after the other, in evaluation as in training, or use context = 1",
            )
        self.span = span
        self.mark(hidden)
        return self.span

    def mark(self, hidden: Tensor) -> None:
        """Attach the span to a part that passes from block to block."""
        setattr(hidden, _MARK, self.span)

    def whole(self, part: Tensor, dim: int = SEQUENCE) -> Tensor:
        """Return all positions from the ranks' parts. Collective: the axis, an all-gather."""
        assert self.span is not None
        padded = gather(part, self.axis, dim, (self.span.size,) * self.axis.degree)
        return padded.narrow(dim, 0, self.span.length)

    def without_padding(self, part: Tensor) -> Tensor:
        """Return the positions of a part [samples * positions(, k)] or [samples, positions, k] that are no padding.

        Raises: JobError for a part of another shape.
        """
        assert self.span is not None
        size, length = self.span.size, self.span.length
        part = part.unsqueeze(-1) if part.ndim == 1 else part
        if part.ndim > 3 or (part.shape[1] if part.ndim == 3 else part.shape[0]) % size:
            raise JobError(
                given=f"a context axis with a router that returns indices of the shape {list(part.shape)}",
                conflict=f"its balance counts indices [samples * {size}, k] or [samples, {size}, k]",
                remedy="return indices of such a shape, or use layout.context = 1",
            )
        own = max(0, min(size, length - self.span.place * size))
        return part.reshape(-1, size, part.shape[-1])[:, :own]

    def whole_output(self, part: Tensor, dim: int = SEQUENCE) -> Tensor:
        """Return the whole model's output of a module inside a block; call it while the model computes."""
        with torch.no_grad():
            return self.whole(part, dim)


def refusal(block: str, conflict: str, remedy: str) -> ShoalError:
    """Return the error for a block with a sequence that cannot be divided."""
    return JobError(given=f"a context axis with the block {block}", conflict=conflict, remedy=remedy)


# ------------------------------------------------------------------------------------------------------------ blocks


class Surrounded:
    """First base of the class of a module with code around its forward."""

    sequence_role: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the role with the module's own forward."""
        return self.sequence_role(super().forward, args, kwargs)  # type: ignore[misc]


def surround(module: nn.Module, role: Callable[[Callable[..., Any], Any, Any], Any]) -> None:
    """Make a module compute as `role` defines around its own forward."""
    with_base(module, Surrounded)
    module.sequence_role = role  # type: ignore[assignment]


@dataclass(frozen=True)
class BlockEnds:
    """Paths of a block's hidden state and result; `opens`: the input is whole, `closes`: the output is whole."""

    opens: bool
    closes: bool
    hidden: Path
    result: Path


@dataclass
class BlockRole:
    """Role of a block that computes some positions of a stream's sequence."""

    name: str
    plan: BlockEnds
    stream: Stream

    def argument(self, path: Path, tensor: Tensor, span: Span) -> Tensor:
        """Return the block's argument for a tensor other than the hidden state."""
        return tensor

    def dropouts(self, span: Span, ndim: int) -> AbstractContextManager[Any]:
        """Return the context of the block's forward on a hidden state with `ndim` dims."""
        raise NotImplementedError

    def begin(self) -> None:
        """Forget the last sequence: a rank that computes another stage may not see the start of the next one."""
        self.stream.span = None

    def stubbed(self, args: Any, kwargs: Any) -> None:
        """Record the sequence if another stage computes the block."""
        hidden = dict(tensors_by_path([args, kwargs])).get(self.plan.hidden)
        if self.plan.opens and hidden is not None:
            self.stream.open(hidden)

    def __call__(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Cut whole inputs, compute, and gather outputs that must be whole.

        Collective: the axis, as the code inside; an all-gather of the output if the block `closes`.
        """
        stream, plan = self.stream, self.plan
        given = dict(tensors_by_path([args, kwargs]))
        hidden = given.pop(plan.hidden, None)
        if hidden is None:
            raise stream.refusal(
                self.name,
                "its hidden state is not where it was in the first batch",
                "call it with the same arguments in training and in evaluation",
            )
        span = stream.open(hidden) if plan.opens else stream.resume(hidden, self.name)
        arguments = {path: self.argument(path, tensor, span) for path, tensor in given.items()}
        arguments[plan.hidden] = span.scatter(hidden, SEQUENCE, stream.axis) if plan.opens else hidden
        args, kwargs = with_tensors([args, kwargs], arguments)
        with self.dropouts(span, hidden.ndim):
            result = forward(*args, **kwargs)
        outputs = dict(tensors_by_path(result))
        if outputs.keys() != {plan.result}:
            raise stream.refusal(
                self.name,
                f"it returned {len(outputs)} tensors, other than in the first batch",
                "return the same in training and in evaluation, the hidden state alone",
            )
        if plan.closes:
            return with_tensors(result, {plan.result: stream.whole(outputs[plan.result])})
        stream.mark(outputs[plan.result])
        return result


def block_roles(model: nn.Module) -> dict[str, BlockRole]:
    """Return the roles of the divided blocks by name."""
    roles = ((name, m.sequence_role) for name, m in model.named_modules() if isinstance(m, Surrounded))
    return {name: role for name, role in roles if isinstance(role, BlockRole)}


class PartDropout(TorchFunctionMode):
    """Context in which dropout of a part drops the same elements as of the whole; `dim` returns the part's dim."""

    def __init__(self, span: Span, dim: Callable[[Tensor], int | None]) -> None:
        super().__init__()
        self._span, self._dim = span, dim

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DROPOUTS:
            input, p, active, in_place = dropout_arguments(*args, **kwargs)
            dim = self._dim(input) if active else None
            if dim is not None:
                shape = list(input.shape)
                shape[dim] = self._span.length
                # A copy: autograd stores only the part's mask.
                mask = self._span.own(F.dropout(input.new_ones(shape), p, True), dim).clone()
                return input.mul_(mask) if in_place else input * mask
        return func(*args, **kwargs)
