"""Stages, seconds and memory of each rank of a plan's pipeline.

The results do not depend on the split of replicas into data and shard ranks. All such plans share one computation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from itertools import groupby, islice

from shoal.hardware.values import Cluster, Device
from shoal.planner.predict import stage_split
from shoal.planner.predict.collective_time import Network
from shoal.planner.predict.lower_bounds import PipelineShape
from shoal.planner.predict.memory import Rank, Sizes, StageSize, rank_at
from shoal.planner.predict.roofline import DeviceModel
from shoal.planner.predict.segments import flat, segments
from shoal.planner.predict.share import Share
from shoal.planner.predict.stage_split import Counts, Held, StageDivision
from shoal.planner.predict.stage_time import Passes, StageCosts, together
from shoal.planner.predict.workload import Program, Workload
from shoal.planner.profile.values import Amount, Body, Profile
from shoal.plans.plan import Plan
from shoal.plans.schedule import in_flight, in_flight_by_stage


class BusiestRank:
    """Busiest rank of a pipeline: its units, their size, and its passes of one microbatch by unit and by stage."""

    def __init__(
        self, held: Held, size: StageSize, passes: Sequence[Passes], of_body: Callable[[Body], Passes]
    ) -> None:
        self.held, self.size = held, size
        self.seconds = sum(p.forward_seconds + p.backward_seconds for p in passes)
        self.last_seconds = sum(p.backward_seconds for p in passes)  # of one backward on all stages of the rank
        self._whole = together([(one, 1) for one in passes])
        ways = self._whole.forward, self._whole.backward
        self.behind_seconds = sum(way.seconds - way.host - way.host_again for way in ways)  # while the host waits
        of_bodies = {body: of_body(body) for body, _ in held.counts}
        of_units = [of_bodies[unit.body] for unit in held.units]
        self.unit_forwards = [p.forward_seconds for p in of_units]
        self.unit_backwards = [p.backward_seconds for p in of_units]  # in the order of the units
        self.unit_seconds = sum(self.unit_forwards), sum(self.unit_backwards)  # without overlap

    def spent(self, microbatches: int) -> dict[str, float]:
        """Return the seconds by step term of the passes of this many microbatches."""
        terms = dict.fromkeys(("compute", "recompute", "tensor", "context"), 0.0)
        for way in (self._whole.forward, self._whole.backward):
            terms["compute"] += way.work * microbatches
            terms["recompute"] += way.again * microbatches
            terms["tensor"] += way.tensor * microbatches
            terms["context"] += way.context * microbatches
        return {**terms, "launch": max(0.0, self.seconds * microbatches - sum(terms.values()))}


class CutModel:
    """Model in stages for one share of a sample and one recomputation mode, with cached passes and sizes."""

    def __init__(self, division: StageDivision, costs: StageCosts, sizes: Sizes, share: Share, recompute: str) -> None:
        self.division, self.share = division, share
        self._costs, self._sizes, self._recompute = costs, sizes, recompute
        self._passes: dict[bool, tuple[Passes, ...]] = {}
        self._busiest: dict[tuple[int, bool], BusiestRank] = {}
        self._by_size: dict[int, list[tuple[StageSize, list[int]]]] = {}
        self._fullest: dict[PipelineShape, tuple[Rank, ...]] = {}

    def passes(self, adds: bool) -> tuple[Passes, ...]:
        """Return the passes of each stage for one microbatch. `adds`: gradients accumulate into earlier ones."""
        if adds not in self._passes:
            stage, share, again = self._costs.stage, self.share, self._recompute
            self._passes[adds] = tuple(self.division.each(lambda counts: stage(counts, share, again, adds)))
        return self._passes[adds]

    def busiest(self, ranks: int, adds: bool) -> BusiestRank:
        """Return the rank of a pipeline of this many ranks with the longest passes."""
        key = ranks, adds
        if key not in self._busiest:
            passes = self.passes(adds)
            seconds = [sum(p.seconds for p in passes[rank::ranks]) for rank in range(ranks)]
            place = seconds.index(max(seconds))
            held = self.division.held(ranks)[place]

            def of_body(body: Body) -> Passes:
                return self._costs.body(body, self.share, self._recompute, adds)

            self._busiest[key] = BusiestRank(held, self._size(held.counts), passes[place::ranks], of_body)
        return self._busiest[key]

    def fullest(self, shape: PipelineShape) -> tuple[Rank, ...]:
        """Return one rank per distinct stage size: the first one with the most microbatches in flight."""
        if shape not in self._fullest:
            most, held = self.in_flight(shape), self.division.held(shape.pipeline)
            found = ((max(places, key=most.__getitem__), size) for size, places in self._sized(shape.pipeline))
            self._fullest[shape] = tuple(rank_at(place, held[place], size, most[place]) for place, size in found)
        return self._fullest[shape]

    def _sized(self, ranks: int) -> list[tuple[StageSize, list[int]]]:
        """Group the indices of ranks by stage size."""
        if ranks not in self._by_size:
            found: dict[StageSize, list[int]] = {}
            for counts, places in self.division.alike(ranks):
                found.setdefault(self._size(counts), []).extend(places)
            self._by_size[ranks] = [(size, sorted(places)) for size, places in found.items()]
        return self._by_size[ranks]

    def _size(self, counts: Counts) -> StageSize:
        return self._sizes.stage(counts, self.share, self._recompute)

    def every(self, shape: PipelineShape) -> list[Rank]:
        """Return all ranks in order."""
        most, own = self.in_flight(shape), enumerate(self.division.held(shape.pipeline))
        return [rank_at(place, held, self._size(held.counts), most[place]) for place, held in own]

    def in_flight(self, shape: PipelineShape) -> tuple[float, ...]:
        """Return the microbatches in flight of each rank, in units of one microbatch on all stages of the rank."""
        schedule, ranks, per, microbatches = shape
        if schedule != "interleaved_1f1b" or ranks == 1:
            return evenly_in_flight(*shape)
        of_ranks, of_stages = in_flight(*shape), in_flight_by_stage(ranks, per, microbatches)
        own = (self._saved[rank::ranks] for rank in range(ranks))
        return tuple(map(_weighed, own, of_stages, of_ranks))

    @cached_property
    def _saved(self) -> list[float]:
        """Bytes of activations that each stage saves per microbatch."""
        return self.division.each(lambda counts: self._size(counts).saved)

    @cached_property
    def crossing(self) -> float:
        """Bytes of the largest activation between two stages."""
        ends = (stage[-1].body for stage in self.division.stages[:-1] if stage)
        return max((body.output_bytes.at(self.share.local_samples) for body in ends), default=0.0)


@lru_cache(maxsize=65536)
def evenly_in_flight(schedule: str, ranks: int, per: int, microbatches: int) -> tuple[float, ...]:
    """Return the microbatches in flight of each rank, if all stages of a rank save the same bytes."""
    return tuple(number / per for number in in_flight(schedule, ranks, per, microbatches)) if ranks > 1 else (1.0,)


class Ranks:
    """All pipeline ranks of a plan. Plans that differ only in the data and shard degrees share them."""

    def __init__(
        self, plan: Plan, device: Device, share: Share, microbatches: int, cut: Callable[[Ranks], CutModel]
    ) -> None:
        self.plan, self.device, self.share, self.microbatches, self._cut = plan, device, share, microbatches, cut
        pipeline = plan.pipeline
        self.shape = PipelineShape(pipeline.schedule, plan.layout.pipeline, pipeline.stages_per_rank, microbatches)
        self.adds = microbatches > 1  # gradients accumulate over microbatches

    @cached_property
    def model(self) -> CutModel:
        """The model cut into the plan's stages."""
        return self._cut(self)

    @cached_property
    def busiest(self) -> BusiestRank:
        """The rank with the longest passes."""
        return self.model.busiest(self.shape.pipeline, self.adds)

    @cached_property
    def fullest(self) -> tuple[Rank, ...]:
        """One rank per distinct stage size: the first one with the most microbatches in flight."""
        return self.model.fullest(self.shape)

    @property
    def passes(self) -> tuple[Passes, ...]:
        """The passes of each stage for one microbatch."""
        return self.model.passes(self.adds)

    @property
    def every(self) -> list[Rank]:
        """All ranks in order."""
        return self.model.every(self.shape)


