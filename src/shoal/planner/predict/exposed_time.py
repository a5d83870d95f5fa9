"""Seconds that a rank spends outside of its passes: on sums of gradients, gathered parameters, and the update.

On a GPU collectives run beside the compute that can hide them. On a CPU the cores that compute move every byte of a
collective too, so that nothing of it is hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil
from typing import Any, NamedTuple, TypeVar

from shoal.planner.predict.collective_time import Network, RankGroup
from shoal.planner.predict.overlap import gathered, hidden
from shoal.planner.predict.pipeline_ranks import Rank, Ranks
from shoal.planner.predict.roofline import ITEMSIZE, DeviceModel, Share
from shoal.planner.predict.stage_split import Held
from shoal.planner.predict.workload import Program
from shoal.planner.profile.values import Profile, Unit, Weight
from shoal.plans.accounting.collectives import Array, owners
from shoal.plans.accounting.partition import (
    GLOO_BUCKET_BYTES,
    NCCL_BUCKET_BYTES,
    PIECE_BYTES,
    divide_into_buckets,
    gathers,
    pack,
)
from shoal.plans.plan import Plan

# What a rank says in an agreement on an error that nobody has, and in the sums that travel by themselves: about this.
_SMALL_BYTES = 128.0
_UPDATE = "update"  # under this name a device tells how fast an optimizer is


_Known = TypeVar("_Known")


class Sums(NamedTuple):
    """Seconds of a rank's sums of gradients: of all buckets, of the last, and of all bytes at once."""

    num_buckets: int
    total: float
    last: float
    at_once: float


