"""Stages, seconds and memory of each rank of a plan's pipeline.

All is independent of the division of replicas into data and shard ranks, and computed once for all of these plans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import TypeVar

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
from shoal.plans.schedule import in_flight

_Found = TypeVar("_Found")


@dataclass(frozen=True, eq=False)
class Rank:
    """One pipeline rank: its units, the passes of its stages, its size, and its microbatches."""

    held: Held
    passes: tuple[Passes, ...]
    size: StageSize
    in_flight: float  # microbatches whose activations are held, of all of its stages together


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
    def unit_seconds(self) -> tuple[float, float]:
        """Seconds of one microbatch's forward and backward of these units, one after the other."""
        return sum(p.forward_seconds for p in self.of_units), sum(p.backward_seconds for p in self.of_units)

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


def _latest(compute: Callable[[Staging, Plan], _Found]) -> Callable[[Staging, Plan], _Found]:
    """Keeps what was found for the plan that was asked about last: a search asks the same of a plan many times."""
    name = f"_latest_{compute.__name__}"

    @wraps(compute)
    def of(self: Staging, plan: Plan) -> _Found:
        known: tuple[Plan, _Found] | None = self.__dict__.get(name)
        if known is not None and known[0] is plan:
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
        self.parts = flat(self._segments)  # the units as far as stages can divide them
        self._costs_on: dict[int, StageCosts] = {}
        self._sizes = Sizes(program)
        self._shares: dict[tuple[int, int, bool, int, str], Share] = {}
        self._cuts: dict[tuple[object, ...], StageDivision] = {}
        # One object for equal divisions: what depends on the stages alone is kept by it.
        self._divisions: dict[tuple[int, ...], StageDivision] = {}
        self._passes: dict[tuple[object, ...], tuple[Passes, ...]] = {}
        self._ranks: dict[tuple[object, ...], Ranks] = {}

    @_latest
    def device(self, plan: Plan) -> Device:
        """The device of each rank of the plan."""
        if not self._cluster.alternatives:
            return self._cluster.device
        return self._cluster.device_for(min(self._cluster.devices_per_host, plan.layout.world_size))

    def computer(self, device: Device) -> DeviceModel:
        """The device as the program uses it."""
        program = self._program
        return DeviceModel(device, program.fast_float32, program.attention, self._held_bytes, program.layers)

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
            stages = self._cut(plan, num_stages, share)
            stages += ((),) * (num_stages - len(stages))  # a model of fewer units: it leaves ranks without any
            self._cuts[key] = self._divisions.setdefault(tuple(map(len, stages)), StageDivision(stages))
        return self._cuts[key]

    def _cut(self, plan: Plan, num_stages: int, share: Share) -> stage_split.Stages:
        if num_stages == 1:
            return (self._work.profile.units,)
        units = self.parts
        if plan.pipeline.split:
            return stage_split.by_names(units, plan.pipeline.split)
        if self._program.cut == "equal":
            return stage_split.equal(units, num_stages)
        if self._program.cut == "thresholds":
            flops = [unit.body.flops(share.samples) for unit in units]
            return stage_split.thresholds(units, flops, num_stages)
        costs = self.costs(plan)
        bodies = {unit.body for unit in units}
        of_body = {body: costs.body(body, share, plan.memory.recompute, True).seconds for body in bodies}
        seconds = [sum(of_body[unit.body] for unit in segment) for segment in self._segments]
        return tuple(flat(stage) for stage in stage_split.balanced(self._segments, seconds, num_stages))

    @_latest
    def passes(self, plan: Plan) -> tuple[Passes, ...]:
        """Of each stage, for one microbatch."""
        division = self.division(plan)
        share, microbatches = self.share(plan)
        key = division, id(self.device(plan)), share, microbatches > 1, plan.memory.recompute
        if key not in self._passes:
            costs = self.costs(plan)
            self._passes[key] = tuple(
                costs.stage(counts, share, plan.memory.recompute, microbatches > 1) for counts in division.counts
            )
        return self._passes[key]

    @_latest
    def ranks(self, plan: Plan) -> Ranks:
        """The ranks of the pipeline."""
        key = *self.key(plan), plan.pipeline.schedule
        if key not in self._ranks:
            share, microbatches = self.share(plan)
            every = self._every(plan, share, microbatches)
            largest: dict[StageSize, Rank] = {}
            for rank in every:
                other = largest.setdefault(rank.size, rank)
                if rank.in_flight > other.in_flight:
                    largest[rank.size] = rank
            busiest = max(every, key=lambda rank: sum(p.seconds for p in rank.passes))
            costs, again = self.costs(plan), plan.memory.recompute

            def of_body(body: Body) -> Passes:
                return costs.body(body, share, again, microbatches > 1)

            self._ranks[key] = Ranks(share, microbatches, every, busiest, tuple(largest.values()), of_body)
        return self._ranks[key]

    def _every(self, plan: Plan, share: Share, microbatches: int) -> tuple[Rank, ...]:
        pipeline, per = plan.layout.pipeline, plan.pipeline.stages_per_rank
        passes, held = self.passes(plan), self.division(plan).held(pipeline)
        most = [1.0]
        if pipeline > 1:
            most = [number / per for number in in_flight(plan.pipeline.schedule, pipeline, per, microbatches)]
        sizes = [self._sizes.stage(own.counts, share, plan.memory.recompute) for own in held]
        return tuple(Rank(held[rank], passes[rank::pipeline], sizes[rank], most[rank]) for rank in range(pipeline))


def _held_bytes(profile: Profile) -> Amount:
    """Bytes that a step goes through between two uses of a tensor: on an average half of what its operators write.

    A saved activation waits for all that comes between its forward and its backward, a weight for the whole step.
    """
    written = [o.written_bytes for unit in profile.units for o in unit.body.operations]
    return Amount(sum(a.fixed for a in written) / 2, sum(a.per_sample for a in written) / 2)
