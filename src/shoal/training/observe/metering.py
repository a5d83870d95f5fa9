"""Measured traffic and memory of a run's first steps, next to the predictions of the formulas.

Each storage counts once, so that a view costs nothing and a parameter cut by fully_shard counts as its shard.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.checkpoint.whole_optimizer import states
from shoal.distributed.traffic_meter import Traffic
from shoal.hardware.values import kind_of
from shoal.numerics.isolation import YieldingHooks
from shoal.numerics.precision import Precision
from shoal.parallel.base import Strategy
from shoal.parallel.model.sharded_model import ShardedModel, local
from shoal.parallel.shard.torch_release import param_groups
from shoal.plans.accounting.collectives import Array, Footprint, Gradients, Sharding, StateShape, Volumes, state_shape
from shoal.plans.accounting.model_parallel import Partial
from shoal.plans.accounting.rank import Described, memory, traffic
from shoal.plans.grains import Grain, microbatches, share
from shoal.plans.plan import Plan
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


def describe(
    sharded_model: ShardedModel, optimizer: torch.optim.Optimizer, plan: Plan, precision: Precision, shares: Shares
) -> Described:
    """Describe this rank's measured step for the formulas."""
    layout, division, rank, grains = plan.layout, sharded_model.division, sharded_model.mesh.rank, list(shares.grains)
    parts = [share(grains, part, layout.divides_grains, layout.shares) for part in range(layout.divides_grains)]
    places = [layout.coordinate(other) for other in range(layout.world_size)]
    part_of_rank = [place.data * layout.shard + place.shard for place in places]
    grains_of_ranks = [[grain.index for grain in parts[part]] for part in part_of_rank]
    # Samples of this rank's microbatches, with fillers if ranks synchronize in every microbatch.
    sizes = [[sum(g.size for g in run) for run in microbatches(p, shares.grains_per_microbatch)] for p in parts]
    filler = next(of_part[0] for of_part in sizes if of_part)
    own = sizes[part_of_rank[rank]]
    samples = (*own, *[filler] * ((max(map(len, sizes)) - len(own)) if plan.shards_model else 0))
    # Gradients that are summed after the backward, by axis.
    by_axis: dict[str, list[nn.Parameter]] = {}
    for name, axes in division.partial.items():
        parameter = sharded_model.model.get_parameter(name)
        for axis in axes if parameter.requires_grad else ():
            by_axis.setdefault(axis, []).append(parameter)
    partials = []
    for axis, summed in sorted(by_axis.items()):
        on_rank = [p for p in summed if axis == "pipeline" or not p.is_meta]
        shapes = [division.cut(tuple(p.shape)) if p.is_meta else tuple(local(p).shape) for p in on_rank]
        of_axis = tuple((prod(shape), p.itemsize) for shape, p in zip(shapes, on_rank, strict=True))
        partials.append(Partial(axis, len(summed), of_axis))
    gradients = Gradients(
        tuple(array(p) for _, p in sharded_model.parameters() if p.requires_grad),
        reduce_itemsize=precision.reduce.itemsize,
        on_cpu=precision.device.type == "cpu",
        buffer_numel=shares.num_buffer_values,
    )
    here = {name.rpartition(".")[0] for name, _ in sharded_model.parameters()}  # modules that this rank computes
    return Described(
        gradients,
        frozen=tuple(array(p) for _, p in sharded_model.parameters() if not p.requires_grad),
        state=optimizer_shape(optimizer),
        num_grains=shares.num_grains,
        grains_of_ranks=grains_of_ranks,
        activations=planned_activations(plan, precision.device.type, rank),
        sharding=sharding(
            sharded_model, plan, precision, -(-max(map(len, grains_of_ranks)) // shares.grains_per_microbatch)
        ),
        within=division.sends(samples) if division.sends is not None else None,
        staged=division.staged,
        sliced=tuple(b for b in division.sliced if any(f"{name}.".startswith(f"{b.name}.") for name in here)),
        samples=samples,
        partial=tuple(partials),
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
    return int(by_rank[plan.layout.coordinate(rank).pipeline])


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
        resident=frozenset(range(len(units))) if plan.shard.level == "gradients" else frozenset(),
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


def storage_bytes(tensors: Iterable[Any]) -> int:
    """Return the bytes of the tensors' storages, each storage once. A DTensor counts with its local part."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        storage = _storage(tensor)
        if storage is not None:
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def _storage(tensor: Any) -> torch.UntypedStorage | None:
    tensor = getattr(tensor, "_local_tensor", tensor)
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        return None
    return tensor.untyped_storage()


class _Saved:
    """Tensor that autograd saves. It counts for as long as autograd references this object.

    The tensor is detached: a saved output would reference its own operation. Without a backward that releases it, as in
    a backward in two halves, both would stay in memory. Autograd restores the history of an unpacked tensor.
    """

    __slots__ = ("_count", "key", "tensor", "version")

    def __init__(self, count: SavedTensors, tensor: Tensor, key: int | None) -> None:
        self._count, self.tensor, self.key, self.version = count, tensor.detach(), key, tensor._version

    def __del__(self) -> None:
        if self.key is not None:
            self._count.release(self.key)


class SavedTensors:
    """Counter of the bytes that autograd saves for the backward. `peak`: the maximum at one time.

    Each storage counts once. Storages in `excluded`, those of parameters, do not count. Recomputed regions have hooks
    of their own: their inputs count here, and recomputed tensors do not.
    """

    def __init__(self) -> None:
        self.excluded: set[int] = set()
        self.peak = 0
        self._now = 0
        self._holders: dict[int, list[int]] = {}  # storage: [holders, bytes]
        self._hooks: YieldingHooks | None = None

    def exclude(self, tensors: Iterable[Any]) -> None:
        """Exclude the storages of these tensors from the count."""
        self.excluded |= {s._cdata for t in tensors if (s := _storage(t)) is not None}

    def start(self) -> None:
        """Start to count."""
        self.peak = self._now
        if self._hooks is None:
            self._hooks = YieldingHooks(self._pack, self._unpack)
            self._hooks.__enter__()

    def stop(self) -> int:
        """End the count, if it runs, and return the peak in bytes."""
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__()
        return self.peak

    def _pack(self, tensor: Tensor) -> _Saved:
        with torch._C.DisableTorchFunction():  # of a GrainScope: these calls are not the model's
            storage = _storage(tensor)
            if storage is None or storage._cdata in self.excluded:
                return _Saved(self, tensor, None)
            holder = self._holders.setdefault(storage._cdata, [0, storage.nbytes()])
            holder[0] += 1
            if holder[0] == 1:
                self._now += holder[1]
                self.peak = max(self.peak, self._now)
            return _Saved(self, tensor, storage._cdata)

    def _unpack(self, saved: _Saved) -> Tensor:
        with torch._C.DisableTorchFunction():
            version = saved.tensor._version
        if version != saved.version:  # with hooks autograd does not check this itself
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {list(saved.tensor.shape)} is at version {version}; "
                f"expected version {saved.version} instead"
            )
        return saved.tensor

    def release(self, key: int) -> None:
        """Remove one reference to a storage from the count."""
        holder = self._holders[key]
        holder[0] -= 1
        if not holder[0]:
            self._now -= holder[1]
            del self._holders[key]


class GatheredBytes:
    """Bytes of parameters that fully_shard has gathered, in all units of a model. `peak`: the maximum in `look`."""

    def __init__(self, model: nn.Module) -> None:
        self.modules: list[Any] = [m for m in model.modules() if hasattr(m, "_get_fsdp_state")]
        self.groups = [group for m in self.modules for group in param_groups(m)]
        self.peak = 0

    def parameters(self) -> list[Tensor]:
        """Return the tensors with gathered parameters; their storages are empty while nothing is gathered."""
        gathered = [p for group in self.groups for p in group.fsdp_params]
        return [t for p in gathered for t in getattr(p, "all_gather_outputs", [])]

    def gradients(self) -> list[Tensor]:
        """Return the gradients of gathered parameters that wait for the scatter, and the gradients of shards."""
        gathered = [p for group in self.groups for p in group.fsdp_params]
        waiting = [p._unsharded_param.grad for p in gathered if hasattr(p, "_unsharded_param")]
        scattered = [p.sharded_param.grad for p in gathered]
        return [g for g in (*waiting, *scattered, *(p.unsharded_accumulated_grad for p in gathered)) if g is not None]

    def look(self, arriving: Iterable[Tensor] = ()) -> None:
        """Update the peak with the gathered parameters and the buffers that receive more."""
        results = [group._all_gather_result for group in self.groups]
        results += [s.all_gather_result for g in self.groups if (s := g.comm_ctx.all_gather_state) is not None]
        buffers = [r.all_gather_output for r in results if r is not None]
        self.peak = max(self.peak, storage_bytes([*self.parameters(), *buffers, *arriving]))


# Axes with collectives of activations, not of parameters.
_OF_ACTIVATIONS = ("tensor", "context", "pipeline")


class MemoryMeter:
    """Memory meter of one model's step: peak bytes by category between `start` and `stop`.

    Gradients are measured when a reduce_scatter starts and at `summed`, state and parameters at `stop`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        own: Callable[[int], int] = int,
    ) -> None:
        """Create the meter. `own`: this rank's part of all parameter bytes, if ranks share one copy of them."""
        self._model, self._optimizer, self._own = model, optimizer, own
        self._saved = SavedTensors()
        self._gathered = GatheredBytes(model)
        self._gradients = 0
        self._ends: list[Callable[[], None]] = []

    def start(self) -> None:
        """Start a measurement, before the first forward."""
        self.abandon()
        self._gradients, self._gathered.peak = 0, 0
        self._saved.exclude(self._parameters())
        self._saved.exclude(self._gathered.parameters())
        for group in self._gathered.groups:  # no module hook: pipeline stages gather within a module
            group.wait_for_unshard = functools.partial(self._unshard, group.wait_for_unshard)
            self._ends.append(functools.partial(delattr, group, "wait_for_unshard"))
        self._saved.start()

    def _unshard(self, unshard: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Gather a unit and record it. Its tensors do not count as activations if autograd saves them."""
        result = unshard(*args, **kwargs)
        self._saved.exclude(self._gathered.parameters())
        self._gathered.look()
        return result

    def collective(self, kind: str, group: str, outputs: list[Tensor], inputs: list[Tensor]) -> None:
        """Record the gathered parameters or gradients of a collective, as a listener of Traffic."""
        if not self._gathered.modules or group in _OF_ACTIVATIONS:
            return
        if kind == "all_gather":
            self._gathered.look(outputs)
        elif kind == "reduce_scatter":
            self.summed([*outputs, *inputs, *self._gathered.gradients()])

    def summed(self, buffers: Iterable[Any] = (), borrowed: Iterable[Any] = ()) -> None:
        """Record the gradients before or after their sum over ranks. `buffers`: gradients outside `parameter.grad`.

        `borrowed`: memory that counts elsewhere.
        """
        elsewhere = {s._cdata for t in borrowed if (s := _storage(t)) is not None}
        gradients = [p.grad for p in self._parameters() if p.grad is not None]
        own = [g for g in gradients if (s := _storage(g)) is None or s._cdata not in elsewhere]
        self._gradients = max(self._gradients, storage_bytes([*own, *buffers]))

    def stop(self) -> Footprint:
        """End the measurement after the update, and return the bytes by category."""
        self.abandon()
        optimizer_states = states(self._optimizer) if self._optimizer is not None else ()
        return Footprint(
            parameters=self._own(storage_bytes(self._parameters())),
            gathered=self._gathered.peak,
            gradients=self._gradients,
            optimizer=storage_bytes(v for state in optimizer_states if isinstance(state, dict) for v in state.values()),
            activations=self._saved.peak,
        )

    def _parameters(self) -> list[nn.Parameter]:
        """Return this rank's parameters. Parameters of other ranks are on the meta device."""
        return [p for p in self._model.parameters() if not p.is_meta]

    def abandon(self) -> None:
        """Remove the hooks."""
        self._saved.stop()
        while self._ends:
            self._ends.pop()()
