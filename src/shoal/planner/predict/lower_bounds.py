"""Lower bounds of a step's seconds and bytes, from the cheapest to those that miss only the waits of a plan.

Each bound depends on fewer settings than a prediction, so a search excludes many plans at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import add
from typing import NamedTuple

from shoal.hardware.values import Curve
from shoal.planner.predict.collective_time import Network
from shoal.planner.predict.roofline import K_FILL, WINOGRAD, DeviceModel
from shoal.planner.predict.share import Share, divided
from shoal.planner.predict.stage_time import Passes
from shoal.planner.predict.workload import Program
from shoal.planner.profile.values import Body, Operation, OperationKind, Phase, Unit

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

    def seconds(self, samples: float, tensor: int, pipeline: int, context: int) -> float:
        """Return a lower bound for the busiest rank: its part of all units, with whole numbers of equal units.

        Sequence parallelism is open on a tensor axis: the bound takes the faster choice.
        """
        key = tensor, context
        if key not in self._known:
            sequences = (False, True) if tensor > 1 else (False,)
            self._known[key] = tuple(self._of_bodies(Share(1.0, tensor, each, context)) for each in sequences)
        return samples * min(_busiest(bodies, pipeline) for bodies in self._known[key])

    def _of_bodies(self, share: Share) -> tuple[tuple[int, float], ...]:
        """Return the number of units of each body and the seconds per sample of one of them."""
        counts = Counter(unit.body for unit in self.units)
        of = {body: share.of(body, self.program.divides_ends) for body in counts}
        return tuple((count, self._body(body, of[body])) for body, count in counts.items())

    def _body(self, body: Body, share: Share) -> float:
        work = sum(ideal(self.computer, o) / divided(o, share) for o in self.computer.operations(body)) / share.context
        if self.program.overlaps_exchanges:  # the exposed part of each exchange may be negligible
            return work
        group, seconds = self.network.group(share.tensor, 1), 0.0
        for exchange in body.exchanges if share.tensor > 1 else ():
            for kind in exchange.kinds(share.sequence):
                seconds += exchange.bytes.per_sample * self.network.least_per_byte(kind, group)
        return work + (seconds + self._context(body, share)) / share.context

    def _context(self, body: Body, share: Share) -> float:
        if share.context == 1:
            return 0.0
        attentions = [o for o in body.operations if o.kind is OperationKind.ATTENTION and o.phase is Phase.FORWARD]
        crossing = sum(o.read_bytes.per_sample + o.written_bytes.per_sample for o in attentions) / share.tensor
        group = self.network.group(share.context, share.tensor)
        return 2 * crossing * self.network.least_per_byte("all_to_all", group)  # forward and backward


def _busiest(bodies: Sequence[tuple[int, float]], ranks: int) -> float:
    """Return a lower bound for the busiest of `ranks` ranks: the average, or a whole number of equal units."""
    whole = sum(count * seconds for count, seconds in bodies) / ranks
    return max([whole, *(-(-count // ranks) * seconds for count, seconds in bodies)])


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
    dtype = computer.dtype(operation.dtype)
    peak = device.flops[dtype]
    if operation.kind is OperationKind.ATTENTION:
        return flops / (peak * _attention(computer, operation))
    # See `matmul_seconds`: tiles cover the product, and the last wave is full at best.
    best = _best(device.matmul.get(dtype) or Curve())
    if not device.multiprocessors or dtype not in ("float32", "float64"):
        best *= device.sustained_at(dtype)
    if operation.kind is OperationKind.CONVOLUTION:
        return flops / (peak * max(best, _measured(computer, dtype)))
    filled = 1.0
    if device.multiprocessors and operation.k.fixed and not operation.k.per_sample:
        # A tile takes k steps plus the steps that fill it, which weigh more if k is divided or its sum is split.
        filled += K_FILL * peak / max(device.flops.get("float16", 0.0), peak) / operation.k.fixed
    return flops * filled / (peak * best)


def _attention(computer: DeviceModel, operation: Operation) -> float:
    """Return the largest fraction of the peak that fused attention reaches; exact on a GPU for fixed sizes."""
    if (curve := computer.attention_lengths(operation.phase)) is not None:
        return _best(curve)
    fraction = computer.attention_fraction(operation.phase)
    if operation.n.per_sample or operation.k.per_sample:
        return fraction
    return fraction * computer.attention_filled(operation.n.fixed, operation.k.fixed)


def _measured(computer: DeviceModel, dtype: str) -> float:
    """Return the largest measured fraction of the peak of a convolution in this dtype, or 0 if not measured."""
    device = computer.device
    curves = [_best(curve) for name, curve in device.convolution.items() if name.startswith(dtype)]
    windows = [max(known.values()) for name, known in device.windows.items() if name.startswith(dtype)]
    return max([0.0, *curves, *windows])


def _best(curve: Curve) -> float:
    return max(share for _, share in curve.points)


# -------------------------------------------------------------------------------------------------------------- memory


class BlockSize(NamedTuple):
    """Activation bytes of a block: saved per microbatch, and transient in its backward."""

    saved: float = 0.0
    transient: float = 0.0


class BlockStates(NamedTuple):
    """Bytes of a rank without activations: per block and once.

    `kept`: bytes of memory that one byte of activations takes.
    """

    number: int  # blocks of the model
    block: float
    once: float
    kept: float

    def is_crowded(self, size: BlockSize, pipeline: int, microbatches: int, memory: float) -> bool:
        """Check whether `least_peak` exceeds `memory`: the ranks together have room for too few blocks.

        The sum goes from the emptiest rank on. The ranks with all microbatches in flight are added at once.
        """
        each, once = self.kept * size.saved, self.once + self.kept * size.transient
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
    each, once = of.kept * size.saved, of.once + of.kept * size.transient
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


class PipelineShape(NamedTuple):
    """Pipeline schedule, number of ranks, stages per rank, and microbatches."""

    schedule: str
    pipeline: int
    stages: int
    microbatches: int


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
