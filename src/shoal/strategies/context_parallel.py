"""Context parallelism: long sequences divided over the ranks of the context axis, inside of a model's repeated blocks.

Each rank computes the blocks with some of the positions; what is before and after them is computed whole on every rank.
See docs/decisions/0014-context-parallel.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.mesh import Mesh
from shoal.strategies.context_layers import Chain, Role, give_role, whole_output
from shoal.strategies.context_plan import SEQUENCE, ContextPlan, decide
from shoal.strategies.context_proof import prove
from shoal.strategies.context_trace import Loss, observe
from shoal.strategies.tensor_collectives import TensorAxis

# What makes the tensor of the whole model of the one that a module gives here; None where nothing can.
Whole = Callable[[Tensor], Tensor] | None


def context_axis(mesh: Mesh) -> TensorAxis:
    """The ranks that divide sequences among them."""
    return TensorAxis(mesh.layout.context, mesh.layout.coordinate(mesh.rank).context, mesh.group("context"))


def plan_context(
    model: nn.Module,
    axis: TensorAxis,
    loss: Loss,
    batch: Any,
    values: Callable[[str], Tensor],
    device: torch.device,
    num_cuts: int = 1,
) -> ContextPlan:
    """How a whole model's sequences are divided, and the proof that they may be.

    `batch` is a small one for which the loss is followed; `values` gives initial values by name; `num_cuts` is into how
    many parts another axis is going to divide the heads. Collective: the axis.
    Raises: PlanError, JobError for a model that cannot be divided so.
    """
    traces = observe(model, loss, batch, axis.degree, values)
    names = {id(p): name for name, p in model.named_parameters()}
    owned = {name: [names[id(p)] for p in model.get_submodule(name).parameters()] for name in traces[0].blocks}
    plan = decide(traces, owned, axis.degree, num_cuts)
    prove(model, plan, traces[0].blocks, axis, values, device)
    return plan


def apply_context(model: nn.Module, plan: ContextPlan, axis: TensorAxis) -> dict[str, Whole]:
    """Divides the blocks of `model` in place; for each module that gives slices what makes the whole of one."""
    outputs: dict[str, Whole] = {}
    chain = Chain(axis)
    for name, block in plan.blocks.items():
        if block.opens:
            chain = Chain(axis)
        give_role(model.get_submodule(name), Role(name, block, chain))
        for inner, dim in block.outputs.items():
            if dim is not None:
                outputs[f"{name}.{inner}"] = whole_output(chain, dim) if dim >= 0 else None
        if not block.closes:
            outputs[name] = whole_output(chain, SEQUENCE)
    return outputs


def both(first: Mapping[str, Whole], then: Mapping[str, Whole]) -> dict[str, Whole]:
    """What undoes two divisions of the same modules."""
    found = {**first, **then}
    for name in first.keys() & then.keys():
        found[name] = _composed(first[name], then[name])
    return found


def _composed(first: Whole, then: Whole) -> Whole:
    if first is None or then is None:
        return None
    return lambda tensor: then(first(tensor))
