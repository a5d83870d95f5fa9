"""Stages, seconds and memory of each rank of a plan's pipeline.

All is independent of the division of replicas into data and shard ranks, and computed once for all of these plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from itertools import groupby, islice
from typing import NamedTuple, TypeVar

from shoal.hardware.values import Cluster, Device
from shoal.planner.predict import stage_split
from shoal.planner.predict.collective_time import Network
from shoal.planner.predict.memory import Sizes, StageSize
from shoal.planner.predict.roofline import DeviceModel, Share
from shoal.planner.predict.segments import flat, segments
from shoal.planner.predict.stage_split import Held, StageDivision
from shoal.planner.predict.stage_time import Passes, StageCosts
from shoal.planner.predict.workload import Program, Workload
from shoal.planner.profile.values import Amount, Body, Profile
from shoal.plans.plan import Plan
from shoal.plans.schedule import in_flight, in_flight_by_stage

_Found = TypeVar("_Found")


@dataclass(frozen=True, eq=False)
class Rank:
    """One pipeline rank: its units, the passes of its stages, its size, and its microbatches."""

    held: Held
    passes: tuple[Passes, ...]
    size: StageSize
    in_flight: float  # microbatches of all of its stages together whose activations would be as many bytes


class Filled(NamedTuple):
    """Pipeline rank at this place, without its seconds: its units, its size and its microbatches in flight."""

    place: int
    held: Held
    size: StageSize
    in_flight: float


@dataclass(frozen=True, eq=False)
class Ranks:
    """All pipeline ranks; `fullest` has of each size the one that holds most microbatches.

    `of_body`: the passes of a unit with that body.
    """

    share: Share
    microbatches: int
    every: tuple[Rank, ...]
    busiest: Rank
    fullest: tuple[Rank, ...]
    of_body: Callable[[Body], Passes]

    @cached_property
    def of_units(self) -> tuple[Passes, ...]:
        """The passes of each unit of the busiest rank."""
        found = {body: self.of_body(body) for body, _ in self.busiest.held.counts}
        return tuple(found[unit.body] for unit in self.busiest.held.units)

    @cached_property
    def unit_forwards(self) -> list[float]:
        """Seconds of each of these units' forward."""
        return [p.forward_seconds for p in self.of_units]

    @cached_property
    def unit_backwards(self) -> list[float]:
        """Seconds of each of these units' backward, in the order of the units."""
        return [p.backward_seconds for p in self.of_units]

    @cached_property
    def unit_seconds(self) -> tuple[float, float]:
        """Seconds of one microbatch's forward and backward of these units, one after the other."""
        return sum(self.unit_forwards), sum(self.unit_backwards)

    @cached_property
    def busy_seconds(self) -> float:
        """Seconds of the busiest rank's passes in a step."""
        return sum(p.forward_seconds + p.backward_seconds for p in self.busiest.passes) * self.microbatches

    @cached_property
    def last_seconds(self) -> float:
        """Seconds of the busiest rank's last backward."""
        return sum(p.backward_seconds for p in self.busiest.passes)

    @cached_property
    def spent(self) -> dict[str, float]:
        """Its passes by the terms of a step."""
        terms = dict.fromkeys(("compute", "recompute", "tensor", "context"), 0.0)
        total = self.busiest.passes[0]
        for one in self.busiest.passes[1:]:
            total = total.plus(one)
        for way in (total.forward, total.backward):
            terms["compute"] += way.work.device * self.microbatches
            terms["recompute"] += way.again.device * self.microbatches
            terms["tensor"] += way.tensor * self.microbatches
            terms["context"] += way.context * self.microbatches
        return {**terms, "launch": max(0.0, self.busy_seconds - sum(terms.values()))}


