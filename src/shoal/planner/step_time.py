"""Seconds and bytes of a step under a plan, each term by its name. The formulas are in docs/planner.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from shoal.hardware import Cluster, Device
from shoal.plan.plan import Plan
from shoal.plan.schedule import Action, Kind, actions, most_in_flight, simulate
from shoal.planner import stage_units
from shoal.planner.compute import ITEMSIZE, Computer, Share
from shoal.planner.exchange_time import Network
from shoal.planner.exchanged import Exchanged, Holder
from shoal.planner.footprint import Sizes, StageSize, state_bytes
from shoal.planner.profile import Amount, Profile, Unit
from shoal.planner.replica_sums import Load, least_sums, load
from shoal.planner.stage_cost import Pass, Passes, StageCosts
from shoal.planner.workload import CATEGORIES, TERMS, Prediction, Program, Workload


@dataclass(frozen=True)
class _Rank:
    """One rank of the pipeline: its stages, their costs and sizes, and its microbatches."""

    stages: tuple[tuple[Unit, ...], ...]
    passes: tuple[Passes, ...]
    size: StageSize
    in_flight: float  # microbatches whose activations are held, of all of its stages together

    @cached_property
    def holder(self) -> Holder:
        """What its sums and its update depend on."""
        return Holder(tuple(unit for stage in self.stages for unit in stage), self.size)


@dataclass(frozen=True)
class _Ranks:
    """All ranks of the pipeline; `fullest` has of each size the one that holds most microbatches."""

    share: Share
    microbatches: int
    every: tuple[_Rank, ...]
    busiest: _Rank
    fullest: tuple[_Rank, ...]


class Predictor:
    """Predicts plans of one workload on one cluster; what bodies cost is computed once for all of them."""

    def __init__(self, work: Workload, cluster: Cluster, program: Program | None = None) -> None:
        self.work, self.cluster, self.program = work, cluster, program or Program()
        self._network = Network(cluster)
        self._exchanged = Exchanged(work.profile, self._network, self.program)
        self._costs_on: dict[int, StageCosts] = {}
        self._held = _held(work.profile)
        self._executed: float | None = None
        self._sizes = Sizes(self.program)
        self._stages: dict[tuple[object, ...], stage_units.Stages] = {}
        self._simulated: dict[tuple[object, ...], float] = {}
        self._whole: stage_units.Stages = (work.profile.units,)
        self._shares: dict[tuple[int, int, bool, int], Share] = {}
        self._passes: dict[tuple[object, ...], tuple[stage_units.Stages, tuple[Passes, ...]]] = {}
        self._least: dict[tuple[object, ...], float] = {}
        self._loads: dict[int, Load] = {}  # by the identity of what _known_ranks keeps
        self._known_ranks: dict[tuple[object, ...], _Ranks] = {}

    def _device(self, plan: Plan) -> Device:
        if not self.cluster.alternatives:
            return self.cluster.device
        return self.cluster.device_for(min(self.cluster.devices_per_host, plan.layout.world_size))

    def _costs(self, plan: Plan) -> StageCosts:
        device = self._device(plan)
        if id(device) not in self._costs_on:
            self._costs_on[id(device)] = StageCosts(self._computer(device), self._network, self.program)
        return self._costs_on[id(device)]

    def _computer(self, device: Device) -> Computer:
        return Computer(device, self.program.fast_float32, self.program.attention, self._held)

    def ideal_seconds(self, num_devices: int) -> float:
        """Seconds of a sample that no plan on so many devices goes below if one rank computes all of it.

        Every operation as fast as the best of its kind; what does not grow with the samples is left out.
        """
        computer = self._computer(self.cluster.device_for(min(self.cluster.devices_per_host, num_devices)))
        bodies = Counter(unit.body for unit in self.work.profile.units)
        return sum(computer.ideal(o) * count for body, count in bodies.items() for o in body.operations)

    def least_seconds(self, plan: Plan) -> float:
        """A lower bound of the step that knows nothing of data and shard: the busiest rank's work, and the bubble's.

        The last rank waits for the first microbatch to come down all stages before its first, and the step ends when
        its last gradient has gone up them again.
        """
        key = *self._key(plan), plan.pipeline.schedule == "zero_bubble"
        if key not in self._least:
            _, microbatches = self._share(plan)
            whole = [passes.seconds for passes in self._of_stages(plan)]
            busy = [sum(whole[rank :: plan.layout.pipeline]) for rank in range(plan.layout.pipeline)]
            self._least[key] = max(microbatches * max(busy), self._filled(plan))
        return self._least[key]

    def _of_stages(self, plan: Plan) -> tuple[Passes, ...]:
        stages = self._cut(plan)
        share, microbatches = self._share(plan)
        key = id(stages), id(self._device(plan)), share, microbatches > 1, plan.memory.recompute
        if key not in self._passes:
            costs = self._costs(plan)
            self._passes[key] = stages, tuple(costs.stage(stage, share, plan, microbatches > 1) for stage in stages)
        return self._passes[key][1]

    def _filled(self, plan: Plan, message: float = 0.0) -> float:
        """The last rank's microbatches and its waits before and after."""
        _, microbatches = self._share(plan)
        passes, ranks, per = self._of_stages(plan), plan.layout.pipeline, plan.pipeline.stages_per_rank
        before = passes[: ranks - 1]
        down = sum(one.forward.seconds for one in before) + message * len(before)
        up = sum(one.backward.seconds for one in before) + message * len(before)
        own = microbatches * (sum(one.seconds for one in passes[ranks - 1 :: ranks]) + 2 * message * per)
        if plan.pipeline.schedule != "zero_bubble":
            return down + own + up
        # The gradients of weights may be put off, here and above: then nothing waits for them.
        up -= sum(one.backward_weight.seconds for one in before)
        late = min(microbatches, ranks) * passes[-1].backward_weight.seconds
        return down + own + max(0.0, up - late)

    def least_at(self, plan: Plan) -> float:
        """A lower bound of the step that knows the replicas of a plan, but not which of them are data and shard."""
        ranks, costs = self._ranks(plan), self._costs(plan)
        seconds = self.least_seconds(plan)
        if plan.layout.pipeline > 1:
            seconds = max(seconds, self._filled(plan, self._message(plan, ranks.share)))
        if self._device(plan).kind == "cpu":
            return seconds  # where large messages leave the caches: no bound from their sum
        if id(ranks) not in self._loads:
            units = [unit for stage in ranks.busiest.stages for unit in stage]
            passes = [costs.body(unit.body, ranks.share, plan, ranks.microbatches > 1) for unit in units]
            self._loads[id(ranks)] = load(units, passes, [rank.size.trainable for rank in ranks.fullest], plan)
        return seconds + least_sums(self._network, plan, self._loads[id(ranks)], self.program)

    def least_bytes(self, plan: Plan) -> float:
        """The peak, of the rank that needs most: exact but for others' buckets in shared memory, as many as there are.

        So it knows of the data axis only whether there are several replicas.
        """
        return max(sum(self._bytes(plan, rank, mapped=False).values()) for rank in self._ranks(plan).fullest)

    def without_waits(self, plan: Plan) -> float:
        """A lower bound of the step that knows all of the plan, and is cheaper than to simulate its pipeline."""
        if plan.layout.pipeline == 1:
            return self.predict(plan).step_seconds
        ranks = self._ranks(plan)
        makespan = self._filled(plan, self._message(plan, ranks.share))
        return sum(self._seconds(plan, ranks, makespan).values())

    def predict(self, plan: Plan) -> Prediction:
        """What a step of the plan takes."""
        ranks = self._ranks(plan)
        terms = self._seconds(plan, ranks)
        memory = max((self._bytes(plan, rank) for rank in ranks.fullest), key=lambda found: sum(found.values()))
        seconds, peak = sum(terms.values()), sum(memory.values())
        missing = max(0.0, peak - self._device(plan).memory_bytes)
        samples = self.work.global_batch
        flops = self.work.profile.flops(samples) / plan.layout.world_size
        return Prediction(
            step_seconds=seconds,
            terms=terms,
            memory=memory,
            peak_bytes=peak,
            fits=missing == 0,
            missing_bytes=missing,
            bubble=terms["bubble"] / seconds if seconds else 0.0,
            flops_per_device=flops,
            mfu=self._used(plan, flops) / seconds if seconds else None,
            kept_bytes=tuple(self._kept(rank, ranks.share) for rank in ranks.every),
        )

    def first_bytes(self, plan: Plan) -> float:
        """The peak of the first rank, which some measurements are of."""
        return sum(self._bytes(plan, self._ranks(plan).every[0]).values())

    def _used(self, plan: Plan, flops: float) -> float:
        """Seconds that a device at its peak takes for the part that it executes of the model's FLOPs."""
        computer, samples = self._costs(plan).computer, self.work.global_batch
        if self._executed is None:
            units, whole = self.work.profile.units, self.work.profile.flops(samples)
            less = sum(computer.spared(operation, samples) for unit in units for operation in unit.body.operations)
            self._executed = 1.0 - less / whole if whole else 1.0
        return flops * self._executed / computer.device.flops[computer.dtype(plan.precision.compute)]

    def _share(self, plan: Plan) -> tuple[Share, int]:
        """A rank's share of a microbatch, and its microbatches in a step (of the rank with most grains)."""
        layout = plan.layout
        grains = -(-self.work.num_grains // (layout.data * layout.shard))
        per = min(plan.batch.grains_per_microbatch or grains, grains)
        key = per, layout.tensor, plan.tensor.sequence and layout.tensor > 1, layout.context
        if key not in self._shares:
            self._shares[key] = Share(per * self.work.grain_size, *key[1:])
        return self._shares[key], -(-grains // per)

    # ------------------------------------------------------------------------------------------------------- the stages

    def _of_rank(self, plan: Plan, rank: int) -> tuple[tuple[Unit, ...], ...]:
        stages = self._cut(plan)
        return stages[rank :: plan.layout.pipeline]

    def _cut(self, plan: Plan) -> stage_units.Stages:
        units, num_stages = self.work.profile.units, plan.layout.pipeline * plan.pipeline.stages_per_rank
        if num_stages == 1:
            return self._whole
        share, _ = self._share(plan)
        key = (id(self._device(plan)), num_stages, share, plan.memory.recompute, plan.pipeline.split)
        if key not in self._stages:
            if plan.pipeline.split:
                self._stages[key] = stage_units.by_names(units, plan.pipeline.split)
            elif self.program.cut == "equal":
                self._stages[key] = stage_units.equal(units, num_stages)
            elif self.program.cut == "thresholds":
                flops = [unit.body.flops(share.samples) for unit in units]
                self._stages[key] = stage_units.thresholds(units, flops, num_stages)
            else:
                seconds = [self._costs(plan).body(unit.body, share, plan, True).seconds for unit in units]
                self._stages[key] = stage_units.balanced(units, seconds, num_stages)
            missing = num_stages - len(self._stages[key])  # a model of fewer units: it leaves ranks without any
            self._stages[key] += ((),) * missing
        return self._stages[key]

    def _key(self, plan: Plan) -> tuple[object, ...]:
        """What tells plans apart whose data and shard axes are not looked at."""
        pipeline, device = plan.pipeline, id(self._device(plan))
        shape = plan.layout.pipeline, pipeline.stages_per_rank, pipeline.split, plan.memory.recompute
        return device, *self._share(plan), *shape

    def _ranks(self, plan: Plan) -> _Ranks:
        """The ranks of the pipeline; the same whatever data and shard divide."""
        key = *self._key(plan), plan.pipeline.schedule
        if key not in self._known_ranks:
            share, microbatches = self._share(plan)
            every = tuple(self._rank(plan, rank, share, microbatches) for rank in range(plan.layout.pipeline))
            largest: dict[StageSize, _Rank] = {}
            for rank in every:
                other = largest.setdefault(rank.size, rank)
                if rank.in_flight > other.in_flight:
                    largest[rank.size] = rank
            busiest = max(every, key=lambda rank: sum(p.seconds for p in rank.passes))
            self._known_ranks[key] = _Ranks(share, microbatches, every, busiest, tuple(largest.values()))
        return self._known_ranks[key]

    def _rank(self, plan: Plan, rank: int, share: Share, microbatches: int) -> _Rank:
        stages = self._of_rank(plan, rank)
        passes = self._of_stages(plan)[rank :: plan.layout.pipeline]
        in_flight = 1.0
        if plan.layout.pipeline > 1:
            per = plan.pipeline.stages_per_rank
            in_flight = _in_flight(plan.pipeline.schedule, plan.layout.pipeline, per, microbatches)[rank] / per
        size = self._sizes.stage([unit for stage in stages for unit in stage], share, plan)
        return _Rank(stages, passes, size, in_flight)

    # ------------------------------------------------------------------------------------------------------ its seconds

    def _seconds(self, plan: Plan, ranks: _Ranks, makespan: float | None = None) -> dict[str, float]:
        """The terms; the pipeline is simulated where its makespan is not given."""
        share, microbatches, busiest = ranks.share, ranks.microbatches, ranks.busiest
        terms = dict.fromkeys(TERMS, 0.0)
        forward, backward = _sum(busiest.passes)
        for one in (forward, backward):
            terms["compute"] += one.work.device * microbatches
            terms["recompute"] += one.again.device * microbatches
            terms["tensor"] += one.tensor * microbatches
            terms["context"] += one.context * microbatches
        busy = sum(p.forward.seconds + p.backward.seconds for p in busiest.passes) * microbatches
        told = sum(terms.values())
        terms["launch"] = max(0.0, busy - told)
        terms["context"] += self._exchanged.ends(plan, self.work.profile.units, share) * microbatches
        units = [unit for stage in busiest.stages for unit in stage]
        costs = self._costs(plan)
        if plan.shards_model:
            of_units = [costs.body(unit.body, share, plan, microbatches > 1) for unit in units]
            slowed = 1.0 if costs.computer.device.kind == "cpu" else self.program.contention
            terms["parameters"] = self._exchanged.parameters(plan, units, of_units, microbatches, slowed)
        if plan.layout.pipeline > 1:
            message = self._message(plan, share)
            if makespan is None:
                makespan = self._makespan(plan, ranks.every, microbatches, message)
            terms["pipeline"] = 2 * message * microbatches * plan.pipeline.stages_per_rank
            terms["bubble"] = max(0.0, makespan - busy - terms["pipeline"])
        last = sum(p.backward.seconds for p in busiest.passes)
        waits = terms["launch"] > 0
        holders = [rank.holder for rank in ranks.fullest]
        sums = [self._exchanged.gradients(plan, costs.computer, holder, last, waits) for holder in holders]
        terms["gradients"] = max(sums)
        terms["optimizer"] = max(self._exchanged.update(plan, costs.computer, holder) for holder in holders)
        fetched = self.work.sample_seconds * share.samples * microbatches
        # The host fetches while a GPU computes; a CPU does one after the other.
        terms["data"] = fetched if costs.computer.device.kind == "cpu" else max(0.0, fetched - busy)
        device = costs.computer.device
        terms["host"] = device.step_seconds + device.tensor_seconds * max(holder.num_tensors for holder in holders)
        return terms

    def _message(self, plan: Plan, share: Share) -> float:
        """Seconds of handing one microbatch's activation to the next stage."""
        cut = self._cut(plan)
        num_bytes = max(
            (stage[-1].body.output_bytes.at(share.local_samples) for stage in cut[:-1] if stage), default=0.0
        )
        stride = plan.layout.world_size // plan.layout.pipeline
        parts = share.tensor if share.sequence else 1
        return self._network.seconds("send", num_bytes / parts, self._network.hop(plan.layout.pipeline, stride))

    def _makespan(self, plan: Plan, ranks: Sequence[_Rank], microbatches: int, message: float) -> float:
        pipeline, per = plan.layout.pipeline, plan.pipeline.stages_per_rank
        seconds = {}
        for rank, held in enumerate(ranks):
            for turn, passes in enumerate(held.passes):
                stage = rank + turn * pipeline
                weight = passes.backward_weight.seconds
                whole = passes.backward.seconds
                seconds[stage] = {
                    Kind.FORWARD: passes.forward.seconds + message,
                    Kind.BACKWARD: whole + message,
                    Kind.BACKWARD_INPUT: whole - weight + message,
                    Kind.BACKWARD_WEIGHT: weight,
                }
        key = (plan.pipeline.schedule, pipeline, per, microbatches, repr(seconds))
        if key not in self._simulated:
            lists = actions(plan.pipeline.schedule, pipeline, per, microbatches)

            def of(action: Action) -> float:
                return seconds[action.stage][action.kind]

            self._simulated[key] = simulate(lists, of)[0]
        return self._simulated[key]

    # -------------------------------------------------------------------------------------------------------- its bytes

    def _bytes(self, plan: Plan, rank: _Rank, mapped: bool = True) -> dict[str, float]:
        memory = dict.fromkeys(CATEGORIES, 0.0)
        memory.update(state_bytes(plan, self.work.profile, rank.size, self.program))
        memory["activations"] = rank.in_flight * rank.size.saved + rank.size.transient
        memory["communication"] = self._buckets(plan, rank, mapped)
        several = plan.layout.pipeline > 1
        share = self.program.pipeline_fragmentation if several else self.program.fragmentation
        memory["allocator"] = share * memory["activations"]
        memory["reserved"] = float(self._device(plan).reserved_bytes)
        return memory

    def _kept(self, rank: _Rank, share: Share) -> int:
        """What the meter of a run counts as activations. Of the batch, inputs are most, and kept where they enter."""
        enters = self.work.profile.units[0] in rank.stages[0]
        batch = self.work.profile.saved_batch.at(share.samples) if enters else 0.0
        return round(rank.in_flight * (rank.size.saved + batch))

    def _buckets(self, plan: Plan, rank: _Rank, mapped: bool) -> float:
        ranks = plan.layout.data * plan.layout.shard
        if ranks == 1 or plan.shards_model:
            return 0.0
        per_element = self.program.bucket_bytes
        if mapped and plan.collectives.all_reduce == "shared_memory":
            # Every rank maps the others' buckets, and reads all of them.
            per_element += ITEMSIZE[plan.precision.reduce] * (ranks - 1)
        return rank.size.trainable * per_element


def _held(profile: Profile) -> Amount:
    """Bytes that a step goes through between two uses of a tensor: on an average half of what its operators write.

    A saved activation waits for all that comes between its forward and its backward, a weight for the whole step.
    """
    written = [o.written_bytes for unit in profile.units for o in unit.body.operations]
    return Amount(sum(a.fixed for a in written) / 2, sum(a.per_sample for a in written) / 2)


@lru_cache(maxsize=4096)
def _in_flight(schedule: str, num_ranks: int, per: int, microbatches: int) -> tuple[int, ...]:
    """The most microbatches that each rank holds, over all of its stages."""
    return tuple(most_in_flight(own) for own in actions(schedule, num_ranks, per, microbatches))


def _sum(passes: Sequence[Passes]) -> tuple[Pass, Pass]:
    total = passes[0]
    for one in passes[1:]:
        total += one
    return total.forward, total.backward


def predict(plan: Plan, work: Workload, cluster: Cluster, program: Program | None = None) -> Prediction:
    """What a step of one plan takes; for many plans make a Predictor."""
    return Predictor(work, cluster, program).predict(plan)
