"""Communication volume and peak memory of one rank of a plan, from all formulas together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from shoal.plans.accounting.all_reduce import data_parallel
from shoal.plans.accounting.collectives import (
    Array,
    Gradients,
    Sharding,
    SizedCollective,
    Volumes,
    exact_data_parallel,
    fully_sharded,
    norm,
    owned,
    sharded_optimizer,
    sums,
)
from shoal.plans.accounting.compressed import buffers, compressed
from shoal.plans.accounting.memory import (
    Footprint,
    StateShape,
    bucketed,
    cut,
    exact,
    gathered_parameters,
    optimizer_state,
    scattered_gradients,
    sharded_parameters,
    shared_pieces,
    whole,
)
from shoal.plans.accounting.model_parallel import Partial, SlicedBlock, Staged, completed, exchanges, messages
from shoal.plans.plan import Plan


@dataclass(frozen=True)
class Described:
    """Description of one rank's step for the formulas: tensors and grains of the rank.

    `sharding` is given where fully_shard cuts the model. `frozen` are parameters that are not trained; `held[r]` the
    grains of rank r, on which exact mode's traffic depends; `activations` the bytes that autograd keeps at its peak,
    where they are known. `within`: what forwards and backwards send where a tensor axis divides the model. `staged` are
    the stages of a pipeline, `sliced` this rank's blocks of a context axis, `samples` the size of each microbatch,
    `partial` the gradients that are summed after the backward, `num_cut` all trainable parameters with a dim to cut.
    """

    gradients: Gradients
    frozen: tuple[Array, ...] = ()
    state: StateShape | None = None
    num_grains: int = 1
    held: Sequence[Sequence[int]] = ((0,),)
    activations: int | None = None
    sharding: Sharding | None = None
    within: Sequence[SizedCollective] | None = None
    staged: Staged | None = None
    samples: Sequence[int] = ()
    sliced: Sequence[SlicedBlock] = ()
    partial: Sequence[Partial] = ()
    num_cut: int = 0


def traffic(plan: Plan, described: Described, rank: int) -> Volumes | None:
    """Messages and bytes of a step on `rank`, from its agreement to its update; None for layouts without a formula."""
    if not _is_known(plan, described):
        return None
    layout, gradients = plan.degrees, described.gradients
    if described.sharding is not None:
        summed: Iterable[SizedCollective] | None = chain(
            fully_sharded(described.sharding), [sums(gradients, described.num_cut)]
        )
    else:
        summed = _summed(plan, described, rank)
    if summed is None:
        return None
    return Volumes.of(
        summed,
        sharded_optimizer(gradients, layout) if described.sharding is None else (),
        completed(described.partial),
        [norm()] if layout.shares_grains > 1 or described.sharding is not None else (),
        described.within or (),
        exchanges(described.sliced, layout, rank, described.samples),
        messages(described.staged, described.samples) if described.staged is not None else (),
    )


def _summed(plan: Plan, described: Described, rank: int) -> Iterable[SizedCollective] | None:
    """The sums of whole gradients; None where they depend on who is on which host."""
    layout, gradients, algorithm = plan.degrees, described.gradients, plan.collectives.all_reduce
    if plan.execution.exact:
        shared = algorithm == "shared_memory"
        return () if shared else exact_data_parallel(gradients, described.held, described.num_grains, rank)
    if plan.collectives.compression != "none" and layout.world_size > 1:
        return compressed(gradients, plan, rank, sampled=plan.compression.guard_every == 1)
    return data_parallel(gradients, layout, algorithm, rank)


def memory(plan: Plan, described: Described, rank: int) -> Footprint | None:
    """Peak bytes on `rank` by category; None for layouts without a formula."""
    if not _is_known(plan, described):
        return None
    layout, gradients = plan.degrees, described.gradients
    if described.sharding is not None:
        return _sharded(described, described.sharding, layout.coordinate(rank).shard)
    updated = owned(gradients.parameters, layout.shard)[layout.coordinate(rank).shard]
    if plan.execution.exact:
        summed = exact(gradients, described.held, described.num_grains, rank)
        if plan.collectives.all_reduce == "shared_memory" and len(described.held) > 1:
            summed += shared_pieces(gradients, described.held, described.num_grains)
    elif plan.collectives.compression != "none" and layout.world_size > 1:
        summed = buffers(gradients, plan)
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
    trained = (array for unit in sharding.units for array in unit if array.trainable)
    rows = [cut(array, place, sharding.degree) for array in trained]
    return Footprint(
        parameters=sharded_parameters(sharding),
        gathered=gathered_parameters(sharding) if described.staged is None else None,
        gradients=scattered_gradients(sharding) if described.staged is None else None,
        optimizer=optimizer_state(rows, described.state) if described.state is not None else None,
        activations=described.activations,
    )


def _is_known(plan: Plan, described: Described) -> bool:
    layout = plan.layout
    # What computes again, or in 16 bits, sends other things than what was seen of it.
    plain = plan.memory.recompute == "none" and plan.precision.compute == plan.precision.parameters == "float32"
    if layout.tensor > 1:
        alone = layout.shard == layout.pipeline == layout.context == 1
        return plain and alone and described.within is not None
    staged = layout.pipeline == 1 or described.staged is not None
    sliced = layout.context == 1 or (plain and bool(described.sliced))
    return staged and sliced and not plan.shard.offload and plan.shards_model == (described.sharding is not None)
