"""Predictions for a cluster of several kinds of devices: shares of grains and stages of a pipeline by speed.

Ranks fill the kinds in the cluster's order. The ranks that divide a layer or a sequence have one kind. A replica's
kinds are those of its pipeline ranks. A step takes as long as its slowest replica, with all of its whole grains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil

from shoal.hardware.values import Cluster
from shoal.planner.calibrate.lessons import Correction
from shoal.planner.predict.lower_bounds import (
    Blocks,
    BlockSize,
    BlockStates,
    Costs,
    MicrobatchSeconds,
    corrected,
    costs_of,
)
from shoal.planner.predict.pipeline import PipelineShape, makespan
from shoal.planner.predict.step_time import Predictor
from shoal.planner.predict.workload import Prediction, Program, Workload, flat
from shoal.plans.grains import share_sizes
from shoal.plans.plan import Layout, Plan

# Shares are written relative to this number, the share of the fastest replica.
_FASTEST = 100

Kinds = tuple[int, ...]  # for each pipeline rank of a replica, the index of its kind


def views(cluster: Cluster) -> list[Cluster]:
    """Return for each kind the cluster that a rank of this kind sees: its own device, and the slowest links.

    A ring over several hosts also passes the links within them, so that the network is no faster than the slowest one.
    """
    if cluster.num_hosts == 1:  # one host has all kinds
        number, within = cluster.num_devices, cluster.within
        return [
            replace(kind, num_hosts=1, devices_per_host=number, within=within, alternatives={})
            for kind in cluster.kinds
        ]
    assert cluster.between is not None, "a cluster of several hosts has a network"
    rates = [cluster.between.bytes_per_second]
    for kind in cluster.kinds:
        if kind.devices_per_host > 1 and kind.within is not None:
            rates.append(kind.within.bytes_per_second / (kind.devices_per_host if kind.within.shared else 1))
    between = replace(cluster.between, bytes_per_second=min(rates))
    return [replace(kind, num_hosts=cluster.num_hosts, between=between) for kind in cluster.kinds]


@lru_cache(maxsize=65536)
def _kinds_of_groups(counts: tuple[int, ...], inner: int) -> Kinds:
    """Return the kind of each group of `inner` ranks on kinds with these numbers of devices."""
    return tuple(kind for kind, number in enumerate(counts) for _ in range(number // inner))


def kinds_of(cluster: Cluster, layout: Layout) -> list[Kinds]:
    """Return the kinds of each replica of a layout, in rank order; none if the kinds have too few devices."""
    inner, replicas = layout.tensor * layout.context, layout.divides_grains
    groups = _kinds_of_groups(tuple(kind.num_devices for kind in cluster.kinds), inner)
    if len(groups) * inner < layout.world_size:
        return []
    return [groups[replica : replicas * layout.pipeline : replicas] for replica in range(replicas)]


def devices_of(cluster: Cluster, layout: Layout) -> list[int]:
    """Return how many devices of each kind a layout uses."""
    inner, kinds = layout.tensor * layout.context, [kind for one in kinds_of(cluster, layout) for kind in one]
    return [kinds.count(kind) * inner for kind in range(len(cluster.kinds))]


def by_speed(seconds: Sequence[Sequence[float]]) -> list[int]:
    """Return the numbers of consecutive parts of each stage with the least time of the slowest stage.

    Args:
        seconds: of each part on the devices of each stage: `seconds[stage][part]`. Each stage has at least one part.
    """
    num_parts = len(seconds[0])

    def filled(limit: float) -> tuple[list[int], float]:
        lengths, slowest = list[int](), 0.0
        for stage, own in enumerate(seconds):
            first = sum(lengths)
            most = num_parts - first - (len(seconds) - stage - 1)
            length, total = 1, own[first]
            while length < most and (stage == len(seconds) - 1 or total + own[first + length] <= limit):
                total += own[first + length]
                length += 1
            lengths.append(length)
            slowest = max(slowest, total)
        return lengths, slowest

    low, (best, high) = 0.0, filled(max(map(sum, seconds)))
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        lengths, slowest = filled(middle)
        if slowest <= middle:
            best, high = lengths, slowest
        else:
            low = middle
            if slowest < high:
                best, high = lengths, slowest
    return best


class MixedPredictor:
    """Performance model of one workload on a cluster of several kinds of devices."""

    def __init__(self, work: Workload, cluster: Cluster, program: Program | None = None) -> None:
        self.work, self.cluster = work, cluster
        self.predictors = [Predictor(work, view, program) for view in views(cluster)]

    def predict(self, plan: Plan) -> Prediction:
        """Predict a step of the plan: of its slowest replica, with the memory of the rank that lacks most."""
        of_kinds: dict[Kinds, int] = {}
        sizes = share_sizes(self.work.num_grains, plan.layout.divides_grains, plan.layout.shares)
        for kinds, grains in zip(kinds_of(self.cluster, plan.layout), sizes, strict=True):
            of_kinds[kinds] = max(of_kinds.get(kinds, 1), grains)
        predictions = [self.of_replica(plan, kinds, grains) for kinds, grains in of_kinds.items()]
        slowest = max(predictions, key=lambda one: one.step_seconds)
        usable = [one.cluster.usable_bytes(one.cluster.device) for one in self.predictors]
        fullest = max(predictions, key=lambda one: (one.missing_bytes, one.peak_bytes / usable[one.fullest_kind]))
        mfu = slowest.mfu
        if mfu is not None:  # of the mean peak of all devices
            kind = next(kinds[0] for kinds, one in zip(of_kinds, predictions, strict=True) if one is slowest)
            mfu *= self._peaks(plan)[kind] / self.peak(plan)
        return replace(
            slowest,
            memory=fullest.memory,
            peak_bytes=fullest.peak_bytes,
            fits=fullest.fits,
            missing_bytes=fullest.missing_bytes,
            kept_bytes=fullest.kept_bytes,
            fullest_kind=fullest.fullest_kind,
            mfu=mfu,
        )

    def peak(self, plan: Plan) -> float:
        """Return the mean dense peak of a plan's devices in FLOP/s, the reference of `mfu`."""
        numbers = devices_of(self.cluster, plan.layout)
        return sum(peak * n for peak, n in zip(self._peaks(plan), numbers, strict=True)) / plan.layout.world_size

    def _peaks(self, plan: Plan) -> list[float]:
        return [one.cluster.device.flops[one.reference(plan)] for one in self.predictors]

    def of_replica(self, plan: Plan, kinds: Kinds, grains: int) -> Prediction:
        """Predict a step of a replica on these kinds with this number of grains."""
        if len(set(kinds)) == 1:
            return replace(self.predictors[kinds[0]].predict(plan, grains), fullest_kind=kinds[0])
        pipeline = plan.layout.pipeline
        of_kinds = {kind: self.predictors[kind].staging.ranks(plan, grains) for kind in set(kinds)}
        first = of_kinds[kinds[0]]
        of_ranks = [of_kinds[kind].model.passes(first.adds) for kind in kinds]
        passes = [of_ranks[stage % pipeline][stage] for stage in range(pipeline * plan.pipeline.stages_per_rank)]
        busy = [sum(one.seconds for one in passes[place::pipeline]) for place in range(pipeline)]
        place = busy.index(max(busy))
        slowest = self.predictors[kinds[place]]
        message = max(self.predictors[kind].message(plan, ranks) for kind, ranks in of_kinds.items())
        simulated = makespan(PipelineShape(*first.shape), passes, message)
        prediction = slowest.of_ranks(plan, slowest.staging.ranks(plan, grains, place), simulated)
        memory, missing, fullest = prediction.memory, -float("inf"), kinds[place]
        for at, kind in enumerate(kinds):
            one, ranks = self.predictors[kind], of_kinds[kind]
            own = one.bytes(plan, ranks, ranks.model.every(ranks.shape)[at])
            lacking = sum(own.values()) - one.cluster.usable_bytes(ranks.device)
            if lacking > missing:
                memory, missing, fullest = own, lacking, kind
        return replace(
            prediction,
            memory=memory,
            peak_bytes=sum(memory.values()),
            fits=missing <= 0,
            missing_bytes=max(0.0, missing),
            fullest_kind=fullest,
        )

    def ideal_seconds(self, plan: Plan) -> float:
        """Return the seconds of the model's passes if no device waited, each at its own speed.

        Without a pipeline each replica has a whole number of grains.
        """
        per, numbers, num_grains = plan.batch.grains_per_microbatch, devices_of(self.cluster, plan.layout), 0
        each: list[tuple[int, float]] = []  # groups of ranks, and the seconds in which one of them computes a grain
        for predictor, number in zip(self.predictors, numbers, strict=True):
            if number:
                passes = predictor.staging.ranks(plan, per).model.passes(False)
                inner = plan.layout.tensor * plan.layout.context
                each.append((number // inner, max(1e-12, sum(one.seconds for one in passes) / per)))
        high = self.work.num_grains * min(seconds for _, seconds in each)
        low = self.work.num_grains / sum(groups / seconds for groups, seconds in each)
        while plan.layout.pipeline == 1 and high - low > 0.01 * high:
            middle = (low + high) / 2
            num_grains = sum(groups * int(middle / seconds) for groups, seconds in each)
            low, high = (low, middle) if num_grains >= self.work.num_grains else (middle, high)
        return low

    def shared_out(self, plan: Plan) -> Plan:
        """Return the plan with stages and shares of grains by the speed of its devices.

        The slowest replica with these shares is as fast as whole grains allow. Replicas with equal devices have equal
        shares. The microbatch becomes a part of the largest share.
        """
        layout, num_grains = plan.layout, self.work.num_grains
        replicas = kinds_of(self.cluster, layout)
        slowest_first = [max(kinds, key=self.grain_seconds) for kinds in zip(*replicas, strict=True)]  # of each stage
        if len(set(slowest_first)) > 1:
            plan = self._staged(plan, slowest_first)
        if len(set(replicas)) == 1:
            return plan
        few, per = ceil(num_grains / len(replicas)), plan.batch.grains_per_microbatch
        fixed, each = dict[Kinds, float](), dict[Kinds, float]()  # seconds of a step, and of each grain
        for kinds in set(replicas):
            once, twice = (self.of_replica(plan, kinds, grains).step_seconds for grains in (few * per, 2 * few * per))
            each[kinds] = max(1e-12, (twice - once) / (few * per))
            fixed[kinds] = max(0.0, once - each[kinds] * few * per)
        # All replicas end at the same time T: its grains n of each satisfy T = fixed + n x each.
        rates = sum(1 / each[kinds] for kinds in replicas)
        ends = (num_grains + sum(fixed[kinds] / each[kinds] for kinds in replicas)) / rates
        ideal = [max(0.0, ends - fixed[kinds]) / each[kinds] for kinds in replicas]
        shares = tuple(max(1, round(_FASTEST * one / max(ideal))) for one in ideal)
        most = max(share_sizes(num_grains, len(replicas), shares))
        sizes = {per, ceil(most / ceil(most / per)), *((most,) if per == few else ())}
        plans = [
            plan.model_copy(
                update={
                    "layout": layout.model_copy(update={"shares": shares}),
                    "batch": plan.batch.model_copy(update={"grains_per_microbatch": size}),
                }
            )
            for size in sorted(sizes, reverse=True)
        ]
        predictions = [self.predict(one) for one in plans]
        best = min(range(len(plans)), key=lambda n: (not predictions[n].fits, predictions[n].step_seconds))
        return plans[best]

    def grain_seconds(self, kind: int) -> float:
        """Return the seconds in which one device of a kind computes a grain with the whole model."""
        return self.predictors[kind].staging.ranks(Plan(), 1).busiest.seconds

    def _staged(self, plan: Plan, kinds: Sequence[int]) -> Plan:
        """Return the plan with a split into stages by the speed of the pipeline ranks, which have these kinds.

        The plan stays as it is if the model has too few parts.
        """
        staging, num_stages = self.predictors[0].staging, len(kinds) * plan.pipeline.stages_per_rank
        segments = staging.segments
        if len(segments) < num_stages:
            return plan
        of_kinds = {}
        for kind in set(kinds):
            ranks = self.predictors[kind].staging.ranks(plan, 1)
            costs, again = ranks.costs, plan.memory.recompute
            of_kinds[kind] = [sum(costs.body(u.body, ranks.share, again, True).seconds for u in s) for s in segments]
        lengths, at, split = by_speed([of_kinds[kinds[s % len(kinds)]] for s in range(num_stages)]), 0, list[str]()
        for length in lengths[:-1]:
            at += length
            split.append(flat(segments[at : at + 1])[0].name)
        return plan.model_copy(update={"pipeline": plan.pipeline.model_copy(update={"split": tuple(split)})})


class MixedCosts(Costs):
    """Predictions and their lower bounds on several kinds of devices.

    A replica of some kind has at least the grains of equal shares. So the least bound of all kinds, each computed as if
    all devices were of this kind, bounds every plan.
    """

    def __init__(self, predictor: MixedPredictor, of_kinds: Sequence[Costs]) -> None:
        """Set the costs of each kind, each with the kind's view of the cluster."""
        self._mixed, self._of_kinds = predictor, of_kinds
        self.memory_bytes = max(one.memory_bytes for one in of_kinds)
        self.memory_margin = of_kinds[0].memory_margin

    def with_more_memory(self, num_bytes: int) -> Costs:
        """Return the costs of devices with more memory."""
        return MixedCosts(self._mixed, [one.with_more_memory(num_bytes) for one in self._of_kinds])

    def shared_out(self, plan: Plan) -> Plan:
        """Return the plan with stages and shares of grains by the speed of its devices."""
        return self._mixed.shared_out(plan)

    def predict(self, plan: Plan) -> Prediction:
        """Return the corrected prediction of a plan."""
        prediction = self._mixed.predict(plan)
        missing = max(0.0, prediction.peak_bytes - self._of_kinds[prediction.fullest_kind].memory_bytes)
        if missing != prediction.missing_bytes:  # `with_more_memory`
            prediction = replace(prediction, fits=missing == 0, missing_bytes=missing)
        return corrected(prediction, self._of_kinds[0].correction)

    def floor(self, samples: float, replicas: int, tensor: int, pipeline: int, context: int) -> float:
        """Return a lower bound for plans with at most `replicas` replicas: also the time if no device waited."""
        least = min(one.floor(samples, replicas, tensor, pipeline, context) for one in self._of_kinds)
        layout = Layout(data=replicas, tensor=tensor, pipeline=pipeline, context=context)
        numbers = devices_of(self._mixed.cluster, layout)
        each = (one.floor(1.0, 1, tensor, 1, context) for one in self._of_kinds)
        rate = sum(number / (tensor * context) / max(1e-12, one) for number, one in zip(numbers, each, strict=True))
        return max(least, self._mixed.work.global_batch / rate) if rate else least

    def beside(self, num_devices: int, is_divided: bool) -> float:
        """Return a lower bound of the seconds that only `nearly` includes."""
        return min(one.beside(num_devices, is_divided) for one in self._of_kinds)

    def microbatch(self, plan: Plan) -> MicrobatchSeconds:
        """Return lower bounds of the seconds of a microbatch, given a plan with one microbatch and no pipeline."""
        every = [one.microbatch(plan) for one in self._of_kinds]
        blocks = Blocks(*(min(values) for values in zip(*(one.blocks for one in every), strict=True)))
        return MicrobatchSeconds(min(one.seconds for one in every), blocks)

    def staged(self, plan: Plan) -> float:
        """Return a lower bound from the busiest stage, for all plans that differ only in replicas and their level."""
        every = [one.staging.ranks(plan) for one in self._mixed.predictors]
        return min(ranks.busiest.seconds * ranks.microbatches for ranks in every) * self._of_kinds[0].factor

    def at(self, plan: Plan) -> float:
        """Return a lower bound for all plans that differ only in the division of replicas into data and shard."""
        # The stages of a pipeline on other kinds are cut elsewhere, so that nothing but the busiest is known.
        alone = self.staged(plan) if plan.layout.pipeline > 1 else min(one.at(plan) for one in self._of_kinds)
        return max(alone, self._of_kinds[0].factor * self._mixed.ideal_seconds(plan))

    def nearly(self, plan: Plan) -> float:
        """Return a lower bound of the step that uses the whole plan."""
        alone = self.staged(plan) if plan.layout.pipeline > 1 else min(one.nearly(plan) for one in self._of_kinds)
        return max(alone, self._of_kinds[0].factor * self._mixed.ideal_seconds(plan))

    def block_size(self, plan: Plan) -> BlockSize:
        """Return the activation bytes of a block, for all plans of a family and any length of the pipeline."""
        return self._of_kinds[0].block_size(plan)

    def block_states(self, plans: Sequence[Plan]) -> tuple[BlockStates, ...]:
        """Return lower bounds of the bytes of blocks without activations for each plan."""
        every = zip(*(one.block_states(plans) for one in self._of_kinds), strict=True)
        return tuple(min(states, key=lambda one: one.once) for states in every)

    def least_bytes(self, plan: Plan) -> float:
        """Return a lower bound of the bytes that a plan lacks, above `memory_bytes`."""
        return self.memory_bytes + min(one.least_bytes(plan) - one.memory_bytes for one in self._of_kinds)


def costs_of_kinds(
    work: Workload, cluster: Cluster, program: Program | None = None, correction: Correction | None = None
) -> Callable[[int], Costs]:
    """Return the function from a number of devices, in the order of the kinds, to the costs of plans on them."""
    if not cluster.kinds:
        return costs_of(work, cluster, program, correction)
    alone, predictor = costs_of(work, cluster.kinds[0], program, correction), MixedPredictor(work, cluster, program)
    mixed = MixedCosts(predictor, [Costs(one, one.cluster.device, correction) for one in predictor.predictors])
    return lambda num_devices: alone(num_devices) if num_devices <= cluster.kinds[0].num_devices else mixed