@dataclass(frozen=True)
class Exchanged:
    """What ranks exchange of a model between its passes, and its update."""

    profile: Profile
    network: Network
    program: Program
    _known: dict[tuple[object, ...], Any] = field(default_factory=dict, repr=False)

    def _once(self, key: tuple[object, ...], compute: Callable[[], _Known]) -> _Known:
        """What was computed for a key; its first part names what, the others are all that it depends on."""
        if key not in self._known:
            self._known[key] = compute()
        found: _Known = self._known[key]
        return found

    # -------------------------------------------------------------------------------------------------- the gradients

    def gradients(self, plan: Plan, computer: DeviceModel, rank: Rank, behind: float, waits: bool) -> float:
        """What shows of the sums of gradients over data and shard ranks, and of a step's small sums.

        `behind`: seconds of the last backward, which may hide them; `waits`: the device does, for the host.
        """
        layout = plan.layout
        if layout.world_size == 1:
            return 0.0
        small = self._small(plan) + self._completed(plan, rank.held)
        if plan.shards_model or layout.data * layout.shard == 1:
            return small
        if computer.device.kind == "cpu":
            return small + self._on_cores(plan, computer, rank)
        sums = self._sums(plan, rank.held)
        if not self.program.overlap:
            return small + sums.at_once
        shown = hidden(sums.total, sums.last, behind)
        started = sums.num_buckets * self.program.call_seconds if waits else 0.0
        return small + shown + started + self.program.contention * (sums.total - shown)

    def _sums(self, plan: Plan, held: Held) -> Sums:
        """The buckets of a rank on a GPU, which are summed one after the other."""
        layout = plan.layout
        group = self.network.group(layout.data * layout.shard, layout.context * layout.tensor)
        kind = "reduce_scatter" if self.program.scatter_gradients and layout.shard > 1 else "all_reduce"

        def compute() -> Sums:
            buckets = self._divided(plan, held, NCCL_BUCKET_BYTES)
            seconds = [self.network.seconds(kind, num_bytes, group) for num_bytes in buckets]
            return Sums(len(buckets), sum(seconds), seconds[-1], self.network.seconds(kind, sum(buckets), group))

        return self._once(("sums", held, plan.precision.reduce, layout.tensor, kind, group), compute)

    def _divided(self, plan: Plan, held: Held, middle_bytes: int) -> list[float]:
        """Bytes of each bucket of gradients of a rank with these units, in the order in which they are sent."""
        width, tensor = ITEMSIZE[plan.precision.reduce], plan.layout.tensor

        def compute() -> list[float]:
            sizes = [w.numel_of(tensor) * width for unit in held.units for w in unit.body.weights if w.trainable]
            if self.program.own_buckets:
                groups = divide_into_buckets(sizes, middle_bytes)
                return [float(sum(sizes[i] for i in group)) for group in groups]
            count = max(1, ceil(sum(sizes) / middle_bytes))
            return [sum(sizes) / count] * count

        return self._once(("buckets", held, width, tensor, middle_bytes), compute)

    def _on_cores(self, plan: Plan, computer: DeviceModel, rank: Rank) -> float:
        """Copied into their buckets as the backward makes them, which are then summed by those who compute."""
        layout, algorithm = plan.layout, plan.collectives.all_reduce
        ranks = layout.data * layout.shard
        group = self.network.group(ranks, layout.context * layout.tensor)
        seconds = 0.0
        for num_bytes in self._divided(plan, rank.held, GLOO_BUCKET_BYTES):
            seconds += computer.moved(2 * num_bytes, rank.size.touched, in_place=True)
            if algorithm == "native" and gathers(int(num_bytes), ranks, on_cpu=True):
                seconds += self.network.seconds("all_gather", ranks * num_bytes, group)
                seconds += (ranks - 1) * computer.moved(3 * num_bytes, rank.size.touched, in_place=True)
            else:
                seconds += self.network.all_reduce(algorithm, num_bytes, group)
        return seconds

    def _small(self, plan: Plan) -> float:
        """A step's sums, the ranks' agreement and the norm, where they do not travel with the last bucket."""
        layout = plan.layout
        divided = plan.shards_model or layout.tensor * layout.pipeline * layout.context > 1
        return self.agreed(layout.world_size, divided, apart=divided or plan.precision.reduce != "float32")

    def agreed(self, num_devices: int, is_divided: bool, *, apart: bool) -> float:
        """A step's sums and the ranks' agreement, where they travel `apart`, and the norm of a divided model."""
        if not self.program.own_buckets:
            return 0.0
        everyone, seconds = self.network.group(num_devices, 1), 0.0
        if apart:
            seconds += self.network.seconds("all_reduce", _SMALL_BYTES, everyone)
            seconds += self.network.seconds("all_gather", _SMALL_BYTES * num_devices, everyone)
        if is_divided:
            seconds += self.network.seconds("all_reduce", 8.0, everyone)
        return seconds

    def _completed(self, plan: Plan, held: Held) -> float:
        """Gradients that each rank has a part of: of blocks over a context axis, of tied weights between stages."""
        layout = plan.layout
        if not self.program.own_buckets or layout.context * layout.pipeline == 1:
            return 0.0
        stages = self.network.group(layout.pipeline, layout.world_size // layout.pipeline)

        def compute() -> float:
            group = self.network.group(layout.context, layout.tensor)
            blocks = [w for unit in held.units if unit.body.repeated for w in unit.body.weights if w.trainable]
            found = [self._sum(w, layout.tensor, group) for w in blocks] if layout.context > 1 else []
            if layout.pipeline > 1 and self.profile.tied:
                tied = {name for name, _ in self.profile.tied}
                weights = [w for unit in self.profile.units for w in unit.body.weights if _named(unit, w) in tied]
                found += [self._sum(w, layout.tensor, stages) for w in weights]
            return sum(found)

        return self._once(("completed", held, layout.tensor, layout.context, stages), compute)

    def _sum(self, weight: Weight, tensor: int, group: RankGroup) -> float:
        return self.network.seconds("all_reduce", weight.numel_of(tensor) * max(4.0, weight.itemsize), group)

    def ends(self, share: Share) -> float:
        """Sequences of a microbatch put together behind the blocks of a context axis, gradients before them."""
        if share.context == 1 or not self.program.own_buckets:
            return 0.0
        blocks = [unit.body for unit in self.profile.units if unit.body.repeated]
        if not blocks:
            return 0.0
        group = self.network.group(share.context, share.tensor)
        crossing = blocks[0].input_bytes, blocks[-1].output_bytes
        return sum(self.network.seconds("all_gather", amount.at(share.samples), group) for amount in crossing)

    # ------------------------------------------------------------------------------------------------- the parameters

    def parameters(self, plan: Plan, ranks: Ranks, slowed: float) -> float:
        """What gathering parameters and scattering gradients adds to the busiest rank, which computes meanwhile."""
        level, microbatches = plan.shard.level, ranks.microbatches
        if plan.layout.shard == 1 or level == "optimizer":
            return 0.0
        gathers, scatters = self._exchanges(plan, ranks.busiest.held)
        forwards = [p.forward_seconds for p in ranks.of_units]
        backwards = [p.backward_seconds for p in ranks.of_units]
        nothing = [0.0] * len(gathers)
        again = gathers[::-1] if level == "parameters" else nothing
        once = gathered(forwards, gathers, nothing, slowed) - sum(forwards)
        back = gathered(backwards[::-1], again, scatters[::-1], slowed) - sum(backwards)
        if plan.shard.reduce == "every_microbatch" or microbatches == 1:
            return (once + back) * microbatches
        quiet = gathered(backwards[::-1], again, nothing, slowed) - sum(backwards)
        return once * microbatches + back + quiet * (microbatches - 1)

    def _exchanges(self, plan: Plan, held: Held) -> tuple[list[float], list[float]]:
        """Seconds in which the parameters of each unit are gathered, and its gradients scattered."""
        layout = plan.layout
        tensor, shard, stride = layout.tensor, layout.shard, layout.context * layout.tensor
        group, replicas = self.network.group(shard, stride), self.network.group(layout.data, shard * stride)
        width, reduce = ITEMSIZE[plan.precision.parameters], ITEMSIZE[plan.precision.reduce]
        algorithm = plan.collectives.all_reduce

        def compute() -> tuple[list[float], list[float]]:
            numel = [sum(w.numel_of(tensor) for w in unit.body.weights) for unit in held.units]
            scatters = [
                self.network.asked(algorithm, "reduce_scatter", n * reduce, group)
                + self.network.asked(algorithm, "all_reduce", n * reduce / shard, replicas)
                for n in numel
            ]
            return [self.network.asked(algorithm, "all_gather", n * width, group) for n in numel], scatters

        return self._once(("exchanges", held, width, reduce, tensor, group, replicas, algorithm), compute)

    # ----------------------------------------------------------------------------------------------------- the update

    def update(self, plan: Plan, computer: DeviceModel, rank: Rank, *, bound: bool = False) -> float:
        """The reads and writes of clipping and update, and under ZeRO-1 the updated parameters handed out.

        `bound`: at least so long, and cheaper to say.
        """
        size = rank.size
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
        seconds = computer.moved(num_bytes, size.touched, _UPDATE, in_place=True) + launches * device.launch_seconds
        seconds = max(seconds, launches * device.dispatch_seconds)
        if layout.shard > 1 and plan.shard.level == "optimizer":
            seconds += self._handed_out(plan, rank, bound)
        return seconds

    def _handed_out(self, plan: Plan, rank: Rank, bound: bool) -> float:
        """Each owner's parameters to the others, by broadcasts of pieces; before that all agree that it went well.

        At least one message an owner, and no less than all bytes in one.
        """
        layout, everyone = plan.layout, self.network.group(plan.layout.world_size, 1)
        group = self.network.group(layout.shard, layout.context * layout.tensor)
        if not self.program.own_buckets:
            return self.network.seconds("all_gather", rank.size.parameter_bytes, group)
        seconds = 2 * self.network.seconds("all_gather", 8.0 * layout.world_size, everyone)

        if bound:
            num_owners = min(layout.shard, rank.held.num_tensors)
            start = self.network.call(group) + (group.size - 1) * self.network.latency(group)
            all_bytes = rank.size.parameter_bytes if rank.size.trainable == rank.size.numel else 0.0
            at_once = self.network.seconds("broadcast", all_bytes, group)
            return seconds + max(0, num_owners - 1) * start + at_once

        def compute() -> float:
            pieces = self._pieces(rank.held, layout.tensor, layout.shard)
            return sum(self.network.seconds("broadcast", num_bytes, group) for num_bytes in pieces)

        return seconds + self._once(("handed out", rank.held, layout.tensor, group), compute)

    def _pieces(self, held: Held, tensor: int, shard: int) -> list[float]:
        """Bytes of each broadcast."""
        weights = [w for unit in held.units for w in unit.body.weights if w.trainable]
        arrays = [Array((w.numel_of(tensor),), w.itemsize) for w in weights]
        owned: list[list[int]] = [[] for _ in range(shard)]
        for array, owner in zip(arrays, owners(arrays, shard), strict=True):
            owned[owner].append(array.bytes)
        found = []
        for sizes in owned:
            alone = [num_bytes >= PIECE_BYTES for num_bytes in sizes]
            messages = pack(sizes, alone, [0] * len(sizes))
            found += [float(sum(sizes[i] for i in members)) for members in messages]
        return found


def _named(unit: Unit, weight: Weight) -> str:
    """A weight's name in the model: within a repeated body it is relative to its unit's."""
    return f"{unit.name}.{weight.name}" if unit.body.repeated else weight.name
