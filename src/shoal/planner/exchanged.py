"""Seconds that a rank spends outside of its passes: on sums of gradients, gathered parameters, and the update.

On a GPU collectives run beside the compute that can hide them. On a CPU the cores that compute move every byte of a
collective too, so that nothing of it is hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil

from shoal.plan.plan import Plan
from shoal.planner.communication import Array, owners
from shoal.planner.compute import ITEMSIZE, Computer, Share
from shoal.planner.division import (
    GLOO_BUCKET_BYTES,
    NCCL_BUCKET_BYTES,
    PIECE_BYTES,
    divide_into_buckets,
    gathers,
    pack,
)
from shoal.planner.exchange_time import Group, Network
from shoal.planner.footprint import StageSize
from shoal.planner.overlap import gathered, hidden
from shoal.planner.profile import Profile, Unit, Weight
from shoal.planner.stage_cost import Passes
from shoal.planner.workload import Program

# What a rank says in an agreement on an error that nobody has, and in the sums that travel by themselves: about this.
_SMALL_BYTES = 128.0
_UPDATE = "update"  # under this name a device tells how fast an optimizer is


@dataclass(frozen=True)
class Holder:
    """A rank's units and their sizes, as far as its sums and its update depend on them."""

    units: Sequence[Unit]
    size: StageSize

    @property
    def held(self) -> float:
        """Bytes that a step goes through: activations, parameters, gradients and a state."""
        return self.size.saved + 4 * self.size.parameter_bytes

    @cached_property
    def num_tensors(self) -> int:
        """Parameters that are trained."""
        return sum(weight.trainable for unit in self.units for weight in unit.body.weights)


