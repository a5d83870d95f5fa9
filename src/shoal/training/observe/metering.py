"""Measured traffic and memory of a run's first steps, next to the predictions of the formulas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.distributed.traffic_meter import Traffic
from shoal.hardware.values import kind_of
from shoal.numerics.precision import Precision
from shoal.parallel.base import Strategy
from shoal.parallel.model.sharded_model import ShardedModel, local
from shoal.plans.accounting.collectives import Array, Gradients, Sharding, Volumes
from shoal.plans.accounting.memory import Footprint, StateShape, state_shape
from shoal.plans.accounting.model_parallel import Partial
from shoal.plans.accounting.rank import Described, memory, traffic
from shoal.plans.grains import Grain, microbatches, share
from shoal.plans.plan import Layout, Plan
from shoal.training.observe.memory_meter import GatheredBytes, MemoryMeter
from shoal.training.observer import Observer

# The second step counts: the first step still creates caches and lazy states. Later steps send the same, and run
# without the cost of a measurement.
MEASURED_STEPS = 2


class StepMeter(Observer):
    """Meter of traffic and memory in the first steps that update.

    A measurement covers a step from its agreement to the end of its update. It excludes checkpoints,
    evaluations, and agreements that do not travel with the sums.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.volumes = Volumes()
        self.footprint: Footprint | None = None
        self.attached = False
        self._left = self._current = 0

    @property
    def looks(self) -> bool:
        return bool(self._left)

    @property
    def always_looks(self) -> bool:
        return False

    def attach(
        self,
        sharded_model: ShardedModel,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        stage_groups: Iterable[dist.ProcessGroup] = (),
    ) -> None:
        """Attach the meters before the first step. `stage_groups`: groups for messages between pipeline stages."""
        self._memory, self._strategy = (
            MemoryMeter(sharded_model.model, optimizer, strategy.update_division.own_bytes),
            strategy,
        )
        self._traffic = Traffic(sharded_model.mesh.groups, self._memory.collective, stage_groups)
        self._left, self.attached = MEASURED_STEPS, True

    def begin(self, step: int, factor: float) -> None:
        if self._left:
            self._current = step
            self._traffic.start()
            self._memory.start()

    def reduced(self, loss: float, weight: float, scale: float) -> None:
        if self._left:
            self._memory.summed(*self._strategy.gradient_memory())

    def updated(self, skipped: str | None) -> None:
        if self._left:
            volumes, footprint = self._traffic.stop(), self._memory.stop()
            if skipped is None:
                self.step, self.volumes, self.footprint = self._current, volumes, footprint
                self._left -= 1

    def close(self) -> None:
        """End a measurement that an error interrupted."""
        self._left = 0
        if self.attached:
            self._traffic.stop()
            self._memory.abandon()

    def to_json(self) -> dict[str, Any] | None:
        """Return {"step": from 1, "traffic", "memory"}, or None if no step was measured."""
        if self.step is None or self.footprint is None:
            return None
        return {"step": self.step + 1, "traffic": self.volumes.to_json(), "memory": self.footprint.to_json()}


