"""Cost functions of a search: predictions of plans on a cluster, and lower bounds of many plans at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import cache, cached_property
from operator import add
from typing import NamedTuple

from shoal.hardware.values import Cluster, Device
from shoal.planner.calibrate.lessons import Correction
from shoal.planner.predict.lower_bounds import (
    Blocks,
    BlockSize,
    BlockStates,
    Floors,
    PipelineShape,
    filled,
)
from shoal.planner.predict.pipeline_ranks import CutModel, Ranks
from shoal.planner.predict.roofline import ITEMSIZE
from shoal.planner.predict.step_time import Predictor
from shoal.planner.predict.workload import Prediction, Program, Workload
from shoal.planner.search.space import Degrees, ModelDegrees, Recompute, layout_of
from shoal.plans.accounting.collectives import REPLICAS
from shoal.plans.layout import divisors
from shoal.plans.plan import Plan


class ScheduleFamily(NamedTuple):
    """Microbatch schedules that differ only in the order of their microbatches."""

    grains: int
    recompute: Recompute
    sequence: bool


class LayoutClass(NamedTuple):
    """Degrees that differ in replicas alone and leave a rank as many grains, so that their bounds are equal."""

    share: int
    cut: ModelDegrees
    replicas: tuple[int, ...]  # in order, the fewest first
    first: Degrees  # those with the fewest replicas
    divided: Degrees  # those with the most
    fewest: int  # devices
    most: int  # devices
    beside: float  # seconds of any plan of all of these places that no other bound has


class Whole(NamedTuple):
    """Schedule family on one rank with all stages: seconds of a microbatch, and least bytes; `blocks`: each alone."""

    group: ScheduleFamily
    seconds: float
    bytes: float
    blocks: Blocks
    size: BlockSize

    def seconds_on(self, pipeline: int) -> float:
        """Seconds of a microbatch that the busiest rank of a pipeline has at least."""
        return max(self.seconds / pipeline, self.blocks.busiest(pipeline))

    @property
    def activations(self) -> float:
        """Bytes of a microbatch's activations: of the fullest rank of a pipeline in `even_shares` parts at least."""
        return self.blocks.number * self.size.saved


class Turn(NamedTuple):
    """Seconds of one microbatch: down to the last rank, up from it, of gradients of weights above it, and on it.

    `every`: on all stages. `slowest`: the slowest forward and the slowest backward of a stage, one of each. `busiest`:
    on the busiest rank. `end`: on the last stage, and its gradients of weights.
    """

    down: float
    up: float
    weights: float
    last: float
    every: float
    slowest: float
    busiest: float
    end: float
    end_weights: float

    def filled(self, of: PipelineShape, message: float = 0.0) -> float:
        """The last rank's microbatches and its waits before and after."""
        ranks, microbatches = of.pipeline, of.microbatches
        down = self.down + message * (ranks - 1)
        up = self.up + message * (ranks - 1)
        own = microbatches * (self.last + 2 * message * of.stages)
        if of.schedule != "zero_bubble":
            return max(down + own + up, self._passed(of, message))
        # The gradients of weights may be put off, here and above: then nothing waits for them.
        up -= self.weights
        late = min(microbatches, ranks) * self.end_weights
        return down + own + max(0.0, up - late)

    def _passed(self, of: PipelineShape, message: float) -> float:
        """One microbatch through all stages and back, and on one stage the others that come before or after it.

        The last stage begins when a microbatch has passed all others, and its last gradient has to pass them again.
        Under gpipe, where no backward begins before the last forward, the slowest stages count instead.
        """
        others = self.slowest if of.schedule == "gpipe" else self.end
        times = of.pipeline * of.stages + of.microbatches - 1
        return self.every + (of.microbatches - 1) * others + 2 * message * times

    def least(self, of: PipelineShape) -> float:
        """Seconds of a step that no plan of this shape goes below."""
        return max(of.microbatches * self.busiest, self.filled(of))