def _alike(one: Plan, other: Plan) -> bool:
    """Whether plans of one search differ only in what their ranks do not depend on; where not sure, False."""
    if one.pipeline is not other.pipeline or one.batch is not other.batch or one.memory is not other.memory:
        return False
    if one.tensor is not other.tensor or one.collectives is not other.collectives:
        return False
    a, b = one.layout, other.layout
    cut = a.tensor == b.tensor and a.pipeline == b.pipeline and a.context == b.context
    return cut and a.data * a.shard == b.data * b.shard


def _latest(compute: Callable[[Staging, Plan], _Found]) -> Callable[[Staging, Plan], _Found]:
    """Keeps what was found for the plan that was asked about last, and for all that differ in data and shard alone.

    A search asks the same of a plan many times, and then of the next one of its family.
    """
    name = f"_latest_{compute.__name__}"

    @wraps(compute)
    def of(self: Staging, plan: Plan) -> _Found:
        known: tuple[Plan, _Found] | None = self.__dict__.get(name)
        if known is not None and (known[0] is plan or _alike(known[0], plan)):
            return known[1]
        found = compute(self, plan)
        self.__dict__[name] = plan, found
        return found

    return of


class Staging:
    """Stages and pipeline ranks of one workload's plans on one cluster."""

    def __init__(self, work: Workload, cluster: Cluster, network: Network, program: Program) -> None:
        self._work, self._cluster, self._network, self._program = work, cluster, network, program
        self._held_bytes = _held_bytes(work.profile)
        self._segments = segments(work.profile.units, work.places)
        of_segments = groupby(tuple(unit.body for unit in segment) for segment in self._segments)
        self._runs = [(bodies, sum(1 for _ in alike)) for bodies, alike in of_segments]
        self.parts = flat(self._segments)  # the units as far as stages can divide them
        self._costs_on: dict[int, StageCosts] = {}
        self._last: dict[int, Device] = {}  # for images with their channels last, by the device
        self._sizes = Sizes(program)
        self._shares: dict[tuple[int, int, bool, int, str], Share] = {}
        self._cuts: dict[tuple[object, ...], StageDivision] = {}
        # What depends on the stages alone is kept by their division.
        self._divisions: dict[tuple[int, ...], StageDivision] = {}
        self._held: dict[tuple[bool, tuple[Body, ...]], Held] = {}
        self._balanced: dict[tuple[int, ...], StageDivision] = {}  # by segments of each stage
        self._passes: dict[tuple[object, ...], tuple[Passes, ...]] = {}
        self._ranks: dict[tuple[object, ...], Ranks] = {}
        self._fullest: dict[tuple[object, ...], tuple[Filled, ...]] = {}

    @_latest
    def device(self, plan: Plan) -> Device:
        """The device of each rank of the plan."""
        found = self._cluster.device
        if self._cluster.alternatives:
            found = self._cluster.device_for(min(self._cluster.devices_per_host, plan.layout.world_size))
        if not plan.execution.channels_last or found.kind != "cpu":
            return found
        if id(found) not in self._last:
            self._last[id(found)] = found.with_channels_last()
        return self._last[id(found)]

    def computer(self, device: Device) -> DeviceModel:
        """The device as the program uses it."""
        program, held = self._program, self._held_bytes
        return DeviceModel(device, program.fast_float32, program.attention, held, program.layers, program.fuses)

    def costs(self, plan: Plan) -> StageCosts:
        """Costs of stages on the plan's device."""
        device = self.device(plan)
        if id(device) not in self._costs_on:
            self._costs_on[id(device)] = StageCosts(self.computer(device), self._network, self._program)
        return self._costs_on[id(device)]

    @_latest
    def share(self, plan: Plan) -> tuple[Share, int]:
        """A rank's share of a microbatch, and its microbatches in a step (of the rank with most grains)."""
        layout = plan.layout
        grains = -(-self._work.num_grains // (layout.data * layout.shard))
        per = min(plan.batch.grains_per_microbatch or grains, grains)
        sums = plan.collectives.all_reduce if layout.tensor > 1 else "native"
        key = per, layout.tensor, plan.tensor.sequence and layout.tensor > 1, layout.context, sums
        if key not in self._shares:
            self._shares[key] = Share(per * self._work.grain_size, *key[1:])
        return self._shares[key], -(-grains // per)

    @_latest
    def key(self, plan: Plan) -> tuple[object, ...]:
        """Cache key of a plan without its data and shard axes and its schedule."""
        pipeline = plan.pipeline
        shape = plan.layout.pipeline, pipeline.stages_per_rank, pipeline.split, plan.memory.recompute
        return id(self.device(plan)), *self.share(plan), *shape

    @_latest
    def division(self, plan: Plan) -> StageDivision:
        """Which units are on which stage."""
        num_stages = plan.layout.pipeline * plan.pipeline.stages_per_rank
        share, _ = self.share(plan)
        key: tuple[object, ...] = ()
        if num_stages > 1:
            key = id(self.device(plan)), num_stages, share, plan.memory.recompute, plan.pipeline.split
        if key not in self._cuts:
            given = plan.pipeline.split or self._program.cut != "balanced" or num_stages == 1
            self._cuts[key] = self._cut(plan, num_stages, share) if given else self._even(plan, num_stages, share)
        return self._cuts[key]

    def _cut(self, plan: Plan, num_stages: int, share: Share) -> StageDivision:
        units = self.parts
        if num_stages == 1:
            return self._divided((self._work.profile.units,), num_stages)
        if plan.pipeline.split:
            return self._divided(stage_split.by_names(units, plan.pipeline.split), num_stages)
        if self._program.cut == "equal":
            return self._divided(stage_split.equal(units, num_stages), num_stages)
        flops = [unit.body.flops(share.samples) for unit in units]
        return self._divided(stage_split.thresholds(units, flops, num_stages), num_stages)

    def _even(self, plan: Plan, num_stages: int, share: Share) -> StageDivision:
        """Stages of as equal seconds as can be."""
        costs, again = self.costs(plan), plan.memory.recompute
        runs = [(sum(costs.body(body, share, again, True).seconds for body in own), n) for own, n in self._runs]
        lengths = stage_split.balanced_lengths(runs, num_stages)
        lengths += (0,) * (num_stages - len(lengths))
        if lengths not in self._balanced:
            left = iter(self._segments)
            stages = tuple(flat(tuple(islice(left, length))) for length in lengths)
            self._balanced[lengths] = self._divided(stages, num_stages)
        return self._balanced[lengths]

    def _divided(self, stages: stage_split.Stages, num_stages: int) -> StageDivision:
        """One object for equal divisions; a model of fewer units leaves stages without any."""
        stages += ((),) * (num_stages - len(stages))
        return self._divisions.setdefault(tuple(map(len, stages)), StageDivision(stages, self._held))

    @_latest
    def passes(self, plan: Plan) -> tuple[Passes, ...]:
        """Of each stage, for one microbatch."""
        division = self.division(plan)
        share, microbatches = self.share(plan)
        key = division, id(self.device(plan)), share, microbatches > 1, plan.memory.recompute
        if key not in self._passes:
            costs = self.costs(plan)
            again, adds = plan.memory.recompute, microbatches > 1
            self._passes[key] = tuple(division.each(lambda counts: costs.stage(counts, share, again, adds)))
        return self._passes[key]

    @_latest
    def ranks(self, plan: Plan) -> Ranks:
        """The ranks of the pipeline."""
        key = *self.key(plan), plan.pipeline.schedule
        if key not in self._ranks:
            share, microbatches = self.share(plan)
            every = self._every(plan, share)
            fullest = tuple(every[place] for place, *_ in self.fullest(plan))
            busiest = max(every, key=lambda rank: sum(p.seconds for p in rank.passes))
            costs, again = self.costs(plan), plan.memory.recompute

            def of_body(body: Body) -> Passes:
                return costs.body(body, share, again, microbatches > 1)

            self._ranks[key] = Ranks(share, microbatches, every, busiest, fullest, of_body)
        return self._ranks[key]

    @cached_property
    def blocks(self) -> tuple[Body, int] | None:
        """The block that comes most often where stages can be cut, and how often; None where the model has none."""
        found = [(body, number) for body, number in self.bodies.most_common() if body.repeated]
        return found[0] if found else None

    @cached_property
    def bodies(self) -> Counter[Body]:
        """The units that stages do not cut: each kind, and how many there are."""
        return Counter(unit.body for unit in self.parts)

    def size(self, body: Body, plan: Plan) -> StageSize:
        """Of a rank with one such unit."""
        return self._sizes.stage(((body, 1),), self.share(plan)[0], plan.memory.recompute)

    @_latest
    def fullest(self, plan: Plan) -> tuple[Filled, ...]:
        """Of each size of a rank the first that has most microbatches in flight."""
        key = *self.key(plan), plan.pipeline.schedule
        if key not in self._fullest:
            pipeline, (share, _) = plan.layout.pipeline, self.share(plan)
            division, most = self.division(plan), self.in_flight(plan)
            held, largest = division.held(pipeline), dict[StageSize, Filled]()
            for counts, places in division.alike(pipeline):
                place = max(places, key=most.__getitem__)
                one = Filled(place, held[place], self._sizes.stage(counts, share, plan.memory.recompute), most[place])
                other = largest.setdefault(one.size, one)
                if (one.in_flight, -one.place) > (other.in_flight, -other.place):
                    largest[one.size] = one
            self._fullest[key] = tuple(largest.values())
        return self._fullest[key]

    def in_flight(self, plan: Plan) -> tuple[float, ...]:
        """Of each rank, in microbatches of all of its stages."""
        pipeline, per = plan.layout.pipeline, plan.pipeline.stages_per_rank
        if pipeline == 1:
            return (1.0,)
        _, microbatches = self.share(plan)
        of_ranks = in_flight(plan.pipeline.schedule, pipeline, per, microbatches)
        if plan.pipeline.schedule != "interleaved_1f1b":  # under the others each of a rank's stages holds as many
            return tuple(number / per for number in of_ranks)
        saved, of_stages = self._saved(plan), in_flight_by_stage(pipeline, per, microbatches)
        own = (saved[rank::pipeline] for rank in range(pipeline))
        return tuple(map(_weighed, own, of_stages, of_ranks))

    def _saved(self, plan: Plan) -> list[float]:
        """Bytes of activation that each stage saves of a microbatch."""
        share, _ = self.share(plan)
        sizes, again = self._sizes, plan.memory.recompute
        return self.division(plan).each(lambda counts: sizes.stage(counts, share, again).saved)

    def _every(self, plan: Plan, share: Share) -> tuple[Rank, ...]:
        pipeline, most = plan.layout.pipeline, self.in_flight(plan)
        passes, held = self.passes(plan), self.division(plan).held(pipeline)
        sizes = [self._sizes.stage(own.counts, share, plan.memory.recompute) for own in held]
        return tuple(Rank(held[rank], passes[rank::pipeline], sizes[rank], most[rank]) for rank in range(pipeline))


def _weighed(saved: Sequence[float], most: Sequence[int], in_all: int) -> float:
    """Microbatches of all of a rank's stages with as many bytes as it holds: of each stage `most`, `in_all` together.

    The last stage, which has the logits, holds fewer than the first.
    """
    whole = sum(saved)
    if not whole:
        return in_all / len(saved)
    held, left = 0.0, in_all
    for size, limit in sorted(zip(saved, most, strict=True), reverse=True):
        held += size * min(limit, left)
        left -= min(limit, left)
    return held / whole


def _held_bytes(profile: Profile) -> Amount:
    """Bytes that a step goes through between two uses of a tensor: on an average half of what its operators write.

    A saved activation waits for all that comes between its forward and its backward, a weight for the whole step.
    """
    written = [o.written_bytes for unit in profile.units for o in unit.body.operations]
    return Amount(sum(a.fixed for a in written) / 2, sum(a.per_sample for a in written) / 2)
