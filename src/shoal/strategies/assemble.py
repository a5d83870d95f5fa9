"""The only place where a Plan becomes strategies, and a model what each rank holds of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from shoal.deferred import deferred
from shoal.holding import Holding
from shoal.mesh import Mesh
from shoal.parts import Part
from shoal.plan.plan import Plan
from shoal.plan.resolve import refuse_unsupported
from shoal.precision import Precision
from shoal.strategies.base import Mark, Strategy
from shoal.strategies.data_parallel import DataParallel, ExactDataParallel
from shoal.strategies.materialise import materialise
from shoal.strategies.recompute import recompute
from shoal.strategies.sharded import ShardedOptimizer


def divide(make: Callable[[], nn.Module], key: int, plan: Plan, mesh: Mesh, precision: Precision) -> Holding:
    """What this rank holds of the model that `make` constructs under the seed `key`; nowhere is there the whole.

    Collective: all ranks, a JSON gather.
    """
    model, values = deferred(make, key)
    if precision.parameters != torch.float32:
        model.to(precision.parameters)
    parts: dict[str, Part] = {}
    partial: dict[str, tuple[str, ...]] = {}
    absent: set[str] = set()
    recompute(model, plan.memory.recompute)
    if plan.shards_model:
        from shoal.strategies.fully_sharded import shard  # half a second of torch, which other plans do not need

        shard(model, plan, mesh, precision)
    device = torch.device("cpu") if plan.shard.offload else mesh.device
    materialise(model, values.whole, parts, absent, device)
    return Holding(mesh, model, parts, partial)


def assemble(plan: Plan, holding: Holding, parameters: Sequence[Tensor], num_grains: int, mark: Mark) -> Strategy:
    """The strategy that a plan asks for. Raises: PlanError for what this version does not execute."""
    refuse_unsupported(plan)
    mesh = holding.mesh
    reduce = Precision.of(plan.precision, mesh.device).reduce
    strategy: Strategy
    if plan.shards_model:
        from shoal.strategies.fully_sharded import FullySharded

        return FullySharded(holding.model, mesh, mark)
    if plan.execution.exact:
        strategy = ExactDataParallel(parameters, mesh, reduce, num_grains, mark)
    else:
        strategy = DataParallel(parameters, mesh, reduce, mark)
    return ShardedOptimizer(strategy, parameters, mesh, mark) if plan.layout.shard > 1 else strategy