class Costs:
    """Predictions for ranks with such a device, corrected by measured runs, and lower bounds of them.

    Equal numbers of devices have one and the same Costs, and others may have too.
    """

    def __init__(self, predictor: Predictor, device: Device, correction: Correction | None = None) -> None:
        self._predictor, self._device, self._correction = predictor, device, correction or Correction()
        self._staging, self._program, self._exchanged = predictor.staging, predictor.program, predictor.exchanged
        self.memory_bytes = predictor.cluster.usable_bytes(device)
        self.alike = id(self)  # by which what does not depend on the memory is shared
        self.memory_margin = predictor.cluster.memory_margin
        # The smallest factor: what a bound of the whole step is multiplied by.
        self._least = min([1.0, *self._correction.factors.values()])
        self._sharded: dict[tuple[object, ...], list[tuple[float, float]]] = {}
        self._shared: tuple[Ranks, dict[str, float]] | None = None
        self._turns: dict[tuple[CutModel, int, bool], Turn] = {}

    def with_more_memory(self, num_bytes: int) -> Costs:
        """The costs of the same device with so many more bytes: `alike`, and no second is computed anew."""
        other, device = copy(self), self._device
        larger = replace(device, memory_bytes=device.memory_bytes + num_bytes)
        other.memory_bytes = self._predictor.cluster.usable_bytes(larger)
        return other

    def judged(self, prediction: Prediction) -> Prediction:
        """A prediction of such a device, with whether it fits into this one's memory."""
        missing = max(0.0, prediction.peak_bytes - self.memory_bytes)
        if missing == prediction.missing_bytes:
            return prediction
        return replace(prediction, fits=missing == 0, missing_bytes=missing)

    def predict(self, plan: Plan) -> Prediction:
        """The corrected prediction of a plan."""
        found = self._predictor.predict(plan)
        if not self._correction:
            return found
        terms = self._correction.terms(found.terms)
        seconds = sum(terms.values())
        ratio = found.step_seconds / seconds if seconds else 1.0
        return replace(
            found,
            step_seconds=seconds,
            terms=terms,
            bubble=terms["bubble"] / seconds if seconds else 0.0,
            mfu=found.mfu * ratio if found.mfu is not None else None,
        )

    @cached_property
    def _floors(self) -> Floors:
        staging = self._staging
        computer = staging.computer(self._device.in_faster_format())
        return Floors(computer, self._predictor.network, self._program, staging.parts)

    def floor(self, samples: float, degrees: ModelDegrees) -> float:
        """Seconds that no plan goes below whose replicas have so many samples each, on the ranks that share them."""
        return self._floors.seconds(samples, *degrees) * self._least

    def beside(self, place: Degrees) -> float:
        """Seconds of any plan of a place that only `nearly` has: agreements, launches; not less for more replicas."""
        device, is_divided = self._device, place.cut.ranks > 1
        launches = self._predictor.work.profile.optimizer_launches * max(device.launch_seconds, device.dispatch_seconds)
        agreed = self._exchanged.agreed(place.devices, is_divided, apart=is_divided)
        return (agreed + launches + device.step_seconds) * self._least

    def filled(self, whole: Whole, shape: PipelineShape) -> float:
        """A bound of a schedule's seconds, from those of a microbatch on all stages."""
        return filled(whole.seconds, shape, whole.blocks.last, whole.blocks.through)

    def least_seconds(self, plan: Plan) -> float:
        """A lower bound of the step that knows nothing of data and shard: the busiest rank's work, and the bubble's.

        It is the same for all plans of a family, and for all replicas that leave a rank as many grains. Of it and of
        `least_bytes`, p stages on one rank have at most p times what the busiest of them has. The last rank waits for
        the first microbatch to come down all stages before its first, and the step ends when its last gradient has gone
        up them again.
        """
        ranks = self._staging.ranks(plan)
        return self.least_of(self._turn(ranks), ranks.shape)

    def least_of(self, turn: Turn, shape: PipelineShape) -> float:
        """Lower bound of the step of all plans of a shape whose microbatches take such a turn."""
        return turn.least(shape) * self._least

    def turn(self, plan: Plan) -> Turn:
        """Seconds of one microbatch of a plan, the same for all schedules, and all replicas if it is no lone one."""
        return self._turn(self._staging.ranks(plan))

    def _turn(self, ranks: Ranks) -> Turn:
        key, pipeline = (ranks.model, ranks.shape.pipeline, ranks.adds), ranks.shape.pipeline
        if key not in self._turns:
            passes = ranks.passes
            forwards = [one.forward_seconds for one in passes]
            backwards = [one.backward_seconds for one in passes]
            whole = list(map(add, forwards, backwards))
            of_ranks = whole if pipeline == len(whole) else [sum(whole[rank::pipeline]) for rank in range(pipeline)]
            self._turns[key] = Turn(
                sum(forwards[: pipeline - 1]),
                sum(backwards[: pipeline - 1]),
                sum(one.weight_seconds for one in passes[: pipeline - 1]),
                of_ranks[-1],
                sum(whole),
                max(forwards) + max(backwards),
                max(of_ranks),
                whole[-1],
                passes[-1].weight_seconds,
            )
        return self._turns[key]

    def _filled(self, plan: Plan, ranks: Ranks) -> float:
        return self._turn(ranks).filled(ranks.shape, self._predictor.message(plan, ranks))

    def least_for_all(self, plans: Sequence[Plan]) -> float:
        """A bound of plans of a family that differ in their replicas alone: it knows the shortest of their messages."""
        ranks = self._staging.ranks(plans[0])
        message = min(self._predictor.message(plan, ranks) for plan in plans)
        return self._turn(ranks).filled(ranks.shape, message) * self._least

    def least_at(self, plan: Plan) -> float:
        """A better bound, of all plans of a family at one place: it knows replicas, not which are data and shard."""
        ranks = self._staging.ranks(plan)
        seconds = self.least_seconds(plan)
        if plan.layout.pipeline > 1:
            seconds = max(seconds, self._filled(plan, ranks) * self._least)
        if ranks.device.kind == "cpu":
            return seconds  # where large messages leave the caches: no bound from their sum
        return seconds + self._summed(plan, ranks) * self._least

    def _summed(self, plan: Plan, ranks: Ranks) -> float:
        """What summing over replicas adds at least, however they are divided into data and shard ranks.

        It holds where a link is no slower with one large message than with its parts.
        """
        layout, held = plan.layout, ranks.busiest.held
        replicas = layout.data * layout.shard
        if replicas == 1:
            return 0.0
        forward, backward = ranks.busiest.unit_seconds
        kind = "reduce_scatter" if self._program.scatter_gradients else "all_reduce"
        num_bytes = max(rank.size.trainable for rank in ranks.fullest) * ITEMSIZE[plan.precision.reduce]
        network = self._predictor.network
        least = max(0.0, network.seconds(kind, num_bytes, network.axis(layout, REPLICAS)) - backward)
        if least == 0.0:
            return 0.0
        key = held, replicas, layout.context, layout.tensor, plan.precision.parameters, plan.precision.reduce
        if key not in self._sharded:
            totals, cut = self._exchanged.shard.totals, ModelDegrees(layout.tensor, layout.pipeline, layout.context)
            layouts = (layout_of(Degrees(replicas, cut), shard) for shard in divisors(replicas)[1:])
            self._sharded[key] = [totals(plan, one, held) for one in layouts]
        # Each microbatch gathers; gradients are scattered behind the last one at least.
        times = 1 if self._program.gathers_apart else ranks.microbatches
        for gathers, scatters in self._sharded[key]:
            least = min(least, times * max(0.0, gathers - forward) + max(0.0, scatters - backward))
        return least

    def nearly(self, plan: Plan) -> float:
        """A lower bound of the step that knows all of the plan, and is cheaper than to simulate its pipeline."""
        ranks, predictor = self._staging.ranks(plan), self._predictor
        if self._shared is None or self._shared[0] is not ranks:  # the plans of a family come one after the other
            makespan = self._filled(plan, ranks) if plan.layout.pipeline > 1 else 0.0
            self._shared = ranks, predictor.shared_seconds(plan, ranks, makespan)
        return sum(predictor.with_shared(plan, ranks, self._shared[1], bound=True).values()) * self._least

    def least_bytes(self, plan: Plan) -> float:
        """A lower bound of the peak: it grows with the microbatch, and shrinks with the shard axis.

        It is the same for all degrees of a data axis where there are several replicas, by whatever all_reduce they sum:
        of others' buckets in shared memory there are as many as ranks. Of one copy for all ranks each has less.
        """
        return self._predictor.least_bytes(plan, self._beside_states(plan))

    def _beside_states(self, plan: Plan) -> float:
        """Bytes of buckets for each element."""
        buckets = plan.layout.data * plan.layout.shard > 1 and not plan.shards_model
        return self._program.bucket_bytes if buckets else 0.0

    def blocks(self, plan: Plan) -> Blocks:
        """The blocks of the model, with a lower bound of their seconds."""
        found = self._predictor.blocks(plan)
        of = self._least
        longest, last, through = found.longest * of, found.last * of, found.through * of
        return found._replace(seconds=found.seconds * of, longest=longest, last=last, through=through)

    def is_crowded(self, states: Sequence[BlockStates], size: BlockSize, pipeline: int, microbatches: int) -> bool:
        """Whether `uncut_bytes` of each of these plans is more than the memory, where ranks have these activations."""
        memory = self.memory_bytes
        if states[0].is_crowded(size, pipeline, microbatches, memory):
            return True
        return all(one.is_crowded(size, pipeline, microbatches, memory) for one in states[1:])

    def block_states(self, plans: Sequence[Plan]) -> tuple[BlockStates, ...]:
        """Bytes of the blocks beside activations, of all plans of these degrees and levels; first the least of all."""
        found = [self._predictor.block_states(plan, self._beside_states(plan)) for plan in plans]
        return (BlockStates(*map(min, zip(*found, strict=True))), *found)

    def block_size(self, plan: Plan) -> BlockSize:
        """Activations of a block, of all plans of a family however long their pipeline is."""
        return self._predictor.block_size(plan)

    def uncut_bytes(self, plan: Plan) -> float:
        """A lower bound of `least_bytes` that needs no division into stages."""
        return self._predictor.least_peak(plan, self.memory_bytes, self._beside_states(plan))


def costs_of(
    work: Workload, cluster: Cluster, program: Program | None = None, correction: Correction | None = None
) -> Callable[[int], Costs]:
    """The costs of plans on each number of devices."""
    predictor = Predictor(work, cluster, program)
    by_device: dict[int, Costs] = {}

    @cache  # it is asked of every place again and again
    def on(num_devices: int) -> Costs:
        device = cluster.device_for(min(cluster.devices_per_host, num_devices))
        if id(device) not in by_device:
            by_device[id(device)] = Costs(predictor, device, correction)
        return by_device[id(device)]

    return on
