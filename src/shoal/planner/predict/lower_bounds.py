"""Lower bounds of a step's seconds and bytes, from the cheapest to those that know all of a plan but its waits.

Each is told by fewer of a plan's settings than a prediction, so that a search excludes many plans at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from shoal.hardware.values import Curve
from shoal.planner.predict.collective_time import Network
from shoal.planner.predict.roofline import K_FILL, WINOGRAD, DeviceModel
from shoal.planner.predict.share import Share, divided
from shoal.planner.predict.workload import Program
from shoal.planner.profile.values import Body, Operation, OperationKind, Phase, Unit

# What sums of bytes in another order may differ by, as a share of them.
ROUNDED = 1e-9

# -------------------------------------------------------------------------------------------------------- degrees alone


@dataclass(frozen=True)
class Floors:
    """Lower bounds of a model's units on one device and its links.

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
        if self.program.overlaps_exchanges:  # as little as a part of each is waited for
            return work
        return work + (self._tensor(body, share) + self._context(body, share)) / share.context

    def _tensor(self, body: Body, share: Share) -> float:
        group, seconds = self.network.group(share.tensor, 1), 0.0
        for exchange in body.exchanges if share.tensor > 1 else ():
            for kind in exchange.kinds(share.sequence):
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
        best *= device.sustained_at(dtype)
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


# ---------------------------------------------------------------------------------------------------------- its memory


class BlockBytes(NamedTuple):
    """Bytes that a rank has for each of its equal blocks, for each of them and each microbatch in flight, and once."""

    block: float
    microbatch: float
    once: float


def least_peak(of: BlockBytes, num_blocks: int, in_flight: Sequence[float], memory: float) -> float:
    """Bytes of the fullest rank, however so many blocks are divided over ranks with these microbatches in flight.

    A rank with n blocks has once + n a, where a is what it has for a block: it can be no less than where all ranks are
    as full. Where whole numbers of blocks do not fit into `memory`, it is more than that.
    """
    each = [of.block + number * of.microbatch for number in in_flight]
    if min(each) <= 0:
        return of.once
    even = of.once + num_blocks / sum(1 / one for one in each) * (1 - ROUNDED)
    if even <= memory:
        left = max(0.0, memory - of.once) * (1 + ROUNDED)
        if sum(int(left / one) for one in each) < num_blocks:
            even = memory * (1 + ROUNDED)
    return even


class BlockStates(NamedTuple):
    """Bytes of a rank beside activations, for each of its equal blocks and once; a byte of these takes `kept`."""

    number: int  # blocks of the model
    block: float
    once: float
    kept: float

    def with_activations(self, size: BlockSize) -> BlockBytes:
        """Bytes with the activations of microbatches."""
        return BlockBytes(self.block, self.kept * size.saved, self.once + self.kept * size.transient)

    def is_crowded(self, size: BlockSize, pipeline: int, microbatches: int, memory: float) -> bool:
        """Whether `least_peak` under 1f1b is more than `memory`: blocks that fit on all ranks are too few.

        Ranks are added up from the emptiest, and those with all microbatches in flight at once.
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
            if room + (most - in_flight) * fitting < self.number:  # the others have no more
                return True
        return True


class BlockSize(NamedTuple):
    """Bytes of activations of a block: those that a microbatch leaves, and beside these in a backward."""

    saved: float = 0.0
    transient: float = 0.0


class Blocks(NamedTuple):
    """Blocks of a model that stages do not cut: how many, and the seconds of one microbatch on each of them.

    `longest`: seconds of the longest other unit; `last`: of the last one; `through`: of all units, there and back,
    without the gradients of weights.
    """

    number: int = 0
    seconds: float = 0.0
    longest: float = 0.0
    last: float = 0.0
    through: float = 0.0

    def busiest(self, ranks: int) -> float:
        """Seconds of the busiest rank of a pipeline, however the blocks are divided.

        Where it has no more than n = ceil(number / ranks) blocks, no other rank has, and the rank with the longest
        other unit has those that are left.
        """
        most, seconds, longest = -(-self.number // ranks), self.seconds, self.longest
        left = self.number - (ranks - 1) * most
        # Comparisons, since a search asks for this hundreds of thousands of times.
        busiest = left * seconds + longest if left > 0 else longest
        if most * seconds > busiest:
            busiest = most * seconds
        if (most + 1) * seconds < busiest:
            busiest = (most + 1) * seconds
        return longest if longest > busiest else busiest


@cache
def even_shares(pipeline: int, microbatches: int) -> float:
    """Parts of one microbatch's activations that fill the fullest rank of a pipeline, however blocks are divided.

    Rank r has min(p - r, m) microbatches in flight under 1f1b, and no schedule has fewer. Where all ranks are as full,
    which is least for the fullest, rank r has blocks in inverse proportion to them.
    """
    return sum(1 / min(pipeline - rank, microbatches) for rank in range(pipeline)) * (1 + ROUNDED)


# ----------------------------------------------------------------------------------------------------------- a pipeline


class PipelineShape(NamedTuple):
    """A schedule on so many ranks with so many stages each, of so many microbatches."""

    schedule: str
    pipeline: int
    stages: int
    microbatches: int


def filled(seconds: float, turns: PipelineShape, end: float = 0.0, through: float = 0.0) -> float:
    """Seconds that no division into stages goes below; `seconds` of one microbatch on all of them together.

    end: seconds of one microbatch on the last unit, which the last stage has. through: of one there and back through
    all of them, without the gradients of weights, which are all that zero_bubble puts off.

    Let T be the seconds of one microbatch on all stages, m the microbatches, p the ranks, x the last rank's part of T.
    The last rank begins when a microbatch has come down the others, and the step ends when the last gradient has gone
    up them: T - x + m x. The busiest of the others has at least (T - x) / (p - 1) of each microbatch. The larger of the
    two is least where they are equal; where even x = 0 does not make them so, the step takes T.
    """
    ranks, microbatches = turns.pipeline, turns.microbatches
    even = seconds * microbatches / ranks
    if ranks == 1:
        return even
    if turns.schedule == "zero_bubble":  # no microbatch waits for all of T
        return max(even, through)
    if turns.schedule == "gpipe":  # all wait for the slowest stage, which is no faster than the average one
        return max(even, seconds * (1.0 + (microbatches - 1) / (ranks * turns.stages)))
    if turns.stages > 1:  # the first microbatch passes all stages, there and back
        return max(even, seconds + (microbatches - 1) * end)
    last = max(0.0, (microbatches - ranks + 1) / (microbatches * ranks - ranks + 1))
    return max(even, seconds + (microbatches - 1) * max(end, last * seconds))
