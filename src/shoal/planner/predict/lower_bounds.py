"""Lower bounds of a step's seconds and bytes, from the cheapest to those that know all of a plan but its waits.

Each is told by fewer of a plan's settings than a prediction, so that a search excludes many plans at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.hardware.values import Curve, Device
from shoal.planner.predict.collective_time import Network
from shoal.planner.predict.pipeline_ranks import Rank, Ranks
from shoal.planner.predict.roofline import ITEMSIZE, K_FILL, WINOGRAD, DeviceModel, Share, divided
from shoal.planner.predict.stage_split import Held
from shoal.planner.predict.stage_time import Passes
from shoal.planner.predict.step_time import Predictor
from shoal.planner.predict.workload import Program
from shoal.planner.profile.values import Body, Operation, OperationKind, Phase, Unit
from shoal.planner.search.space import divisors
from shoal.plans.plan import Plan

# -------------------------------------------------------------------------------------------------------- degrees alone


@dataclass(frozen=True)
class Floors:
    """Seconds that no plan of some degrees goes below, from the degrees alone: of a model's units on one device.

    Of each operation and exchange what grows with the samples, as fast as the device and the links ever are; what a
    microbatch takes whatever its size is left out, so that it holds for all of them.
    """

    computer: DeviceModel
    network: Network
    program: Program
    units: Sequence[Unit]
    _known: dict[tuple[int, int], tuple[tuple[tuple[int, float], ...], ...]] = field(default_factory=dict, repr=False)

    def seconds(self, samples: float, tensor: int, pipeline: int, context: int) -> float:
        """Of the busiest rank of so many, for so many samples: its part of all units, and of equal ones a whole number.

        Ranks of a tensor axis may divide what lies between the divided layers or not: the faster of the two.
        """
        key = tensor, context
        if key not in self._known:
            sequences = (False, True) if tensor > 1 else (False,)
            self._known[key] = tuple(self._of_bodies(Share(1.0, tensor, each, context)) for each in sequences)
        return samples * min(_busiest(bodies, pipeline) for bodies in self._known[key])

    def _of_bodies(self, share: Share) -> tuple[tuple[int, float], ...]:
        """How many units have each body, and seconds of a sample in one of them."""
        counts = Counter(unit.body for unit in self.units)
        of = {body: share.of(body, self.program.divides_ends) for body in counts}
        return tuple((count, self._body(body, of[body])) for body, count in counts.items())

    def _body(self, body: Body, share: Share) -> float:
        work = sum(ideal(self.computer, o) / divided(o, share) for o in self.computer.operations(body)) / share.context
        return work + (self._tensor(body, share) + self._context(body, share)) / share.context

    def _tensor(self, body: Body, share: Share) -> float:
        group, seconds = self.network.group(share.tensor, 1), 0.0
        for exchange in body.exchanges if share.tensor > 1 else ():
            parts = share.sequence and exchange.kind == "all_reduce" and exchange.bytes.per_sample
            for kind in ("reduce_scatter", "all_gather") if parts else (exchange.kind,):
                seconds += exchange.bytes.per_sample * self.network.least_per_byte(kind, group)
        return seconds

    def _context(self, body: Body, share: Share) -> float:
        if share.context == 1:
            return 0.0
        attentions = [o for o in body.operations if o.kind is OperationKind.ATTENTION and o.phase is Phase.FORWARD]
        crossing = sum(o.read_bytes.per_sample + o.written_bytes.per_sample for o in attentions) / share.tensor
        group = self.network.group(share.context, share.tensor)
        return 2 * crossing * self.network.least_per_byte("all_to_all", group)  # forward and backward


def _busiest(bodies: Sequence[tuple[int, float]], ranks: int) -> float:
    """Of ranks that divide these units one has its part of all, and of equal ones one has a whole number."""
    whole = sum(count * seconds for count, seconds in bodies) / ranks
    return max([whole, *(-(-count // ranks) * seconds for count, seconds in bodies)])


def ideal(computer: DeviceModel, operation: Operation) -> float:
    """Seconds of a sample's part of an operation on one rank, at the best that the device does."""
    device = computer.device
    flops = operation.flops.per_sample / (WINOGRAD if operation.winograd else 1.0)
    if not operation.launches:
        return 0.0
    if operation.kind is OperationKind.MEMORY:
        num_bytes = operation.read_bytes.per_sample + operation.written_bytes.per_sample
        best = _best(device.memory)
        return num_bytes / (device.memory_bytes_per_second * min(best, device.operators.get(operation.name, best)))
    dtype = computer.dtype(operation.dtype)
    peak = device.flops[dtype]
    if operation.kind is OperationKind.ATTENTION:
        return flops / (peak * _attention(computer, operation))
    # See `matmul_seconds`: tiles cover the product, and the last wave is full at best.
    best = _best(device.matmul.get(dtype) or Curve())
    if not device.multiprocessors or dtype not in ("float32", "float64"):
        best *= device.sustained
    if operation.kind is OperationKind.CONVOLUTION:
        return flops / (peak * max(best, _measured(computer, dtype)))
    filled = 1.0
    if device.multiprocessors and operation.k.fixed and not operation.k.per_sample:
        # A tile takes k steps and those that fill it; where k is divided, or its sum split, these weigh more.
        filled += K_FILL * peak / max(device.flops.get("float16", 0.0), peak) / operation.k.fixed
    return flops * filled / (peak * best)