@dataclass(frozen=True)
class Exchanged:
    """What ranks exchange of a model between its passes, and its update."""

    profile: Profile
    network: Network
    program: Program
    _known: dict[tuple[object, ...], tuple[Sequence[Unit], list[float]]] = field(default_factory=dict, repr=False)

    # -------------------------------------------------------------------------------------------------- the gradients

    def gradients(self, plan: Plan, computer: Computer, holder: Holder, behind: float, waits: bool) -> float:
        """What shows of the sums of gradients over data and shard ranks, and of a step's small sums.

        `behind`: seconds of the last backward, which may hide them; `waits`: the device does, for the host.
        """
        units = holder.units
        layout = plan.layout
        if layout.world_size == 1:
            return 0.0
        small = self._small(plan) + self._completed(plan, units)
        if plan.shards_model or layout.data * layout.shard == 1:
            return small
        if computer.device.kind == "cpu":
            return small + self._on_cores(plan, computer, holder)
        group = self.network.group(layout.data * layout.shard, layout.context * layout.tensor)
        kind = "reduce_scatter" if self.program.scatter_gradients and layout.shard > 1 else "all_reduce"
        buckets = self._divided(plan, units, NCCL_BUCKET_BYTES)
        seconds = [self.network.seconds(kind, num_bytes, group) for num_bytes in buckets]
        total = sum(seconds)
        if not self.program.overlap:
            return small + self.network.seconds(kind, sum(buckets), group)
        shown = hidden(total, seconds[-1], behind)
        started = len(buckets) * self.program.call_seconds if waits else 0.0
        return small + shown + started + self.program.contention * (total - shown)

    def _divided(self, plan: Plan, units: Sequence[Unit], middle_bytes: int) -> list[float]:
        """Bytes of each bucket of gradients of a rank with these units, in the order in which they are sent."""
        width, tensor = ITEMSIZE[plan.precision.reduce], plan.layout.tensor
        key = id(units), width, tensor, middle_bytes
        if key not in self._known:
            sizes = [w.numel_of(tensor) * width for unit in units for w in unit.body.weights if w.trainable]
            if self.program.own_buckets:
                groups = divide_into_buckets(sizes, middle_bytes)
                found = [float(sum(sizes[i] for i in group)) for group in groups]
            else:
                count = max(1, ceil(sum(sizes) / middle_bytes))
                found = [sum(sizes) / count] * count
            self._known[key] = units, found
        return self._known[key][1]

    def _on_cores(self, plan: Plan, computer: Computer, holder: Holder) -> float:
        """Copied into their buckets as the backward makes them, which are then summed by those who compute."""
        layout, algorithm = plan.layout, plan.collectives.all_reduce
        ranks = layout.data * layout.shard
        group = self.network.group(ranks, layout.context * layout.tensor)
        seconds = 0.0
        for num_bytes in self._divided(plan, holder.units, GLOO_BUCKET_BYTES):
            seconds += computer.moved(2 * num_bytes, holder.held, in_place=True)
            if algorithm == "native" and gathers(int(num_bytes), ranks, on_cpu=True):
                seconds += self.network.seconds("all_gather", ranks * num_bytes, group)
                seconds += (ranks - 1) * computer.moved(3 * num_bytes, holder.held, in_place=True)
            else:
                seconds += self.network.all_reduce(algorithm, num_bytes, group)
        return seconds

    def _small(self, plan: Plan) -> float:
        """A step's sums, the ranks' agreement and the norm, where they do not travel with the last bucket."""
        layout = plan.layout
        everyone = self.network.group(layout.world_size, 1)
        divided = layout.tensor * layout.pipeline * layout.context > 1
        apart = plan.shards_model or divided or plan.precision.reduce != "float32"
        seconds = 0.0
        if apart and self.program.own_buckets:
            seconds += self.network.seconds("all_reduce", _SMALL_BYTES, everyone)
            seconds += self.network.seconds("all_gather", _SMALL_BYTES * layout.world_size, everyone)
        if (plan.shards_model or divided) and self.program.own_buckets:
            seconds += self.network.seconds("all_reduce", 8.0, everyone)
        return seconds

    def _completed(self, plan: Plan, units: Sequence[Unit]) -> float:
        """Gradients that each rank has a part of: of blocks over a context axis, of tied weights between stages."""
        layout = plan.layout
        if not self.program.own_buckets or layout.context * layout.pipeline == 1:
            return 0.0
        key = "completed", id(units), layout
        if key not in self._known:
            group = self.network.group(layout.context, layout.tensor)
            blocks = [w for unit in units if unit.body.repeated for w in unit.body.weights if w.trainable]
            found = [self._sum(w, layout.tensor, group) for w in blocks] if layout.context > 1 else []
            if layout.pipeline > 1 and self.profile.tied:
                stages = self.network.group(layout.pipeline, layout.world_size // layout.pipeline)
                tied = {name for name, _ in self.profile.tied}
                weights = [w for unit in self.profile.units for w in unit.body.weights if _named(unit, w) in tied]
                found += [self._sum(w, layout.tensor, stages) for w in weights]
            self._known[key] = units, found
        return sum(self._known[key][1])

    def _sum(self, weight: Weight, tensor: int, group: Group) -> float:
        return self.network.seconds("all_reduce", weight.numel_of(tensor) * max(4.0, weight.itemsize), group)

    def ends(self, plan: Plan, units: Sequence[Unit], share: Share) -> float:
        """Sequences of a microbatch put together behind the blocks of a context axis, gradients before them."""
        blocks = [unit.body for unit in units if unit.body.repeated]
        if share.context == 1 or not blocks or not self.program.own_buckets:
            return 0.0
        group = self.network.group(share.context, share.tensor)
        crossing = blocks[0].input_bytes, blocks[-1].output_bytes
        return sum(self.network.seconds("all_gather", amount.at(share.samples), group) for amount in crossing)

    # ------------------------------------------------------------------------------------------------- the parameters

    def parameters(
        self, plan: Plan, units: Sequence[Unit], passes: Sequence[Passes], microbatches: int, slowed: float
    ) -> float:
        """What gathering parameters and scattering gradients adds to the units that compute meanwhile."""
        layout, level = plan.layout, plan.shard.level
        if layout.shard == 1 or level == "optimizer":
            return 0.0
        group = self.network.group(layout.shard, layout.context * layout.tensor)
        replicas = self.network.group(layout.data, layout.shard * layout.context * layout.tensor)
        held, reduce = ITEMSIZE[plan.precision.parameters], ITEMSIZE[plan.precision.reduce]
        numel = [sum(w.numel_of(layout.tensor) for w in unit.body.weights) for unit in units]
        gathers = [self.network.seconds("all_gather", n * held, group) for n in numel]
        scatters = [
            self.network.seconds("reduce_scatter", n * reduce, group)
            + self.network.seconds("all_reduce", n * reduce / layout.shard, replicas)
            for n in numel
        ]
        forwards = [p.forward.seconds for p in passes]
        backwards = [p.backward.seconds for p in passes]
        nothing = [0.0] * len(units)
        again = gathers if level == "parameters" else nothing
        once = gathered(forwards, gathers, nothing, slowed) - sum(forwards)
        reversed_ = list(reversed(again)), list(reversed(scatters))
        back = gathered(list(reversed(backwards)), *reversed_, slowed) - sum(backwards)
        if plan.shard.reduce == "every_microbatch" or microbatches == 1:
            return (once + back) * microbatches
        quiet = gathered(list(reversed(backwards)), reversed_[0], nothing, slowed) - sum(backwards)
        return once * microbatches + back + quiet * (microbatches - 1)

    # ----------------------------------------------------------------------------------------------------- the update

    def update(self, plan: Plan, computer: Computer, holder: Holder) -> float:
        """The reads and writes of clipping and update, and under ZeRO-1 the updated parameters handed out."""
        size = holder.size
        profile, layout, device, program = self.profile, plan.layout, computer.device, self.program
        elements = size.trainable / layout.shard
        width = size.parameter_bytes / size.numel if size.numel else 4.0
        per_element = width * profile.optimizer_passes
        if program.fused_optimizer:
            state = profile.state_bytes_per_element + program.master_bytes
            per_element = 2 * (width + state) + (program.gradient_bytes or width)
        num_bytes = elements * per_element
        whole = elements if plan.shards_model else size.trainable  # under ZeRO-1 each rank has all gradients
        num_bytes += whole * program.gradient_passes * ITEMSIZE[plan.precision.reduce]
        launches = profile.optimizer_launches
        seconds = computer.moved(num_bytes, holder.held, _UPDATE, in_place=True) + launches * device.launch_seconds
        seconds = max(seconds, launches * device.dispatch_seconds)
        if layout.shard > 1 and plan.shard.level == "optimizer":
            seconds += self._handed_out(plan, holder)
        return seconds

    def _handed_out(self, plan: Plan, holder: Holder) -> float:
        """Each owner's parameters to the others, by broadcasts of pieces; before that all agree that it went well."""
        layout, everyone = plan.layout, self.network.group(plan.layout.world_size, 1)
        group = self.network.group(layout.shard, layout.context * layout.tensor)
        if not self.program.own_buckets:
            return self.network.seconds("all_gather", holder.size.parameter_bytes, group)
        seconds = 2 * self.network.seconds("all_gather", 8.0 * layout.world_size, everyone)
        pieces = self._pieces(holder.units, layout.tensor, layout.shard)
        return seconds + sum(self.network.seconds("broadcast", num_bytes, group) for num_bytes in pieces)

    def _pieces(self, units: Sequence[Unit], tensor: int, shard: int) -> list[float]:
        """Bytes of each broadcast."""
        key = id(units), tensor, shard
        if key not in self._known:
            weights = [w for unit in units for w in unit.body.weights if w.trainable]
            arrays = [Array((w.numel_of(tensor),), w.itemsize) for w in weights]
            held: list[list[int]] = [[] for _ in range(shard)]
            for array, owner in zip(arrays, owners(arrays, shard), strict=True):
                held[owner].append(array.bytes)
            found = []
            for sizes in held:
                alone = [num_bytes >= PIECE_BYTES for num_bytes in sizes]
                messages = pack(sizes, alone, [0] * len(sizes))
                found += [float(sum(sizes[i] for i in members)) for members in messages]
            self._known[key] = units, found
        return self._known[key][1]


def _named(unit: Unit, weight: Weight) -> str:
    """A weight's name in the model: within a repeated body it is relative to its unit's."""
    return f"{unit.name}.{weight.name}" if unit.body.repeated else weight.name
