"""Context parallelism: sequences divided over the ranks of the context axis, within a model's repeated blocks.

Each rank computes the blocks for some of the positions, as the user's own modules with their names and hooks. Code
before and after the blocks runs whole on every rank. All ranks together prove that a divided block equals the whole
block, in float64 on random numbers. See docs/decisions/0014-context-parallel.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.errors import ShoalError, first_line
from shoal.parallel.axis_collectives import TensorAxis, enter, is_without_data
from shoal.parallel.model.trial import ModelTrial
from shoal.parallel.sequence.attention import Sliced
from shoal.parallel.sequence.plan import BlockPlan, ContextPlan, decide
from shoal.parallel.sequence.positions import (
    BlockRole,
    Path,
    Span,
    Stream,
    refusal,
    surround,
)
from shoal.parallel.sequence.trace import BlockTrace, length_of, observe, shortened_to, sliced
from shoal.parallel.sequence.trial import OF_PARAMETER, BlockTrial, computed


@dataclass
class BlockWrapper(BlockRole):
    """Role of a block under context parallelism: two all-to-alls for each attention inside."""

    plan: BlockPlan

    def dropouts(self, span: Span, ndim: int) -> AbstractContextManager[Any]:
        """Return the context that divides attention, and dropout according to the plan."""
        return Sliced(span, self.stream.axis, self.name, self.plan.dropouts)

    def argument(self, path: Path, tensor: Tensor, span: Span) -> Tensor:
        """Return the argument, sliced if it is as long as the sequence. Collective in the backward: the axis."""
        dim = self.plan.cuts.get(path)
        if dim is not None and tensor.ndim > dim and tensor.shape[dim] == 1 != span.length:
            dim = None  # the same for all positions
        elif dim is not None and (tensor.ndim <= dim or tensor.shape[dim] != span.length):
            raise refusal(
                self.name,
                f"an argument of shape {list(tensor.shape)} is not as long as the sequence of {span.length}",
                "use context = 1: only attention within one sequence is divided",
            )
        elif dim is None and path not in self.plan.whole and not is_without_data(tensor):
            raise refusal(
                self.name,
                f"it is given a tensor of shape {list(tensor.shape)} that it was not in the first batch",
                "call it with the same arguments in training and in evaluation",
            )
        axis = self.stream.axis
        return enter(tensor, axis) if dim is None else span.scatter(tensor, dim, axis)


_WHY = (
    "something in it mixes positions other than F.scaled_dot_product_attention (a convolution, a recurrence, a shift "
    "or a statistic over time), or looks at the number of positions"
)


def _prove(
    subject: ModelTrial, plan: ContextPlan, traces: Mapping[str, BlockTrace], axis: TensorAxis, device: torch.device
) -> None:
    """Test one block of each kind. Collective: the axis. Raises: JobError that names the block."""
    seen = set()
    for name, block in plan.blocks.items():
        trace = traces[name]
        kind = repr(subject.model.get_submodule(name)), tuple(trace.operations), tuple(trace.shapes.items())
        if kind in seen:
            continue
        seen.add(kind)
        trial = BlockTrial.of(subject.model, name, subject.values, trace, device)
        surround(trial.divided, BlockWrapper(name, replace(block, opens=True, closes=True), Stream(axis)))
        try:
            split = computed(trial.divided, trial.arguments).values
        except ShoalError:
            raise
        except Exception as error:
            what = f"it raised {type(error).__name__} on a part of the positions: {first_line(error)}"
            raise _refused(name, trace, what) from error
        for key, value in split.items():
            if key.startswith(OF_PARAMETER):
                dist.all_reduce(value, group=axis.group)
        for key, wanted in trial.whole.values.items():
            if not trial.is_same(key, split[key], wanted):
                raise _refused(name, trace, f"{key} is another where each rank has a part of the positions")


def _refused(name: str, trace: BlockTrace, what: str) -> ShoalError:
    remedy = "use context = 1, or a block whose positions meet in F.scaled_dot_product_attention only"
    if "scaled_dot_product_attention" not in trace.operations:
        remedy += ' (in Transformers attn_implementation="sdpa")'
    return refusal(name, f"{what}: {_WHY}", remedy)


# Converts a module's tensor on this rank to the whole model's tensor; None if that is impossible.
Whole = Callable[[Tensor], Tensor] | None


def plan_context(subject: ModelTrial, axis: TensorAxis, device: torch.device, num_cuts: int = 1) -> ContextPlan:
    """Plan the division of a model's sequences, and prove on `device` that it is valid.

    `num_cuts`: number of parts into which another axis divides the heads. Collective: the axis.
    Raises: PlanError, JobError for a model that cannot be divided so.
    """
    model = subject.model
    traces = observe(model, subject.loss, subject.batch, axis.degree, subject.values)
    names = {id(p): name for name, p in model.named_parameters()}
    owned = {name: [names[id(p)] for p in model.get_submodule(name).parameters()] for name in traces[0].blocks}
    plan = decide(traces, owned, axis.degree, num_cuts)
    _prove(subject, plan, traces[0].blocks, axis, device)
    length = next(iter(traces[0].blocks.values())).length
    if len(traces) > 1:  # runs with lengths that differ by one, to show the effect of one more token
        length += length_of(subject.batch) - shortened_to(subject.batch, axis.degree)
    opens = {name for name, block in plan.blocks.items() if block.opens}
    closes = {name for name, block in plan.blocks.items() if block.closes}
    return replace(plan, sliced=sliced(traces[0], length, opens, closes))


def apply_context(model: nn.Module, plan: ContextPlan, axis: TensorAxis) -> dict[str, Whole]:
    """Divide the blocks of `model` in place; return conversions to the whole for modules that return slices."""
    outputs: dict[str, Whole] = {}
    stream = Stream(axis)
    for name, block in plan.blocks.items():
        if block.opens:
            stream = Stream(axis)
        surround(model.get_submodule(name), BlockWrapper(name, block, stream))
        for inner, dim in block.outputs.items():
            if dim is not None:
                outputs[f"{name}.{inner}"] = partial(stream.whole_output, dim=dim) if dim >= 0 else None
        if not block.closes:
            outputs[name] = stream.whole_output
    return outputs


def both(first: Mapping[str, Whole], then: Mapping[str, Whole]) -> dict[str, Whole]:
    """Combine the inverses of two divisions of the same modules."""
    inverses = {**first, **then}
    for name in first.keys() & then.keys():
        one, other = first[name], then[name]
        if one is None or other is None:
            inverses[name] = None
        else:
            inverses[name] = lambda tensor, one=one, other=other: other(one(tensor))  # type: ignore[misc]
    return inverses