def _attention(computer: DeviceModel, operation: Operation) -> float:
    """The most of the peak that fused attention reaches; exact on a GPU where its rows and heads have one size."""
    if (curve := computer.attention_lengths(operation.phase)) is not None:
        return _best(curve)
    fraction = computer.attention_fraction(operation.phase)
    if operation.n.per_sample or operation.k.per_sample:
        return fraction
    return fraction * computer.attention_filled(operation.n.fixed, operation.k.fixed)


def _measured(computer: DeviceModel, dtype: str) -> float:
    """The most that a convolution of this dtype was measured to reach; 0 where none was."""
    device = computer.device
    curves = [_best(curve) for name, curve in device.convolution.items() if name.startswith(dtype)]
    windows = [max(known.values()) for name, known in device.windows.items() if name.startswith(dtype)]
    return max([0.0, *curves, *windows])


def _best(curve: Curve) -> float:
    return max(share for _, share in curve.points)


# ----------------------------------------------------------------------------------------------------------- a pipeline


class PipelineShape(NamedTuple):
    """A schedule on so many ranks with so many stages each, of so many microbatches."""

    schedule: str
    pipeline: int
    stages: int
    microbatches: int


def filled(seconds: float, turns: PipelineShape) -> float:
    """Seconds that no division into stages goes below; `seconds` of one microbatch on all of them together.

    Let T be the seconds of one microbatch on all stages, m the microbatches, p the ranks, x the last rank's part of T.
    The last rank begins when a microbatch has come down the others, and the step ends when the last gradient has gone
    up them: T - x + m x. The busiest of the others has at least (T - x) / (p - 1) of each microbatch. The larger of the
    two is least where they are equal; where even x = 0 does not make them so, the step takes T.
    """
    ranks, microbatches = turns.pipeline, turns.microbatches
    even = seconds * microbatches / ranks
    if ranks == 1 or turns.schedule == "zero_bubble":  # which puts off gradients of weights: no microbatch waits for T
        return even
    if turns.stages > 1:
        return max(even, seconds)  # the first microbatch passes all stages, there and back
    last = max(0.0, (microbatches - ranks + 1) / (microbatches * ranks - ranks + 1))
    return max(even, seconds * (1.0 + (microbatches - 1) * last))


# --------------------------------------------------------------------------------------------------- sums over replicas


class Load(NamedTuple):
    """What a rank sums, and behind what.

    `units`: how many of the busiest rank's units have so many elements; `forward`, `backward`: seconds of one
    microbatch of these units; `trainable`: elements of the rank that holds most.
    """

    units: tuple[tuple[float, int], ...]
    forward: float
    backward: float
    trainable: float