def _alike(one: Plan, other: Plan) -> bool:
    """Check whether the ranks of two plans of one search are surely equal. A False may be a missed match."""
    if one.pipeline is not other.pipeline or one.batch is not other.batch or one.memory is not other.memory:
        return False
    if one.tensor is not other.tensor or one.collectives is not other.collectives:
        return False
    a, b = one.layout, other.layout
    cut = a.tensor == b.tensor and a.pipeline == b.pipeline and a.context == b.context
    return cut and a.data * a.shard == b.data * b.shard


class Staging:
    """Stages and pipeline ranks of one workload's plans on one cluster."""

    def __init__(self, work: Workload, cluster: Cluster, network: Network, program: Program) -> None:
        self._work, self._cluster, self._network, self._program = work, cluster, network, program
        self._held_bytes = _held_bytes(work.profile)
        self._segments = segments(work.profile.units, work.places)
        of_segments = groupby(tuple(unit.body for unit in segment) for segment in self._segments)
        self._runs = [(bodies, sum(1 for _ in alike)) for bodies, alike in of_segments]
        self.parts = flat(self._segments)  # the smallest parts that stages can consist of
        self._costs_on: dict[int, StageCosts] = {}
        self._last: dict[int, Device] = {}  # devices with channels_last rates, by the id of the plain device
        self._sizes = Sizes(program)
        self._shares: dict[tuple[int, int, bool, int, str], Share] = {}
        self._models: dict[tuple[object, ...], CutModel] = {}
        self._divisions: dict[tuple[int, ...], StageDivision] = {}
        self._held: dict[tuple[bool, tuple[Body, ...]], Held] = {}
        self._balanced: dict[tuple[int, ...], StageDivision] = {}  # by the number of segments of each stage
        self._latest: Ranks | None = None

    def ranks(self, plan: Plan) -> Ranks:
        """Return the ranks of a plan.

        The latest result is cached, since a search requests one plan many times and then the next one of its family.
        """
        latest = self._latest
        if latest is None or (latest.plan is not plan and not _alike(latest.plan, plan)):
            layout = plan.layout
            grains = -(-self._work.num_grains // (layout.data * layout.shard))
            per = min(plan.batch.grains_per_microbatch or grains, grains)
            sums = plan.collectives.all_reduce if layout.tensor > 1 else "native"
            key = per, layout.tensor, plan.tensor.sequence and layout.tensor > 1, layout.context, sums
            if key not in self._shares:
                self._shares[key] = Share(per * self._work.grain_size, *key[1:])
            share, microbatches = self._shares[key], -(-grains // per)
            latest = self._latest = Ranks(plan, self._device(plan), share, microbatches, self._model)
        return latest

    def device(self, plan: Plan) -> Device:
        """Return the device that each rank of the plan runs on."""
        return self.ranks(plan).device

    def _device(self, plan: Plan) -> Device:
        found = self._cluster.device
        if self._cluster.alternatives:
            found = self._cluster.device_for(min(self._cluster.devices_per_host, plan.layout.world_size))
        if not plan.execution.channels_last or found.kind != "cpu":
            return found
        if id(found) not in self._last:
            self._last[id(found)] = found.with_channels_last()
        return self._last[id(found)]

    def computer(self, device: Device) -> DeviceModel:
        """Return the roofline model of the device under this program."""
        program, held = self._program, self._held_bytes
        return DeviceModel(device, program.fast_float32, program.attention, held, program.layers, program.fuses)

    def costs(self, plan: Plan) -> StageCosts:
        """Return the stage costs on the plan's device."""
        return self._costs(self.device(plan))

    def _costs(self, device: Device) -> StageCosts:
        if id(device) not in self._costs_on:
            self._costs_on[id(device)] = StageCosts(self.computer(device), self._network, self._program)
        return self._costs_on[id(device)]

    def _model(self, ranks: Ranks) -> CutModel:
        """Return the model in a plan's stages. The schedule and the data and shard degrees do not matter."""
        plan, share = ranks.plan, ranks.share
        num_stages, split, again = ranks.shape.pipeline * ranks.shape.stages, plan.pipeline.split, plan.memory.recompute
        key = id(ranks.device), num_stages, share, again, split
        if key not in self._models:
            given = split or self._program.cut != "balanced" or num_stages == 1
            costs = self._costs(ranks.device)
            division = self._cut(plan, num_stages, share) if given else self._even(costs, num_stages, share, again)
            self._models[key] = CutModel(division, costs, self._sizes, share, again)
        return self._models[key]

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

    def _even(self, costs: StageCosts, num_stages: int, share: Share, again: str) -> StageDivision:
        """Cut the model into stages of nearly equal seconds."""
        runs = [(sum(costs.body(body, share, again, True).seconds for body in own), n) for own, n in self._runs]
        lengths = stage_split.balanced_lengths(runs, num_stages)
        lengths += (0,) * (num_stages - len(lengths))
        if lengths not in self._balanced:
            left = iter(self._segments)
            stages = tuple(flat(tuple(islice(left, length))) for length in lengths)
            self._balanced[lengths] = self._divided(stages, num_stages)
        return self._balanced[lengths]

    def _divided(self, stages: stage_split.Stages, num_stages: int) -> StageDivision:
        """Return one shared object for equal divisions. Missing stages become empty ones."""
        stages += ((),) * (num_stages - len(stages))
        return self._divisions.setdefault(tuple(map(len, stages)), StageDivision(stages, self._held))

    @cached_property
    def blocks(self) -> tuple[Body, int] | None:
        """The most frequent uncut block and its number of occurrences, or None for a model without blocks."""
        found = [(body, number) for body, number in self.bodies.most_common() if body.repeated]
        return found[0] if found else None

    @cached_property
    def bodies(self) -> Counter[Body]:
        """Number of units of each body, as far as stages can divide the model."""
        return Counter(unit.body for unit in self.parts)

    def size(self, body: Body, plan: Plan) -> StageSize:
        """Return the size of a rank that has one unit with this body."""
        return self._sizes.stage(((body, 1),), self.ranks(plan).share, plan.memory.recompute)


def _weighed(saved: Sequence[float], most: Sequence[int], in_all: int) -> float:
    """Return the bytes that a rank keeps at most, in microbatches of all of its stages.

    Each stage keeps up to its entry of `most` microbatches, and all stages together keep `in_all`. `saved`: bytes per
    stage. The last stage, which has the logits, keeps fewer microbatches than the first.
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
    """Estimate the bytes that a step touches between two uses of a tensor: half of all bytes that its operators write.

    A saved activation waits for everything between its forward and its backward, a weight for a whole step.
    """
    written = [o.written_bytes for unit in profile.units for o in unit.body.operations]
    return Amount(sum(a.fixed for a in written) / 2, sum(a.per_sample for a in written) / 2)