def blocks(rows: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
    """Return the blocks `traffic` and `memory` of a result, from the measurement and prediction of each rank."""
    by_kind: dict[str, Any] = {}
    for kind in ("traffic", "memory"):
        ranks = [
            {"rank": rank, "step": own["step"], "measured": own[kind], "predicted": (own["predicted"] or {}).get(kind)}
            for rank, own in enumerate(rows)
            if own is not None
        ]
        by_kind[kind] = {"ranks": ranks} if ranks else None
    return by_kind


def predicted(plan: Plan, described: Described, rank: int) -> dict[str, Any]:
    """Return {"traffic", "memory"} from the formulas. A value is None if the layout has no formula."""
    volumes, footprint = traffic(plan, described, rank), memory(plan, described, rank)
    return {
        "traffic": volumes.to_json() if volumes is not None else None,
        "memory": footprint.to_json() if footprint is not None else None,
    }


@dataclass(frozen=True)
class Shares:
    """Grains of the measured step, in a job of `num_grains`. `num_buffer_values`: buffer values in the step's sums."""

    num_grains: int
    grains: Sequence[Grain]
    grains_per_microbatch: int = 1
    num_buffer_values: int = 0

    def grains_of_ranks(self, layout: Layout) -> list[list[int]]:
        """Return the indices of each rank's grains."""
        places = [layout.coordinate(rank) for rank in range(layout.world_size)]
        parts = [share(list(self.grains), p.data * layout.shard + p.shard, layout.divides_grains) for p in places]
        return [[grain.index for grain in part] for part in parts]

    def samples(self, layout: Layout, rank: int, syncs_every_microbatch: bool) -> list[int]:
        """Return the number of samples of a rank's microbatches, with fillers if ranks sync in every microbatch."""
        parts = [share(list(self.grains), part, layout.divides_grains) for part in range(layout.divides_grains)]
        sizes = [[sum(g.size for g in run) for run in microbatches(p, self.grains_per_microbatch)] for p in parts]
        place = layout.coordinate(rank)
        own = sizes[place.data * layout.shard + place.shard]
        filler = next(own_sizes[0] for own_sizes in sizes if own_sizes)
        return own + [filler] * ((max(map(len, sizes)) - len(own)) if syncs_every_microbatch else 0)


def describe(
    sharded_model: ShardedModel, optimizer: torch.optim.Optimizer, plan: Plan, precision: Precision, shares: Shares
) -> Described:
    """Describe this rank's measured step for the formulas."""
    grains_of_ranks = shares.grains_of_ranks(plan.degrees)
    gradients = Gradients(
        tuple(array(p) for _, p in sharded_model.parameters() if p.requires_grad),
        reduce_itemsize=precision.reduce.itemsize,
        on_cpu=precision.device.type == "cpu",
        buffer_numel=shares.num_buffer_values,
    )
    here = {name.rpartition(".")[0] for name, _ in sharded_model.parameters()}  # modules that this rank computes
    layout, division, rank = plan.degrees, sharded_model.division, sharded_model.mesh.rank
    samples = tuple(shares.samples(layout, rank, plan.shards_model))
    return Described(
        gradients,
        frozen=tuple(array(p) for _, p in sharded_model.parameters() if not p.requires_grad),
        state=optimizer_shape(optimizer),
        num_grains=shares.num_grains,
        held=grains_of_ranks,
        activations=planned_activations(plan, precision.device.type, rank),
        sharding=sharding(
            sharded_model, plan, precision, -(-max(map(len, grains_of_ranks)) // shares.grains_per_microbatch)
        ),
        within=division.sends(samples) if division.sends is not None else None,
        staged=division.staged,
        sliced=tuple(b for b in division.sliced if any(f"{name}.".startswith(f"{b.name}.") for name in here)),
        samples=samples,
        partial=partial(sharded_model),
        num_cut=sum(p.requires_grad and p.ndim > 0 for p in sharded_model.model.parameters()),
    )


def planned_activations(plan: Plan, device: str, rank: int) -> int | None:
    """Return the bytes of saved activations on `rank` from the planner's trace.

    Return None for a hand-written plan, for another kind of device, and for selective recomputation, which saves
    tensors that the meter does not see.
    """
    by_rank, kind = plan.prediction.get("kept_bytes"), plan.prediction.get("device_kind")
    if plan.memory.recompute == "selective" or not by_rank or len(by_rank) != plan.layout.pipeline:
        return None
    if kind != kind_of(device):
        return None
    return int(by_rank[plan.degrees.coordinate(rank).pipeline])


def partial(sharded_model: ShardedModel) -> tuple[Partial, ...]:
    """Return the gradients that are summed after the backward, by axis."""
    by_axis: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for name, axes in sharded_model.division.partial.items():
        parameter = sharded_model.model.get_parameter(name)
        for axis in axes if parameter.requires_grad else ():
            by_axis.setdefault(axis, []).append((name, parameter))
    partials = []
    for axis, named in sorted(by_axis.items()):
        here = [p for _, p in named if axis == "pipeline" or not p.is_meta]
        shapes = [sharded_model.division.cut(tuple(p.shape)) if p.is_meta else tuple(local(p).shape) for p in here]
        sizes = tuple((prod(shape), p.itemsize) for shape, p in zip(shapes, here, strict=True))
        partials.append(Partial(axis, len(named), sizes))
    return tuple(partials)


def sharding(sharded_model: ShardedModel, plan: Plan, precision: Precision, count: int) -> Sharding | None:
    """Describe how fully_shard cuts a model, for `count` microbatches, or return None if it does not."""
    model, staged = sharded_model.model, sharded_model.division.staged
    groups = GatheredBytes(model).groups
    if not groups:
        return None
    places = {module: number for number, module in enumerate(model.modules())}
    inner = [group for group in groups if model not in group.modules]
    own = [p for group in groups if model in group.modules for p in group.fsdp_params]
    last = max((places[m] for group in inner for unit in group.modules for m in unit.modules()), default=-1)
    params = [*(group.fsdp_params for group in inner), own]
    units = [[array(p.sharded_param) for p in unit] for unit in params]
    names = {id(p): name for name, p in model.named_parameters()}
    uses = [
        sum(any(names.get(id(p.sharded_param)) in used for p in unit) for used in staged.used.values()) if staged else 1
        for unit in params
    ]
    return Sharding(
        tuple(map(tuple, units)),
        degree=plan.layout.shard,
        replicas=plan.layout.data,
        microbatches=count,
        kept=frozenset(range(len(units))) if plan.shard.level == "gradients" else frozenset(),
        gather_itemsize=precision.parameters.itemsize,
        reduce_itemsize=precision.reduce.itemsize,
        resharded=staged is None or plan.shard.level != "gradients",
        uses=tuple(uses),
        halves=staged is not None and staged.halves,
        reduce_every=plan.shard.reduce == "every_microbatch",
        root_early=sum(
            array(p.sharded_param).numel
            for p in own
            if places[p._module_info.module] > last and p.sharded_param.requires_grad
        ),
    )


def array(parameter: Tensor) -> Array:
    """Describe a parameter for the formulas."""
    kind = str(parameter.dtype).removeprefix("torch.")
    return Array(tuple(parameter.shape), parameter.itemsize, parameter.is_contiguous(), kind, parameter.requires_grad)


def optimizer_shape(optimizer: torch.optim.Optimizer) -> StateShape | None:
    """Return the state of an optimizer of torch.optim, or None for other optimizers or if its groups differ."""
    if not type(optimizer).__module__.startswith("torch.optim."):
        return None
    name = type(optimizer).__name__
    shapes = {
        state_shape(name, bool(g.get("amsgrad")), bool(g.get("momentum")), bool(g.get("centered")))
        for g in optimizer.param_groups
    }
    return shapes.pop() if len(shapes) == 1 else None
