"""The only place where a Plan becomes strategies, and a model what each rank holds of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal.deferred import deferred
from shoal.holding import Holding
from shoal.mesh import COLLECTIVE_TIMEOUT, Mesh
from shoal.parts import Part
from shoal.plan.plan import Plan
from shoal.plan.resolve import refuse_unsupported
from shoal.precision import Precision
from shoal.strategies.base import Mark, Strategy
from shoal.strategies.data_parallel import DataParallel, ExactDataParallel
from shoal.strategies.materialise import materialise
from shoal.strategies.sharded import ShardedOptimizer

if TYPE_CHECKING:
    from shoal.strategies.pipeline import Pipeline
    from shoal.strategies.stages import Function


@dataclass(frozen=True)
class Sample:
    """A job's loss as it is computed, and some batch of its data on the device: what a model is cut by."""

    function: Function
    batch: Any


def divide(
    make: Callable[[], nn.Module],
    key: int,
    plan: Plan,
    mesh: Mesh,
    precision: Precision,
    *,
    sample: Callable[[], Sample],
) -> tuple[Holding, Pipeline | None]:
    """What this rank holds of the model that `make` constructs under the seed `key`; nowhere is there the whole.

    And the pipeline that computes it, where the plan has one. Collective: all ranks, a JSON gather.
    """
    model, values = deferred(make, key)
    if precision.parameters != torch.float32:
        model.to(precision.parameters)
    parts: dict[str, Part] = {}
    partial: dict[str, tuple[str, ...]] = {}
    absent: set[str] = set()
    pipeline: Pipeline | None = None
    if plan.layout.pipeline > 1:
        pipeline = _cut(model, sample(), plan, mesh)
        named = [*model.named_parameters(), *model.named_buffers()]
        absent = {name for name, _ in named}.difference(pipeline.held)
        partial = dict.fromkeys(pipeline.shared & {name for name, _ in model.named_parameters()}, ("pipeline",))
    if shards_model(plan):
        from shoal.strategies.fully_sharded import shard  # half a second of torch, which other plans do not need

        shard(model, plan, mesh, precision)
    device = torch.device("cpu") if plan.shard.offload else mesh.device
    materialise(model, values.whole, parts, absent, device)
    is_elsewhere = pipeline.is_elsewhere if pipeline is not None else lambda: False
    return Holding(mesh, model, parts, partial, is_elsewhere=is_elsewhere), pipeline


def _cut(model: nn.Module, sample: Sample, plan: Plan, mesh: Mesh) -> Pipeline:
    """The model's stages. Collective: all ranks, new groups."""
    from shoal.strategies.pipeline import Pipeline  # as above
    from shoal.strategies.stages import Stages
    from shoal.strategies.wires import Wires

    section = plan.pipeline
    num_stages = plan.layout.pipeline * section.stages_per_rank
    stages = Stages.build(
        model, sample.function, sample.batch, num_stages=num_stages, split=section.split, device=mesh.device
    )
    wires = Wires.open(list(mesh.layout.groups("pipeline")), mesh.rank, COLLECTIVE_TIMEOUT)
    return Pipeline(stages, wires, section.schedule, section.stages_per_rank, mesh.device)


def shards_model(plan: Plan) -> bool:
    """Whether gradients, or parameters too, are divided over the shard axis."""
    return plan.layout.shard > 1 and plan.shard.level != "optimizer"


def divides_model(plan: Plan) -> bool:
    """Whether ranks hold parts of the model."""
    return shards_model(plan) or plan.degrees.shares_grains > 1


def assemble(plan: Plan, holding: Holding, parameters: Sequence[Tensor], num_grains: int, mark: Mark) -> Strategy:
    """The strategy that a plan asks for. Raises: PlanError for what this version does not execute."""
    refuse_unsupported(plan)
    mesh = holding.mesh
    reduce = Precision.of(plan.precision, mesh.device).reduce
    strategy: Strategy
    if shards_model(plan):
        from shoal.strategies.fully_sharded import FullySharded

        return FullySharded(holding.model, mesh, mark)
    if plan.execution.exact:
        strategy = ExactDataParallel(parameters, mesh, reduce, num_grains, mark)
    else:
        strategy = DataParallel(parameters, mesh, reduce, mark)
    return ShardedOptimizer(strategy, parameters, mesh, mark) if plan.layout.shard > 1 else strategy
