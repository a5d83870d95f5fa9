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
    """Microbatch schedules that differ only in the order of passes and the stages per rank."""

    grains: int
    recompute: Recompute
    sequence: bool


class LayoutClass(NamedTuple):
    """Degrees that differ only in replicas and give a rank the same grains, so that their bounds are equal."""

    share: int
    cut: ModelDegrees
    replicas: tuple[int, ...]  # in order, the fewest first
    first: Degrees  # the degrees with the fewest replicas
    divided: Degrees  # the degrees with the most replicas
    fewest: int  # devices
    most: int  # devices
    beside: float  # seconds of every plan that the other bounds do not include


class Whole(NamedTuple):
    """Schedule family on one rank with all stages: seconds of a microbatch, and a lower bound of bytes.

    `blocks`, `size`: seconds and activation bytes of each block.
    """

    group: ScheduleFamily
    seconds: float
    bytes: float
    blocks: Blocks
    size: BlockSize

    def seconds_on(self, pipeline: int) -> float:
        """Return a lower bound of the seconds of a microbatch on the busiest rank of a pipeline."""
        return max(self.seconds / pipeline, self.blocks.busiest(pipeline))

    @property
    def activations(self) -> float:
        """Activation bytes of a microbatch on all blocks. Divided by `even_shares`, they bound the fullest rank."""
        return self.blocks.number * self.size.saved


