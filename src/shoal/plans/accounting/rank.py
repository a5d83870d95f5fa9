"""Communication volume and peak memory of one rank of a plan, from all formulas together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.plans.accounting.all_reduce import compressed, compression_buffers, data_parallel
from shoal.plans.accounting.collectives import (
    NUM_ORDERS,
    Array,
    Footprint,
    Gradients,
    Sharding,
    SizedCollective,
    StateShape,
    Volumes,
    bucketed,
    cut,
    exact,
    exact_data_parallel,
    fully_sharded,
    gathered_parameters,
    norm,
    optimizer_state,
    owned,
    scattered_gradients,
    sharded_optimizer,
    sharded_parameters,
    shared_part,
    shared_pieces,
    sums,
    whole,
)
from shoal.plans.accounting.model_parallel import Partial, SlicedBlock, Staged, completed, exchanges, messages
from shoal.plans.plan import Plan


@dataclass(frozen=True)
class Described:
    """Description of one rank's step for the formulas: the rank's tensors and grains."""

    gradients: Gradients
    frozen: tuple[Array, ...] = ()  # parameters that are not trained
    state: StateShape | None = None
    num_grains: int = 1
    grains_of_ranks: Sequence[Sequence[int]] = ((0,),)  # the grains of each rank, which determine exact mode's traffic
    activations: int | None = None  # peak bytes that autograd saves, if known
    sharding: Sharding | None = None  # if fully_shard cuts the model
    within: Sequence[SizedCollective] | None = None  # in passes, if a tensor axis divides the model
    staged: Staged | None = None  # the stages of a pipeline
    samples: Sequence[int] = ()  # the size of each microbatch
    sliced: Sequence[SlicedBlock] = ()  # this rank's blocks of a context axis
    partial: Sequence[Partial] = ()  # gradients that are summed after the backward
    num_cut: int = 0  # number of trainable parameters with a dim to cut


def traffic(plan: Plan, described: Described, rank: int) -> Volumes | None:
    """Return messages and bytes of a step on `rank`, from agreement to update; None for layouts without a formula."""
    if not _is_known(plan, described):
        return None
    layout, gradients, sharding = plan.layout, described.gradients, described.sharding
    if sharding is not None:
        summed = [*fully_sharded(sharding), sums(gradients, described.num_cut + NUM_ORDERS), norm()]
    elif plan.collectives.all_reduce == "hierarchical" and layout.world_size > 1:
        return None  # it depends on the assignment of ranks to hosts
    else:
        sent: Iterable[SizedCollective] = ()
        algorithm = plan.collectives.all_reduce
        if plan.execution.exact and algorithm == "shared_memory":
            pass  # gradients are summed where they lie
        elif plan.execution.exact:
            sent = exact_data_parallel(gradients, described.grains_of_ranks, described.num_grains, rank)
        elif plan.collectives.compression != "none" and layout.world_size > 1:
            sent = compressed(gradients, plan, rank, sampled=plan.compression.guard_every == 1)
        else:
            sent = data_parallel(gradients, layout, algorithm, rank)
        summed = [
            *sent,
            *sharded_optimizer(gradients, layout, plan.shard.sizes),
            *([norm()] if layout.shares_grains > 1 else []),
        ]
    return Volumes.of(
        summed,
        completed(described.partial),
        described.within or (),
        exchanges(described.sliced, layout, rank, described.samples),
        messages(described.staged, described.samples) if described.staged is not None else (),
    )


def memory(plan: Plan, described: Described, rank: int) -> Footprint | None:
    """Return the peak bytes on `rank` by category; None for layouts without a formula."""
    if not _is_known(plan, described):
        return None
    layout, gradients, sharding, state = plan.layout, described.gradients, described.sharding, described.state
    if sharding is not None:
        trained = (array for unit in sharding.units for array in unit if array.trainable)
        rows = [cut(array, layout.coordinate(rank).shard, sharding.degree) for array in trained]
        return Footprint(
            parameters=sharded_parameters(sharding),
            gathered=gathered_parameters(sharding) if described.staged is None else None,
            gradients=scattered_gradients(sharding) if described.staged is None else None,
            optimizer=optimizer_state(rows, state) if state is not None else None,
            activations=described.activations,
        )
    updated = owned(gradients.parameters, layout.shard, plan.shard.sizes)[layout.coordinate(rank).shard]
    parameters = whole((*gradients.parameters, *described.frozen))
    if plan.shares_memory:
        updated = owned(gradients.parameters, layout.world_size)[rank]
        parameters = shared_part(parameters, layout.world_size, rank)
    if plan.execution.exact:
        summed = exact(gradients, described.grains_of_ranks, described.num_grains, rank)
        if plan.shares_memory:  # the sum shares the pieces' memory
            summed -= gradients.numel * gradients.reduce_itemsize
        if plan.collectives.all_reduce == "shared_memory" and len(described.grains_of_ranks) > 1:
            summed += shared_pieces(gradients, described.grains_of_ranks, described.num_grains)
    elif plan.collectives.compression != "none" and layout.world_size > 1:
        summed = compression_buffers(gradients, plan)
    else:
        summed = bucketed(gradients, layout, plan.collectives.all_reduce == "native")
    return Footprint(
        parameters=parameters,
        gathered=0,
        gradients=summed,
        optimizer=optimizer_state(updated, state) if state is not None else None,
        activations=described.activations,
    )


def _is_known(plan: Plan, described: Described) -> bool:
    layout = plan.layout
    # Recomputation and 16-bit computing send other collectives than were observed.
    plain = plan.memory.recompute == "none" and plan.precision.compute == plan.precision.parameters == "float32"
    if layout.expert > 1:  # bytes follow the routing
        return False
    if layout.tensor > 1:
        alone = layout.shard == layout.pipeline == layout.context == 1
        return plain and alone and described.within is not None
    staged = layout.pipeline == 1 or described.staged is not None
    sliced = layout.context == 1 or (plain and bool(described.sliced))
    return staged and sliced and not plan.shard.offload and plan.shards_model == (described.sharding is not None)
