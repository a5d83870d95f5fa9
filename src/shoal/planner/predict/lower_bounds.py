"""Lower bounds of a step's seconds and bytes, from the cheapest to those that miss only the waits of a plan.

Each bound depends on fewer settings than a prediction, so a search excludes many plans at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache
from operator import add
from typing import NamedTuple

from shoal.hardware.values import Cluster, Curve, Device
from shoal.planner.calibrate.lessons import Correction
from shoal.planner.predict.collective_time import Network
from shoal.planner.predict.compute_time import K_FILL, WINOGRAD, DeviceModel, Passes, divided
from shoal.planner.predict.experts import ALL_TO_ALL
from shoal.planner.predict.pipeline import CutModel, PipelineShape, Ranks
from shoal.planner.predict.step_time import Predictor
from shoal.planner.predict.workload import ITEMSIZE, Prediction, Program, Share, Workload
from shoal.planner.profile.values import Body, Operation, OperationKind, Phase, TensorCut, Unit
from shoal.plans.accounting.collectives import REPLICAS
from shoal.plans.plan import Plan, divisors

# Largest relative difference of sums of bytes in another order.
ROUNDED = 1e-9

# -------------------------------------------------------------------------------------------------------- degrees alone


@dataclass(frozen=True)
class Floors:
    """Lower bounds of the seconds of a model's units on one device and its links.

    The bounds count only the part of each operation and exchange that grows with the samples, at the best rate of
    device and links. Costs per microbatch are not counted, so the bounds hold for every microbatch size.
    """

    computer: DeviceModel
    network: Network
    program: Program
    units: Sequence[Unit]
    _known: dict[tuple[int, int], tuple[tuple[tuple[int, float], ...], ...]] = field(default_factory=dict, repr=False)
    _ideal: dict[Body, tuple[tuple[Operation, float], ...]] = field(default_factory=dict, repr=False)

    def seconds(self, samples: float, tensor: int, pipeline: int, context: int) -> float:
        """Return a lower bound for the busiest rank: its part of all units, with whole numbers of equal units.

        Sequence parallelism is open on a tensor axis: the bound takes the faster choice.
        """
        key = tensor, context
        if key not in self._known:  # for each setting of sequence parallelism: units of a body, and seconds of a unit
            counts = Counter(unit.body for unit in self.units).items()
            shares = [Share(1.0, tensor, each, context) for each in ((False, True) if tensor > 1 else (False,))]
            self._known[key] = tuple(tuple((n, self._body(body, one)) for body, n in counts) for one in shares)
        least = float("inf")
        for bodies in self._known[key]:  # the busiest rank has the average, or a whole number of equal units
            whole = sum(count * seconds for count, seconds in bodies) / pipeline
            least = min(least, max([whole, *(-(-count // pipeline) * seconds for count, seconds in bodies)]))
        return samples * least

    def _body(self, body: Body, share: Share) -> float:
        """Return the seconds per sample of a unit."""
        share = share.of(body, self.program.divides_ends)
        if body not in self._ideal:  # sums of operations that tensor parallelism divides in the same way
            by_cut: dict[TensorCut, tuple[Operation, float]] = {}
            for one in self.computer.operations(body):
                by_cut[one.cut] = one, by_cut.get(one.cut, (one, 0.0))[1] + ideal(self.computer, one)
            self._ideal[body] = tuple(by_cut.values())
        work = sum(least / divided(one, share) for one, least in self._ideal[body]) / share.context
        if self.program.overlaps_exchanges:  # the exposed part of each exchange may be negligible
            return work
        network, group, seconds = self.network, self.network.group(share.tensor, 1), 0.0
        for exchange in body.exchanges if share.tensor > 1 else ():
            for kind in exchange.kinds(share.sequence):
                seconds += exchange.bytes.per_sample * network.least_per_byte(kind, group)
        if share.context > 1:
            attentions = [o for o in body.operations if o.kind is OperationKind.ATTENTION and o.phase is Phase.FORWARD]
            crossing = sum(o.read_bytes.per_sample + o.written_bytes.per_sample for o in attentions) / share.tensor
            group = network.group(share.context, share.tensor)
            seconds += 2 * crossing * network.least_per_byte("all_to_all", group)  # forward and backward
        if self.program.dispatch == ALL_TO_ALL:  # to the experts and back, forward and backward
            for dispatch in body.dispatches:
                sent = 4 * dispatch.num_bytes.per_sample / share.tensor
                seconds += sent * network.least_per_byte("all_to_all", network.group(dispatch.degree, 1))
        return work + seconds / share.context


def ideal(computer: DeviceModel, operation: Operation) -> float:
    """Return a lower bound of an operation's seconds per sample on one rank."""
    device = computer.device
    flops = operation.flops.per_sample / (WINOGRAD if operation.winograd else 1.0)
    if not operation.launches:
        return 0.0
    if operation.kind is OperationKind.MEMORY:
        num_bytes = operation.read_bytes.per_sample + operation.written_bytes.per_sample
        best = _best(device.memory)
        return num_bytes / (device.memory_bytes_per_second * min(best, device.operators.get(operation.name, best)))
    dtype = computer.dtype(operation.dtype, operation.kind)
    peak = device.flops[dtype]
    if operation.kind is OperationKind.ATTENTION:  # exact on a GPU for fixed sizes
        if (curve := computer.attention_lengths(operation.phase)) is not None:
            return flops / (peak * _best(curve))
        fraction = computer.attention_fraction(operation.phase)
        if not (operation.n.per_sample or operation.k.per_sample):
            fraction *= computer.attention_filled(operation.n.fixed, operation.k.fixed)
        return flops / (peak * fraction)
    # See `matmul_seconds`: tiles cover the product, and the last wave is full at best.
    best = _best(device.matmul.get(dtype) or Curve())
    if not device.multiprocessors or dtype not in ("float32", "float64"):
        best *= device.sustained_at(dtype)
    if operation.kind is OperationKind.CONVOLUTION:
        curves = [_best(curve) for name, curve in device.convolution.items() if name.startswith(dtype)]
        windows = [max(known.values()) for name, known in device.windows.items() if name.startswith(dtype)]
        return flops / (peak * max([best, *curves, *windows]))
    filled = 1.0
    if device.multiprocessors and operation.k.fixed and not operation.k.per_sample:
        # A tile takes k steps plus the steps that fill it, which weigh more if k is divided or its sum is split.
        filled += K_FILL * peak / max(device.flops.get("float16", 0.0), peak) / operation.k.fixed
    return flops * filled / (peak * best)


