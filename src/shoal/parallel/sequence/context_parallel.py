"""Context parallelism: sequences divided over the ranks of the context axis, within a model's repeated blocks.

Each rank computes the blocks with some of the positions; what is before and after them is computed whole on every rank.
See docs/decisions/0014-context-parallel.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.distributed.mesh import Mesh
from shoal.parallel.axis_collectives import TensorAxis
from shoal.parallel.model.trial import ModelTrial
from shoal.parallel.sequence.layers import BlockWrapper
from shoal.parallel.sequence.plan import ContextPlan, decide
from shoal.parallel.sequence.positions import Stream, surround
from shoal.parallel.sequence.proof import Prover
from shoal.parallel.sequence.trace import ContextTrace, length_of, observe, shortened_to, sliced
from shoal.plans.accounting.model_parallel import SlicedBlock

# What makes the tensor of the whole model of the one that a module gives here; None where nothing can.
Whole = Callable[[Tensor], Tensor] | None


def context_axis(mesh: Mesh) -> TensorAxis:
    """The ranks that divide sequences among them."""
    return TensorAxis(mesh.layout.context, mesh.layout.coordinate(mesh.rank).context, mesh.group("context"))


def plan_context(subject: ModelTrial, axis: TensorAxis, device: torch.device, num_cuts: int = 1) -> ContextPlan:
    """How a model's sequences are divided, and on `device` the proof that they may be.

    `num_cuts` is into how many parts another axis is going to divide the heads. Collective: the axis.
    Raises: PlanError, JobError for a model that cannot be divided so.
    """
    model = subject.model
    traces = observe(model, subject.loss, subject.batch, axis.degree, subject.values)
    names = {id(p): name for name, p in model.named_parameters()}
    owned = {name: [names[id(p)] for p in model.get_submodule(name).parameters()] for name in traces[0].blocks}
    plan = decide(traces, owned, axis.degree, num_cuts)
    Prover(model, subject.values, axis, device).prove(plan, traces[0].blocks)
    return replace(plan, sliced=_sliced(plan, traces, subject.batch, axis.degree))


def _sliced(plan: ContextPlan, traces: Sequence[ContextTrace], batch: Any, degree: int) -> tuple[SlicedBlock, ...]:
    """The blocks for the batch's own length: two runs with lengths that differ by one show what one more token is."""
    trace = traces[0]
    length = next(iter(trace.blocks.values())).length
    if len(traces) > 1:
        length += length_of(batch) - shortened_to(batch, degree)
    opens = {name for name, block in plan.blocks.items() if block.opens}
    closes = {name for name, block in plan.blocks.items() if block.closes}
    return sliced(trace, length, opens, closes)


def apply_context(model: nn.Module, plan: ContextPlan, axis: TensorAxis) -> dict[str, Whole]:
    """Divides the blocks of `model` in place; for each module that gives slices what makes the whole of one."""
    outputs: dict[str, Whole] = {}
    stream = Stream(axis)
    for name, block in plan.blocks.items():
        if block.opens:
            stream = Stream(axis)
        surround(model.get_submodule(name), BlockWrapper(name, block, stream))
        for inner, dim in block.outputs.items():
            if dim is not None:
                outputs[f"{name}.{inner}"] = stream.whole_output(dim) if dim >= 0 else None
        if not block.closes:
            outputs[name] = stream.whole_output()
    return outputs


def both(first: Mapping[str, Whole], then: Mapping[str, Whole]) -> dict[str, Whole]:
    """Inverses of two divisions of the same modules."""
    found = {**first, **then}
    for name in first.keys() & then.keys():
        found[name] = _composed(first[name], then[name])
    return found


def _composed(first: Whole, then: Whole) -> Whole:
    if first is None or then is None:
        return None
    return lambda tensor: then(first(tensor))
