"""One rank of a plan: what it will send in a step and hold at its peak, put together from the formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.plan.plan import Plan
from shoal.planner.algorithms import data_parallel
from shoal.planner.communication import (
    Array,
    Gradients,
    Sharding,
    Volumes,
    completed,
    exact_data_parallel,
    fully_sharded,
    norm,
    sharded_optimizer,
    sums,
)
from shoal.planner.memory import (
    Footprint,
    StateShape,
    bucketed,
    cut,
    exact,
    gathered_parameters,
    optimizer_state,
    owned,
    scattered_gradients,
    sharded_parameters,
    whole,
)


@dataclass(frozen=True)
class Described:
    """A step on one rank as the formulas need to know it: of what the rank holds.

    `sharding` is given where fully_shard cuts the model. `frozen` are parameters that are not trained; `held[r]` the
    grains of rank r, on which exact mode's traffic depends; `activations` the bytes that autograd keeps at its peak,
    where they are known. `within`: what forwards and backwards send where a tensor axis divides the model, and
    `partial` the parameters whose gradients are summed over it afterwards.
    """

    gradients: Gradients
    frozen: tuple[Array, ...] = ()
    state: StateShape | None = None
    num_grains: int = 1
    held: Sequence[Sequence[int]] = ((0,),)
    activations: int | None = None
    sharding: Sharding | None = None
    within: Volumes | None = None
    partial: tuple[Array, ...] = ()


def traffic(plan: Plan, described: Described, rank: int) -> Volumes | None:
    """Messages and bytes of a step on `rank`, from its agreement to its update; None for layouts without a formula."""
    if not _is_known(plan, described):
        return None
    layout, gradients = plan.degrees, described.gradients
    if described.sharding is not None:
        return fully_sharded(described.sharding).plus(sums(gradients, len(gradients.parameters)), norm())
    if plan.execution.exact:
        reduced = exact_data_parallel(gradients, described.held, described.num_grains, rank)
    else:
        summed = data_parallel(gradients, layout, plan.collectives.all_reduce, rank)
        if summed is None:
            return None
        reduced = summed
    if described.within is not None:
        return reduced.plus(described.within, completed(described.partial), norm())
    return reduced.plus(sharded_optimizer(gradients, layout))


def memory(plan: Plan, described: Described, rank: int) -> Footprint | None:
    """Peak bytes on `rank` by category; None for layouts without a formula."""
    if not _is_known(plan, described):
        return None
    layout, gradients = plan.degrees, described.gradients
    if described.sharding is not None:
        return _sharded(described, described.sharding, layout.coordinate(rank).shard)
    updated = owned(gradients.parameters, layout.shard, layout.coordinate(rank).shard)
    if plan.execution.exact:
        summed = exact(gradients, described.held, described.num_grains, rank)
    else:
        summed = bucketed(gradients, layout, plan.collectives.all_reduce == "native")
    return Footprint(
        parameters=whole((*gradients.parameters, *described.frozen)),
        gathered=0,
        gradients=summed,
        optimizer=optimizer_state(updated, described.state) if described.state is not None else None,
        activations=described.activations,
    )


def _sharded(described: Described, sharding: Sharding, place: int) -> Footprint:
    rows = [cut(array, place, sharding.degree) for unit in sharding.units for array in unit]
    return Footprint(
        parameters=sharded_parameters(sharding),
        gathered=gathered_parameters(sharding),
        gradients=scattered_gradients(sharding),
        optimizer=optimizer_state(rows, described.state) if described.state is not None else None,
        activations=described.activations,
    )


def _is_known(plan: Plan, described: Described) -> bool:
    layout = plan.layout
    if layout.tensor > 1:
        wide = plan.precision.parameters == plan.precision.compute == "float32"
        alone = layout.shard == layout.pipeline == layout.context == 1 and plan.memory.recompute == "none"
        return wide and alone and described.within is not None
    divided = layout.shard > 1 and plan.shard.level != "optimizer"
    return plan.degrees.shares_grains == 1 and not plan.shard.offload and divided == (described.sharding is not None)