def _best(curve: Curve) -> float:
    return max(share for _, share in curve.points)


# -------------------------------------------------------------------------------------------------------------- memory


class BlockSize(NamedTuple):
    """Activation bytes of a block: saved per microbatch, and transient in its backward."""

    saved: float = 0.0
    transient: float = 0.0


class BlockStates(NamedTuple):
    """Bytes of a rank without activations: per block and once.

    `per_activation`: bytes of memory that one byte of activations takes.
    """

    number: int  # blocks of the model
    block: float
    once: float
    per_activation: float

    def is_crowded(self, size: BlockSize, pipeline: int, microbatches: int, memory: float) -> bool:
        """Check whether `least_peak` exceeds `memory`: the ranks together have room for too few blocks.

        The sum goes from the emptiest rank on. The ranks with all microbatches in flight are added at once.
        """
        each, once = self.per_activation * size.saved, self.once + self.per_activation * size.transient
        if self.block + each <= 0:
            return once > memory
        left = (memory - once) * (1 + ROUNDED)
        if left <= 0 or pipeline * int(left / (self.block + each)) < self.number:
            return once > memory or self.number > 0
        most = min(pipeline, microbatches)
        least = int(left / (self.block + most * each))
        if pipeline * least >= self.number:
            return False
        room = (pipeline - most) * least
        for in_flight in range(1, most + 1):
            fitting = int(left / (self.block + in_flight * each))
            room += fitting
            if room >= self.number:
                return False
            if room + (most - in_flight) * fitting < self.number:  # the remaining ranks have no more room
                return True
        return True


