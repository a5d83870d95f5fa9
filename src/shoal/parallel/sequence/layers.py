"""Blocks that compute with some positions of a sequence: the user's own modules, which keep names and hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shoal.parallel.axis_collectives import TensorAxis, enter, gather
from shoal.parallel.sequence.attention import Sliced, Span, refusal
from shoal.parallel.sequence.plan import SEQUENCE, BlockPlan
from shoal.parallel.sequence.trace import tensors_in, with_tensors

# A slice carries its span: what computes a block again in the backward hands it the same tensor.
_MARK = "_shoal_span"


class Chain:
    """Blocks that follow each other directly; `span` is that of the sequence that they are computing."""

    def __init__(self, axis: TensorAxis) -> None:
        self.axis = axis
        self.span: Span | None = None

    def __deepcopy__(self, memo: Any) -> Chain:
        """A new one: a copied model computes other sequences."""
        return memo.setdefault(id(self), Chain(self.axis))  # type: ignore[no-any-return]

    def open(self, hidden: Tensor) -> Span:
        """Begins a sequence."""
        self.span = Span(hidden.shape[SEQUENCE], self.axis.degree, self.axis.place)
        return self.span

    def resume(self, hidden: Tensor, block: str) -> Span:
        """The span of a slice that comes from the block before."""
        span = getattr(hidden, _MARK, None) or self.span
        if span is None or hidden.shape[SEQUENCE] != span.size:
            raise refusal(
                block,
                f"its hidden state of shape {list(hidden.shape)} is not what the block before it gave",
                "call the blocks one after the other, in evaluation as in training, or use context = 1",
            )
        setattr(hidden, _MARK, span)
        return span

    def whole(self, tensor: Tensor, dim: int, span: Span) -> Tensor:
        """The tensor of all positions from the ranks' slices. Collective: the axis, an all-gather."""
        found = gather(tensor, self.axis, dim, (span.size,) * self.axis.degree)
        return found.narrow(dim, 0, span.length)


class BlockWrapper:
    """What a divided block does around its own forward."""

    def __init__(self, name: str, plan: BlockPlan, chain: Chain) -> None:
        self._name, self._plan, self._chain = name, plan, chain

    def __call__(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Cuts what comes in whole, computes, and puts together what has to go out whole.

        Collective: the axis, two all-to-alls for each attention, and an all-gather of the output where it `closes`.
        """
        plan, axis = self._plan, self._chain.axis
        given = dict(tensors_in([args, kwargs]))
        hidden = given.pop(plan.hidden, None)
        if hidden is None:
            raise refusal(
                self._name,
                "its hidden state is not where it was in the first batch",
                "call it with the same arguments in training and in evaluation",
            )
        span = self._chain.open(hidden) if plan.opens else self._chain.resume(hidden, self._name)
        found = {path: self._argument(path, tensor, span) for path, tensor in given.items()}
        found[plan.hidden] = span.scatter(hidden, SEQUENCE, axis) if plan.opens else hidden
        args, kwargs = with_tensors([args, kwargs], found)
        with Sliced(span, axis, self._name, plan.dropouts):
            result = forward(*args, **kwargs)
        outputs = dict(tensors_in(result))
        if outputs.keys() != {plan.result}:
            raise refusal(
                self._name,
                f"it returned {len(outputs)} tensors, other than in the first batch",
                "return the same in training and in evaluation, the hidden state alone",
            )
        output = outputs[plan.result]
        if plan.closes:
            return with_tensors(result, {plan.result: self._chain.whole(output, SEQUENCE, span)})
        setattr(output, _MARK, span)
        return result

    def begin(self) -> None:
        """Forgets the sequence before, of which a rank that computes a stage of the model may not see the next."""
        self._chain.span = None

    def stubbed(self, args: Any, kwargs: Any) -> None:
        """Takes note of the sequence where another stage computes the block."""
        hidden = dict(tensors_in([args, kwargs])).get(self._plan.hidden)
        if self._plan.opens and hidden is not None:
            self._chain.open(hidden)

    def _argument(self, path: Any, tensor: Tensor, span: Span) -> Tensor:
        dim = self._plan.cuts.get(path)
        if dim is not None and tensor.ndim > dim and tensor.shape[dim] == 1 != span.length:
            dim = None  # the same for all positions
        elif dim is not None and (tensor.ndim <= dim or tensor.shape[dim] != span.length):
            raise refusal(
                self._name,
                f"an argument of shape {list(tensor.shape)} is not as long as the sequence of {span.length}",
                "use context = 1: only attention within one sequence is divided",
            )
        elif dim is None and path not in self._plan.kept and not _is_without_data(tensor):
            raise refusal(
                self._name,
                f"it is given a tensor of shape {list(tensor.shape)} that it was not in the first batch",
                "call it with the same arguments in training and in evaluation",
            )
        axis = self._chain.axis
        return enter(tensor, axis) if dim is None else span.scatter(tensor, dim, axis)


class DividedBlock:
    """The first base of a divided block's class."""

    context_role: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the role says, around the block's own."""
        return self.context_role(super().forward, args, kwargs)  # type: ignore[misc]


def _is_without_data(tensor: Tensor) -> bool:
    """Whether a model is only being followed: transformers make masks then that they do without for real tensors."""
    from torch._subclasses import FakeTensor

    return isinstance(tensor, FakeTensor)


def give_role(module: nn.Module, role: BlockWrapper) -> None:
    """Makes a block compute as `role` says."""
    base = type(module)
    made: Any = type(base.__name__, (DividedBlock, base), {"__module__": base.__module__, "__doc__": base.__doc__})
    module.__class__ = made
    module.context_role = role  # type: ignore[assignment]


def roles(model: nn.Module) -> dict[str, BlockWrapper]:
    """The divided blocks' by their names."""
    return {name: m.context_role for name, m in model.named_modules() if isinstance(m, DividedBlock)}


def whole_output(chain: Chain, dim: int) -> Callable[[Tensor], Tensor]:
    """What makes of a module's output inside of a block that of the whole model, while the model computes."""

    def whole(tensor: Tensor) -> Tensor:
        assert chain.span is not None
        with torch.no_grad():
            return chain.whole(tensor, dim, chain.span)

    return whole
