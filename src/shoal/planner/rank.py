"""One rank of a plan: what it will send in a step and hold at its peak, put together from the formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.plan.plan import Plan
from shoal.planner.communication import (
    Array,
    Gradients,
    Volumes,
    data_parallel,
    exact_data_parallel,
    sharded_optimizer,
)
from shoal.planner.memory import Footprint, StateShape, bucketed, exact, optimizer_state, owned, whole


@dataclass(frozen=True)
class Described:
    """A step as the formulas need to know it.

    `frozen` are parameters that are not trained; `held[r]` the grains of rank r, of which exact mode's traffic depends;
    `activations` the bytes that autograd keeps at its peak, where they are known.
    """

    gradients: Gradients
    frozen: tuple[Array, ...] = ()
    state: StateShape | None = None
    num_grains: int = 1
    held: Sequence[Sequence[int]] = ((0,),)
    activations: int | None = None


def traffic(plan: Plan, described: Described, rank: int) -> Volumes | None:
    """Messages and bytes of a step on `rank`, from its agreement to its update; None for layouts without a formula."""
    if not _is_known(plan):
        return None
    layout, gradients = plan.degrees, described.gradients
    if plan.execution.exact:
        sums = exact_data_parallel(gradients, described.held, described.num_grains, rank)
    else:
        sums = data_parallel(gradients, layout.world_size)
    return sums.plus(sharded_optimizer(gradients, layout))


def memory(plan: Plan, described: Described, rank: int) -> Footprint | None:
    """Peak bytes on `rank` by category; None for layouts without a formula."""
    if not _is_known(plan):
        return None
    layout, gradients = plan.degrees, described.gradients
    updated = owned(gradients.parameters, layout.shard, layout.coordinate(rank).shard)
    if plan.execution.exact:
        summed = exact(gradients, described.held, described.num_grains, rank)
    else:
        summed = bucketed(gradients, layout.world_size)
    return Footprint(
        parameters=whole((*gradients.parameters, *described.frozen)),
        gathered=0,
        gradients=summed,
        optimizer=optimizer_state(updated, described.state) if described.state is not None else None,
        activations=described.activations,
    )


def _is_known(plan: Plan) -> bool:
    layout = plan.layout
    whole_model = layout.tensor == layout.pipeline == layout.context == 1
    return whole_model and (layout.shard == 1 or plan.shard.level == "optimizer")