def least_peak(of: BlockStates, size: BlockSize, pipeline: int, microbatches: int, memory: float) -> float:
    """Return a lower bound of the bytes of the fullest rank under 1f1b, for any division of the blocks over the ranks.

    A rank with n blocks needs once + n a bytes, with a bytes per block. The fullest rank needs least if all ranks are
    equally full. If whole blocks do not fit into `memory`, the result is larger than `memory`.
    """
    each, once = of.per_activation * size.saved, of.once + of.per_activation * size.transient
    if not of.number or of.block + each <= 0:
        return once if of.number else 0.0
    most = min(pipeline, microbatches)  # microbatches in flight; the last rank has one, the one before two
    blocks = [of.block + in_flight * each for in_flight in range(1, most + 1)]
    first = pipeline - most  # further ranks with all microbatches in flight
    inverse = first / blocks[-1]
    for one in blocks:
        inverse += 1 / one
    even = once + of.number / inverse * (1 - ROUNDED)
    if even <= memory:
        left = max(0.0, memory - once) * (1 + ROUNDED)
        room = first * int(left / blocks[-1])
        for one in blocks:
            room += int(left / one)
            if room >= of.number:
                return even
        return memory * (1 + ROUNDED)
    return even


class Blocks(NamedTuple):
    """Equal blocks of a model that stages do not cut: their number, and seconds of one microbatch on a block.

    `longest`: seconds of the longest other unit. `last`: seconds of the last unit. `through`: seconds of forward and
    backward of all units, without the gradients of weights.
    """

    number: int = 0
    seconds: float = 0.0
    longest: float = 0.0
    last: float = 0.0
    through: float = 0.0

    def busiest(self, ranks: int) -> float:
        """Return a lower bound of the seconds of the busiest pipeline rank, for any division of the blocks.

        If no rank has more than n = ceil(number / ranks) blocks, the rank with the longest other unit has the remaining
        blocks.
        """
        most, seconds, longest = -(-self.number // ranks), self.seconds, self.longest
        left = self.number - (ranks - 1) * most
        # Comparisons instead of max: a search calls this hundreds of thousands of times.
        busiest = left * seconds + longest if left > 0 else longest
        if most * seconds > busiest:
            busiest = most * seconds
        if (most + 1) * seconds < busiest:
            busiest = (most + 1) * seconds
        return longest if longest > busiest else busiest


# ----------------------------------------------------------------------------------------------------------- a pipeline


def filled(seconds: float, turns: PipelineShape, end: float = 0.0, through: float = 0.0) -> float:
    """Return a lower bound of the seconds of a pipeline, for any division into stages.

    `seconds`: one microbatch on all stages. `end`: one microbatch on the last unit, which is on the last stage.
    `through`: forward and backward of one microbatch without gradients of weights, the only work that zero_bubble
    defers.

    Let T be `seconds`, m the microbatches, p the ranks, and x the last rank's part of T. The last rank begins after the
    first microbatch has passed the others. The step ends after the last gradient has passed them: T - x + m x. The
    busiest other rank needs at least (T - x) / (p - 1) per microbatch. The larger of both is least if they are equal.
    If they differ even at x = 0, the step takes T.
    """
    ranks, microbatches = turns.pipeline, turns.microbatches
    even = seconds * microbatches / ranks
    if ranks == 1:
        return even
    if turns.schedule == "zero_bubble":  # no bound from T: weight gradients are deferred
        return max(even, through)
    if turns.schedule == "gpipe":  # all stages wait for the slowest one, which is no faster than the average
        return max(even, seconds * (1.0 + (microbatches - 1) / (ranks * turns.stages)))
    if turns.stages > 1:  # the first microbatch passes all stages forward and backward
        return max(even, seconds + (microbatches - 1) * end)
    last = max(0.0, (microbatches - ranks + 1) / (microbatches * ranks - ranks + 1))
    return max(even, seconds + (microbatches - 1) * max(end, last * seconds))


class Turn(NamedTuple):
    """Seconds of one microbatch in parts of a pipeline.

    `down`: forwards of all stages before the last rank. `up`: backwards of these stages. `weights`: their gradients of
    weights. `last`: all passes of the last rank. `every`: all passes of all stages. `slowest`: the slowest forward plus
    the slowest backward of a stage. `end`: all passes of the last stage. `end_weights`: its gradients of weights.
    """

    down: float
    up: float
    weights: float
    last: float
    every: float
    slowest: float
    end: float
    end_weights: float

    @classmethod
    def of(cls, passes: Sequence[Passes], pipeline: int) -> Turn:
        """Return the seconds of a pipeline of this many ranks with these passes of its stages."""
        forwards = [one.forward_seconds for one in passes]
        backwards = [one.backward_seconds for one in passes]
        whole = list(map(add, forwards, backwards))
        return cls(
            down=sum(forwards[: pipeline - 1]),
            up=sum(backwards[: pipeline - 1]),
            weights=sum(one.weight_seconds for one in passes[: pipeline - 1]),
            last=sum(whole[pipeline - 1 :: pipeline]),
            every=sum(whole),
            slowest=max(forwards) + max(backwards),
            end=whole[-1],
            end_weights=passes[-1].weight_seconds,
        )

    def filled(self, of: PipelineShape, message: float = 0.0) -> float:
        """Return a lower bound of the seconds of a pipeline from these stages. `message`: seconds between two stages.

        The last rank computes its microbatches, and waits before and after. Under `zero_bubble`, gradients of weights
        may be deferred on every rank, so that nothing waits for them.

        The other bound is one microbatch that passes all stages twice, and the other microbatches on one stage: the
        last stage begins after a microbatch has passed all other stages, and its last gradient passes them again.
        Under `gpipe` no backward begins before the last forward, so the slowest stages count instead.
        """
        ranks, microbatches = of.pipeline, of.microbatches
        down, up = self.down + message * (ranks - 1), self.up + message * (ranks - 1)
        own = microbatches * (self.last + 2 * message * of.stages)
        if of.schedule == "zero_bubble":
            late = min(microbatches, ranks) * self.end_weights
            return down + own + max(0.0, up - self.weights - late)
        others = self.slowest if of.schedule == "gpipe" else self.end
        times = ranks * of.stages + microbatches - 1
        return max(down + own + up, self.every + (microbatches - 1) * others + 2 * message * times)


# ------------------------------------------------------------------------------------------------------- a whole plan


class MicrobatchSeconds(NamedTuple):
    """Seconds of one microbatch on a rank with all stages, and of each of its blocks."""

    seconds: float
    blocks: Blocks


def corrected(prediction: Prediction, correction: Correction) -> Prediction:
    """Return a prediction with the factors of measured runs."""
    if not correction:
        return prediction
    terms = correction.terms(prediction.terms)
    seconds = sum(terms.values())
    ratio = prediction.step_seconds / seconds if seconds else 1.0
    return replace(
        prediction,
        step_seconds=seconds,
        terms=terms,
        bubble=terms["bubble"] / seconds if seconds else 0.0,
        mfu=prediction.mfu * ratio if prediction.mfu is not None else None,
    )


class Costs:
    """Corrected predictions and their lower bounds, for ranks with one device.

    Each number of devices has one Costs object. Several numbers may share an object.
    """

    def __init__(self, predictor: Predictor, device: Device, correction: Correction | None = None) -> None:
        self._predictor, self._device, self.correction = predictor, device, correction or Correction()
        self.memory_bytes = predictor.cluster.usable_bytes(device)
        self.memory_margin = predictor.cluster.memory_margin
        # The smallest correction factor, which keeps bounds of the whole step valid.
        self.factor = min([1.0, *self.correction.factors.values()])
        computer = predictor.staging.computer(device.in_faster_format(), channels_last=True)
        self._floors = Floors(computer, predictor.network, predictor.program, predictor.staging.parts)
        self._shared: tuple[Ranks, dict[str, float]] | None = None
        self._turns: dict[tuple[CutModel, int, bool], Turn] = {}
        self._by_degree: dict[int, Costs] = {}

    def with_more_memory(self, num_bytes: int) -> Costs:
        """Return the costs of the device with more memory."""
        other, device = copy(self), self._device
        other._by_degree = {}
        larger = replace(device, memory_bytes=device.memory_bytes + num_bytes)
        other.memory_bytes = self._predictor.cluster.usable_bytes(larger)
        return other

    def predict(self, plan: Plan) -> Prediction:
        """Return the corrected prediction of a plan."""
        prediction = self._predictor.predict(plan)
        missing = max(0.0, prediction.peak_bytes - self.memory_bytes)
        if missing != prediction.missing_bytes:  # `with_more_memory`
            prediction = replace(prediction, fits=missing == 0, missing_bytes=missing)
        return corrected(prediction, self.correction)

    # ------------------------------------------------------------------------------------------------------- seconds

    def floor(self, samples: float, replicas: int, tensor: int, pipeline: int, context: int) -> float:
        """Return a lower bound for plans whose replicas compute `samples` samples on ranks with these degrees.

        There are at most `replicas` of them.
        """
        return self._floors.seconds(samples, tensor, pipeline, context) * self.factor

    def beside(self, num_devices: int, is_divided: bool) -> float:
        """Return the seconds on these devices that only `nearly` includes: agreements and launches.

        They do not shrink with more replicas. `is_divided`: ranks divide the model.
        """
        device = self._device
        launches = self._predictor.work.profile.optimizer_launches * device.launch_seconds  # a host may be ahead
        agreed = self._predictor.exchanged.agreed(num_devices, is_divided, apart=is_divided)
        return (agreed + launches + device.step_seconds) * self.factor

    def microbatch(self, plan: Plan) -> MicrobatchSeconds:
        """Return lower bounds of the seconds of a microbatch, given a plan with one microbatch and no pipeline."""
        staging, factor, blocks = self._predictor.staging, self.factor, Blocks()
        ranks = staging.ranks(plan)
        if staging.blocks is not None:
            (block, count), costs = staging.blocks, ranks.costs
            passes = {b: costs.body(b, ranks.share, plan.memory.recompute, ranks.adds) for b in staging.bodies}
            seconds = {b: of_body.device_seconds for b, of_body in passes.items()}
            longest = max((one for body, one in seconds.items() if body != block), default=0.0)
            last = seconds[staging.parts[-1].body]
            # Launches of weight gradients may overlap with earlier device work: this is too small or even negative.
            through = sum(number * (seconds[b] - passes[b].weight_seconds) for b, number in staging.bodies.items())
            through = max(0.0, through) * (1 - ROUNDED)
            blocks = Blocks(count, seconds[block] * factor, longest * factor, last * factor, through * factor)
        return MicrobatchSeconds(ranks.busiest.seconds * factor, blocks)

    def staged(self, plan: Plan) -> float:
        """Return a lower bound from the plan's stages, for all plans that differ only in replicas and their level."""
        ranks = self._predictor.staging.ranks(plan)
        return max(ranks.busiest.seconds * ranks.microbatches, self._turn(ranks).filled(ranks.shape)) * self.factor

    def at(self, plan: Plan) -> float:
        """Return a lower bound for all plans that differ only in the division of replicas into data and shard."""
        predictor, layout, ranks = self._predictor, plan.layout, self._predictor.staging.ranks(plan)
        seconds, busiest = ranks.busiest.seconds * ranks.microbatches, ranks.busiest
        if layout.pipeline > 1:
            seconds = max(seconds, self._turn(ranks).filled(ranks.shape, predictor.message(plan, ranks)))
        replicas = layout.data * layout.shard
        if ranks.device.kind == "cpu" or replicas == 1:  # on a CPU large messages leave the caches: no bound
            return seconds * self.factor
        # Seconds that replicas add, for any split into data and shard ranks. A link moves one large message at least as
        # fast as its parts.
        program, network, (forward, backward) = predictor.program, predictor.network, busiest.unit_seconds
        kind = "reduce_scatter" if program.scatter_gradients else "all_reduce"
        alike = max(rank.size.trainable - rank.size.apart for rank in ranks.fullest)
        num_bytes = alike * ITEMSIZE[plan.precision.reduce]
        least = max(0.0, network.seconds(kind, num_bytes, network.axis(layout, REPLICAS)) - backward)
        # Every microbatch gathers. Gradients are scattered at least once, after the last one.
        times = 1 if program.gathers_apart else ranks.microbatches
        for shard in divisors(replicas)[1:] if least else ():
            split = layout.trusted_copy({"data": replicas // shard, "shard": shard})
            gathers, scatters = predictor.exchanged.shard.totals(plan, split, busiest.part)
            least = min(least, times * max(0.0, gathers - forward) + max(0.0, scatters - backward))
        return (seconds + least) * self.factor

    def nearly(self, plan: Plan) -> float:
        """Return a lower bound of the step that uses the whole plan but does not simulate its pipeline."""
        predictor, ranks = self._predictor, self._predictor.staging.ranks(plan)
        if self._shared is None or self._shared[0] is not ranks:  # plans of a family are consecutive
            makespan = 0.0
            if plan.layout.pipeline > 1:
                makespan = self._turn(ranks).filled(ranks.shape, predictor.message(plan, ranks))
            self._shared = ranks, predictor.shared_seconds(plan, ranks, makespan)
        return sum(predictor.with_shared(plan, ranks, self._shared[1], bound=True).values()) * self.factor

    def _turn(self, ranks: Ranks) -> Turn:
        key = ranks.model, ranks.shape.pipeline, ranks.adds
        if key not in self._turns:
            self._turns[key] = Turn.of(ranks.model.passes(ranks.adds), ranks.shape.pipeline)
        return self._turns[key]

    # --------------------------------------------------------------------------------------------------------- bytes

    def block_size(self, plan: Plan) -> BlockSize:
        """Return the activation bytes of a block, for all plans of a family and any length of the pipeline."""
        staging = self._predictor.staging
        if staging.blocks is None:
            return BlockSize()
        size = staging.size(staging.blocks[0], plan)
        return BlockSize(size.saved, size.transient)

    def block_states(self, plans: Sequence[Plan]) -> tuple[BlockStates, ...]:
        """Return the bytes of blocks without activations for each plan, for any microbatch and recomputation."""
        predictor, staging, heap_share = self._predictor, self._predictor.staging, self._predictor.program.heap_share
        if staging.blocks is None:
            return tuple(BlockStates(0, 0.0, 0.0, 0.0) for _ in plans)
        (body, count), states = staging.blocks, []
        for plan in plans:
            device, size = staging.ranks(plan).device, staging.size(body, plan)
            heap = 1 + heap_share if device.kind == "cpu" else 1.0
            per_activation = heap if device.kind == "cpu" else 1 + predictor.fragmentation(plan)
            block, once = predictor.states.of_block(plan, size)
            block = heap * (block + _bucket_bytes(plan, predictor.program) * size.trainable)
            states.append(BlockStates(count, block, heap * once + device.reserved_bytes, per_activation))
        return tuple(states)

    def least_bytes(self, plan: Plan) -> float:
        """Return a lower bound of the peak bytes. It grows with the microbatch and shrinks with the shard degree.

        With several replicas it is the same for every data degree and all_reduce algorithm. Buckets of other ranks in
        shared memory grow with the ranks and are not counted. The exception is one copy of the parameters for all
        ranks: each rank's part shrinks with the number of ranks.

        The sum is that of `Predictor.bytes` without categories, since a search calls this for many plans.
        """
        predictor, ranks = self._predictor, self._predictor.staging.ranks(plan)
        program, on_cpu = predictor.program, ranks.device.kind == "cpu"
        reserved, per_element = predictor.overheads(ranks.device, plan).reserved_bytes, _bucket_bytes(plan, program)
        of_heap, of_activations = (program.heap_share, 0.0) if on_cpu else (0.0, predictor.fragmentation(plan))
        states, worst = predictor.states.least(plan, ranks.fullest, ranks.microbatches), 0.0
        for rank, state in zip(ranks.fullest, states, strict=True):
            activations = rank.activations
            own = state + rank.size.trainable * per_element + activations
            worst = max(worst, own + (of_heap * own + of_activations * activations) + reserved)
        return worst


def with_experts(costs: Costs, degree: int) -> Costs:
    """Return the costs of plans in which `degree` ranks divide the experts of each mixture."""
    if degree == 1:
        return costs
    if degree not in costs._by_degree:
        other = Costs(costs._predictor.with_experts(degree), costs._device, costs.correction)
        costs._by_degree[degree], other.memory_bytes = other, costs.memory_bytes
    return costs._by_degree[degree]


def _bucket_bytes(plan: Plan, program: Program) -> float:
    """Return the bytes of communication buckets per gradient element."""
    has_buckets = plan.layout.data * plan.layout.shard > 1 and not plan.shards_model
    return program.bucket_bytes if has_buckets else 0.0


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
