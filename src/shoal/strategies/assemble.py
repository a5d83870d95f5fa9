"""The only place where a Plan becomes strategies, and a model what each rank holds of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
from shoal.strategies.sharded import ShardedOptimizer
from shoal.strategies.tensor_collectives import TensorAxis


@dataclass(frozen=True)
class Made:
    """How a model comes about and what it is for: its constructor, the seed's key, the loss, and a small batch."""

    make: Callable[[], nn.Module]
    key: int
    loss: Callable[[nn.Module, Any], Any]
    batch: Callable[[], Any]


def divide(made: Made, plan: Plan, mesh: Mesh, precision: Precision) -> Holding:
    """What this rank holds of a model; nowhere is there the whole. Collective: all ranks, a JSON gather.

    And on the tensor axis two broadcasts.
    """
    model, values = deferred(made.make, made.key)
    if precision.parameters != torch.float32:
        model.to(precision.parameters)
    parts: dict[str, Part] = {}
    partial: dict[str, tuple[str, ...]] = {}
    absent: set[str] = set()
    outputs: dict[str, Callable[[Tensor], Tensor] | None] = {}
    notes: list[str] = []
    sequences = None
    if plan.layout.context > 1:
        from shoal.strategies.context_parallel import Subject, apply_context, both, context_axis, plan_context

        # Proven on the whole model, applied to what another axis leaves of it.
        around = context_axis(mesh)
        subject = Subject(model, values.whole, made.loss, precision.inputs(made.batch()))
        sequences = plan_context(subject, around, mesh.device, plan.layout.tensor)
    if plan.layout.tensor > 1:
        from shoal.strategies.tensor_parallel import divide_model, wholes

        axis = TensorAxis.of(mesh)
        found = divide_model(model, axis, made.loss, lambda: precision.inputs(made.batch()), values.whole)
        parts |= found.parts
        partial |= dict.fromkeys(found.partial, ("tensor",))
        outputs |= wholes(found, axis)
        notes += [f"tensor: {line}" for line in found.describe()]
    if sequences is not None:
        outputs = both(apply_context(model, sequences, around), outputs)
        partial |= {name: (*partial.get(name, ()), "context") for name in sequences.partial}
        notes += [f"context: {line}" for line in sequences.notes]
    if shards_model(plan):
        from shoal.strategies.fully_sharded import shard  # half a second of torch, which other plans do not need

        shard(model, plan, mesh, precision)
    device = torch.device("cpu") if plan.shard.offload else mesh.device
    materialise(model, values.whole, parts, absent, device)
    return Holding(mesh, model, parts, partial, outputs=outputs, notes=notes)


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