class Turn(NamedTuple):
    """Seconds of one microbatch in parts of a pipeline.

    `down`: forwards of all stages before the last rank. `up`: backwards of these stages. `weights`: their gradients of
    weights. `last`: all passes of the last rank. `every`: all passes of all stages. `slowest`: the slowest forward plus
    the slowest backward of a stage. `busiest`: all passes of the busiest rank. `end`: all passes of the last stage.
    `end_weights`: its gradients of weights.
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
        """Return a bound from the last rank: its microbatches, and its waits before and after."""
        ranks, microbatches = of.pipeline, of.microbatches
        down = self.down + message * (ranks - 1)
        up = self.up + message * (ranks - 1)
        own = microbatches * (self.last + 2 * message * of.stages)
        if of.schedule != "zero_bubble":
            return max(down + own + up, self._passed(of, message))
        # Gradients of weights may be deferred on every rank, so that nothing waits for them.
        up -= self.weights
        late = min(microbatches, ranks) * self.end_weights
        return down + own + max(0.0, up - late)

    def _passed(self, of: PipelineShape, message: float) -> float:
        """Return a bound from one microbatch that passes all stages twice, and the other microbatches on one stage.

        The last stage begins after a microbatch has passed all other stages, and its last gradient passes them again.
        Under gpipe no backward begins before the last forward, so the slowest stages count instead.
        """
        others = self.slowest if of.schedule == "gpipe" else self.end
        times = of.pipeline * of.stages + of.microbatches - 1
        return self.every + (of.microbatches - 1) * others + 2 * message * times

    def least(self, of: PipelineShape) -> float:
        """Return a lower bound of the step for all plans of this shape."""
        return max(of.microbatches * self.busiest, self.filled(of))


class Costs:
    """Corrected predictions and their lower bounds, for ranks with one device.

    Each number of devices has one Costs object. Several numbers may share an object.
    """

    def __init__(self, predictor: Predictor, device: Device, correction: Correction | None = None) -> None:
        self._predictor, self._device, self._correction = predictor, device, correction or Correction()
        self._staging, self._program, self._exchanged = predictor.staging, predictor.program, predictor.exchanged
        self.memory_bytes = predictor.cluster.usable_bytes(device)
        self.alike = id(self)  # key of results that do not depend on the memory
        self.memory_margin = predictor.cluster.memory_margin
        # The smallest correction factor, which keeps bounds of the whole step valid.
        self._least = min([1.0, *self._correction.factors.values()])
        self._sharded: dict[tuple[object, ...], list[tuple[float, float]]] = {}
        self._shared: tuple[Ranks, dict[str, float]] | None = None
        self._turns: dict[tuple[CutModel, int, bool], Turn] = {}

    def with_more_memory(self, num_bytes: int) -> Costs:
        """Return the costs of the device with more memory. `alike` is unchanged, and no time is computed again."""
        other, device = copy(self), self._device
        larger = replace(device, memory_bytes=device.memory_bytes + num_bytes)
        other.memory_bytes = self._predictor.cluster.usable_bytes(larger)
        return other

    def judged(self, prediction: Prediction) -> Prediction:
        """Return a prediction of an `alike` device, updated for this device's memory."""
        missing = max(0.0, prediction.peak_bytes - self.memory_bytes)
        if missing == prediction.missing_bytes:
            return prediction
        return replace(prediction, fits=missing == 0, missing_bytes=missing)

    def predict(self, plan: Plan) -> Prediction:
        """Return the corrected prediction of a plan."""
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
        """Return a lower bound for plans whose replicas compute `samples` samples on ranks with these degrees."""
        return self._floors.seconds(samples, *degrees) * self._least

    def beside(self, place: Degrees) -> float:
        """Return the seconds of a place that only `nearly` includes: agreements and launches.

        They do not shrink with more replicas.
        """
        device, is_divided = self._device, place.cut.ranks > 1
        launches = self._predictor.work.profile.optimizer_launches * max(device.launch_seconds, device.dispatch_seconds)
        agreed = self._exchanged.agreed(place.devices, is_divided, apart=is_divided)
        return (agreed + launches + device.step_seconds) * self._least

    def filled(self, whole: Whole, shape: PipelineShape) -> float:
        """Return a lower bound of a schedule's seconds from the seconds of a microbatch on all stages."""
        return filled(whole.seconds, shape, whole.blocks.last, whole.blocks.through)

    def least_seconds(self, plan: Plan) -> float:
        """Return a lower bound of the step that ignores data and shard: the busiest rank's work and the bubble.

        All plans of a family share the bound, as do all replicas that give a rank the same grains. One rank with all p
        stages has at most p times the seconds of the busiest rank. The same holds for `least_bytes`. The last rank
        waits until the first microbatch has passed all stages. The step ends when the last gradient has passed them
        again.
        """
        ranks = self._staging.ranks(plan)
        return self.least_of(self._turn(ranks), ranks.shape)

    def least_of(self, turn: Turn, shape: PipelineShape) -> float:
        """Return a lower bound of the step for plans of this shape, given the seconds of their microbatches."""
        return turn.least(shape) * self._least

    def turn(self, plan: Plan) -> Turn:
        """Return the seconds of one microbatch of a plan, equal for all schedules and microbatch counts above 1."""
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
        """Return a lower bound for plans that differ only in replicas. It uses their shortest message."""
        ranks = self._staging.ranks(plans[0])
        message = min(self._predictor.message(plan, ranks) for plan in plans)
        return self._turn(ranks).filled(ranks.shape, message) * self._least

    def least_at(self, plan: Plan) -> float:
        """Return a tighter bound for all plans of a family at one place. It ignores the split into data and shard."""
        ranks = self._staging.ranks(plan)
        seconds = self.least_seconds(plan)
        if plan.layout.pipeline > 1:
            seconds = max(seconds, self._filled(plan, ranks) * self._least)
        if ranks.device.kind == "cpu":
            return seconds  # large messages leave the caches, so one large message is no bound
        return seconds + self._summed(plan, ranks) * self._least

    def _summed(self, plan: Plan, ranks: Ranks) -> float:
        """Return a lower bound of the seconds that replicas add, for any split into data and shard ranks.

        It assumes that a link moves one large message at least as fast as its parts.
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
        # Every microbatch gathers. Gradients are scattered at least once, after the last one.
        times = 1 if self._program.gathers_apart else ranks.microbatches
        for gathers, scatters in self._sharded[key]:
            least = min(least, times * max(0.0, gathers - forward) + max(0.0, scatters - backward))
        return least

    def nearly(self, plan: Plan) -> float:
        """Return a lower bound of the step that uses the whole plan but does not simulate its pipeline."""
        ranks, predictor = self._staging.ranks(plan), self._predictor
        if self._shared is None or self._shared[0] is not ranks:  # plans of a family are consecutive
            makespan = self._filled(plan, ranks) if plan.layout.pipeline > 1 else 0.0
            self._shared = ranks, predictor.shared_seconds(plan, ranks, makespan)
        return sum(predictor.with_shared(plan, ranks, self._shared[1], bound=True).values()) * self._least

    def least_bytes(self, plan: Plan) -> float:
        """Return a lower bound of the peak bytes. It grows with the microbatch and shrinks with the shard degree.

        With several replicas it is the same for every data degree and all_reduce algorithm. Buckets of other ranks in
        shared memory grow with the ranks and are not counted. The exception is one copy of the parameters for all
        ranks: each rank's part shrinks with the number of ranks.
        """
        return self._predictor.least_bytes(plan, self._beside_states(plan))

    def _beside_states(self, plan: Plan) -> float:
        """Return the bytes of buckets per element."""
        buckets = plan.layout.data * plan.layout.shard > 1 and not plan.shards_model
        return self._program.bucket_bytes if buckets else 0.0

    def blocks(self, plan: Plan) -> Blocks:
        """Return the blocks of the model with lower bounds of their seconds."""
        found = self._predictor.blocks(plan)
        of = self._least
        longest, last, through = found.longest * of, found.last * of, found.through * of
        return found._replace(seconds=found.seconds * of, longest=longest, last=last, through=through)

    def is_crowded(self, states: Sequence[BlockStates], size: BlockSize, pipeline: int, microbatches: int) -> bool:
        """Check whether `uncut_bytes` exceeds the memory for every entry of `states`, with activations of this size."""
        memory = self.memory_bytes
        if states[0].is_crowded(size, pipeline, microbatches, memory):
            return True
        return all(one.is_crowded(size, pipeline, microbatches, memory) for one in states[1:])

    def block_states(self, plans: Sequence[Plan]) -> tuple[BlockStates, ...]:
        """Return the bytes of blocks without activations for each plan, preceded by the minimum over all plans."""
        found = [self._predictor.block_states(plan, self._beside_states(plan)) for plan in plans]
        return (BlockStates(*map(min, zip(*found, strict=True))), *found)

    def block_size(self, plan: Plan) -> BlockSize:
        """Return the activation bytes of a block, for all plans of a family and any length of the pipeline."""
        return self._predictor.block_size(plan)

    def uncut_bytes(self, plan: Plan) -> float:
        """Return a lower bound of `least_bytes` that needs no division into stages."""
        return self._predictor.least_peak(plan, self.memory_bytes, self._beside_states(plan))


def costs_of(
    work: Workload, cluster: Cluster, program: Program | None = None, correction: Correction | None = None
) -> Callable[[int], Costs]:
    """Return the function from a number of devices to the costs of plans on them."""
    predictor = Predictor(work, cluster, program)
    by_device: dict[int, Costs] = {}

    @cache  # called repeatedly for every place
    def on(num_devices: int) -> Costs:
        device = cluster.device_for(min(cluster.devices_per_host, num_devices))
        if id(device) not in by_device:
            by_device[id(device)] = Costs(predictor, device, correction)
        return by_device[id(device)]

    return on