def load(held: Held, passes: Sequence[Passes], trainable: Sequence[float], tensor: int) -> Load:
    """The load of the busiest rank's units and their passes; `trainable`: of each rank that may hold most."""
    units: dict[float, int] = {}
    rest = 0.0  # what is outside of the blocks is one unit
    for body, count in held.counts:
        numel = float(sum(w.numel_of(tensor) for w in body.weights))
        if body.repeated:
            units[numel] = units.get(numel, 0) + count
        else:
            rest += numel * count
    units[rest] = units.get(rest, 0) + 1
    return Load(
        tuple(units.items()),
        sum(one.forward_seconds for one in passes),
        sum(one.backward_seconds for one in passes),
        max(trainable),
    )


class ReplicaSums:
    """What summing over replicas takes at least, however they are divided into data and shard ranks, on one network.

    It holds where a link is no slower with one large message than with its parts. What does not depend on the passes
    that hide the sums is computed once.
    """

    def __init__(self, network: Network, program: Program) -> None:
        self._network = network
        self._kind = "reduce_scatter" if program.scatter_gradients else "all_reduce"
        self._known: dict[tuple[object, ...], tuple[tuple[float, float], ...]] = {}

    def least_seconds(self, plan: Plan, load: Load) -> float:
        """Seconds that the replicas of a plan add to a step."""
        layout = plan.layout
        replicas, stride = layout.data * layout.shard, layout.context * layout.tensor
        if replicas == 1:
            return 0.0
        widths = ITEMSIZE[plan.precision.parameters], ITEMSIZE[plan.precision.reduce]
        whole = self._network.seconds(self._kind, load.trainable * widths[1], self._network.group(replicas, stride))
        least = max(0.0, whole - load.backward)
        if least == 0.0:
            return 0.0
        key = load.units, replicas, stride, widths
        if key not in self._known:
            self._known[key] = tuple(self._divided(load.units, replicas, stride, widths))
        for gathers, scatters in self._known[key]:
            least = min(least, max(0.0, gathers - load.forward) + max(0.0, scatters - load.backward))
        return least

    def _divided(
        self, units: tuple[tuple[float, int], ...], replicas: int, stride: int, widths: tuple[int, int]
    ) -> Iterator[tuple[float, float]]:
        """Seconds of gathering all units and of scattering them, for each degree of the shard axis."""
        network, (held, reduce) = self._network, widths
        for shard in divisors(replicas)[1:]:
            group, others = network.group(shard, stride), network.group(replicas // shard, shard * stride)
            gathers = scatters = 0.0
            for numel, count in units:
                gathers += count * network.seconds("all_gather", numel * held, group)
                scatters += count * network.seconds("reduce_scatter", numel * reduce, group)
                scatters += count * network.seconds("all_reduce", numel * reduce / shard, others)
            yield gathers, scatters


# ---------------------------------------------------------------------------------------------------------------- plans


class Turn(NamedTuple):
    """Seconds of one microbatch: down to the last rank, up from it, of gradients of weights above it, and on it."""

    down: float
    up: float
    weights: float
    last: float


class LowerBounds:
    """Bounds of the plans of one workload on one cluster."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor, self._program = predictor, predictor.program
        self._staging, self._network, self._exchanged = predictor.staging, predictor.network, predictor.exchanged
        self._least: dict[tuple[object, ...], float] = {}
        self._loads: dict[Ranks, Load] = {}
        self._sums = ReplicaSums(self._network, self._program)
        self._turns: dict[tuple[int, int], Turn] = {}

    def floors(self, device: Device) -> Floors:
        """What no plan goes below whose ranks have such a device, by its degrees alone."""
        return Floors(
            self._staging.computer(device),
            self._network,
            self._program,
            self._staging.parts,
        )

    def least_seconds(self, plan: Plan) -> float:
        """A lower bound of the step that knows nothing of data and shard: the busiest rank's work, and the bubble's.

        The last rank waits for the first microbatch to come down all stages before its first, and the step ends when
        its last gradient has gone up them again.
        """
        key = *self._staging.key(plan), plan.pipeline.schedule == "zero_bubble"
        if key not in self._least:
            _, microbatches = self._staging.share(plan)
            whole = [passes.seconds for passes in self._staging.passes(plan)]
            busy = [sum(whole[rank :: plan.layout.pipeline]) for rank in range(plan.layout.pipeline)]
            self._least[key] = max(microbatches * max(busy), self._filled(plan))
        return self._least[key]

    def _filled(self, plan: Plan, message: float = 0.0) -> float:
        """The last rank's microbatches and its waits before and after."""
        _, microbatches = self._staging.share(plan)
        passes, ranks, per = self._staging.passes(plan), plan.layout.pipeline, plan.pipeline.stages_per_rank
        turn = self._turn(passes, ranks)
        down = turn.down + message * (ranks - 1)
        up = turn.up + message * (ranks - 1)
        own = microbatches * (turn.last + 2 * message * per)
        if plan.pipeline.schedule != "zero_bubble":
            return down + own + up
        # The gradients of weights may be put off, here and above: then nothing waits for them.
        up -= turn.weights
        late = min(microbatches, ranks) * passes[-1].weight_seconds
        return down + own + max(0.0, up - late)

    def _turn(self, passes: tuple[Passes, ...], ranks: int) -> Turn:
        """What these stages take on so many ranks; the stages are kept, and so their id is theirs alone."""
        key = id(passes), ranks
        if key not in self._turns:
            before = passes[: ranks - 1]
            self._turns[key] = Turn(
                sum(one.forward_seconds for one in before),
                sum(one.backward_seconds for one in before),
                sum(one.weight_seconds for one in before),
                sum(one.seconds for one in passes[ranks - 1 :: ranks]),
            )
        return self._turns[key]

    def least_at(self, plan: Plan) -> float:
        """A lower bound of the step that knows the replicas of a plan, but not which of them are data and shard."""
        ranks = self._staging.ranks(plan)
        seconds = self.least_seconds(plan)
        if plan.layout.pipeline > 1:
            seconds = max(seconds, self._filled(plan, self._predictor.message(plan, ranks.share)))
        if self._staging.device(plan).kind == "cpu":
            return seconds  # where large messages leave the caches: no bound from their sum
        if ranks not in self._loads:
            sizes = [rank.size.trainable for rank in ranks.fullest]
            self._loads[ranks] = load(ranks.busiest.held, ranks.of_units, sizes, plan.layout.tensor)
        return seconds + self._sums.least_seconds(plan, self._loads[ranks])

    def least_bytes(self, plan: Plan) -> float:
        """A lower bound of the peak, of the rank that needs most.

        It knows nothing of the data axis: not of others' buckets in shared memory, of which there are as many as ranks.
        """
        ranks = self._staging.ranks(plan)
        buckets = plan.layout.data * plan.layout.shard > 1 and not plan.shards_model

        def of(rank: Rank) -> float:
            states = sum(self._predictor.states.least(plan, rank.held, rank.size, ranks.microbatches).values())
            if buckets:
                states += rank.size.trainable * self._program.bucket_bytes
            return sum(self._predictor.in_all(plan, rank, {"parameters": states}).values())

        return max(map(of, ranks.fullest))

    def without_waits(self, plan: Plan) -> float:
        """A lower bound of the step that knows all of the plan, and is cheaper than to simulate its pipeline."""
        ranks = self._staging.ranks(plan)
        makespan = self._filled(plan, self._predictor.message(plan, ranks.share)) if plan.layout.pipeline > 1 else 0.0
        return sum(self._predictor.seconds(plan, ranks, makespan).values())

    def beside(self, num_devices: int, is_divided: bool) -> float:
        """What a step takes at least beside its passes and sums of gradients: agreements, and an update's launches.

        `is_divided`: the model is, over some of so many devices.
        """
        cluster = self._predictor.cluster
        device = cluster.device_for(min(cluster.devices_per_host, num_devices))
        launches = self._predictor.work.profile.optimizer_launches * max(device.launch_seconds, device.dispatch_seconds)
        return self._exchanged.agreed(num_devices, is_divided, apart=is_divided) + launches + device.step_seconds
