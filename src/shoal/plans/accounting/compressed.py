"""Communication volume of compressed gradients: the size of each bucket under each scheme, in messages and bytes.

Integers only. The codecs divide tensors by these rules, the formulas predict by them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod

from shoal.plans.accounting.all_reduce import HEADER_BYTES, messages
from shoal.plans.accounting.collectives import WORLD, Gradients, SizedCollective
from shoal.plans.accounting.partition import gathers
from shoal.plans.conflicts import FED_BACK
from shoal.plans.plan import Plan

# What a signed byte holds on either side of zero.
INT8_LEVELS = 127
# Numbers, float64, by which a rank tells the others what the guard has seen.
NUM_COMPARED = 6
_FLOAT32 = 4
_HEADER = tuple(SizedCollective(WORLD, kind, HEADER_BYTES) for kind in ("send", "recv"))


def num_kept(numel: int, density: float) -> int:
    """Values of a bucket that topk sends: at least one."""
    return min(numel, max(1, ceil(numel * density)))


@dataclass(frozen=True)
class Matrix:
    """Tensor of a bucket that PowerSGD factors, as a matrix; `start` is its first index among the bucket's values."""

    start: int
    rows: int
    columns: int


def factored(shapes: Sequence[tuple[int, ...]], rank: int) -> tuple[list[Matrix], list[tuple[int, int]]]:
    """The tensors that two factors of this rank make smaller, and the places [start, stop) of the others' values."""
    matrices: list[Matrix] = []
    plain: list[tuple[int, int]] = []
    start = 0
    for shape in shapes:
        numel = prod(shape)
        rows = shape[0] if shape else 1
        columns = numel // rows if rows else 0
        if rank * (rows + columns) < numel:
            matrices.append(Matrix(start, rows, columns))
        elif numel:
            plain.append((start, start + numel))
        start += numel
    return matrices, plain


@dataclass(frozen=True)
class CollectiveCall:
    """A collective: elements of this rank's tensor and bytes an element. `adds`: a sum of floats, not of integers."""

    numel: int
    itemsize: int
    kind: str = "all_reduce"
    adds: bool = True


def calls(plan: Plan, shapes: Sequence[tuple[int, ...]]) -> list[CollectiveCall]:
    """Collectives of the plan's scheme for a bucket of gradients of these shapes."""
    scheme, options = plan.collectives.compression, plan.compression
    numel = sum(map(prod, shapes))
    if scheme == "bfloat16":
        return [CollectiveCall(numel, 2)]
    if scheme == "float16":
        return [CollectiveCall(1, _FLOAT32, adds=False), CollectiveCall(numel, 2)]
    if scheme == "int8":
        return [CollectiveCall(ceil(numel / options.block), _FLOAT32, adds=False), CollectiveCall(numel, 1, adds=False)]
    if scheme == "topk":
        return [CollectiveCall(2 * num_kept(numel, options.density), _FLOAT32, "all_gather")]
    matrices, plain = factored(shapes, options.rank)
    first = sum(stop - start for start, stop in plain) + sum(options.rank * m.rows for m in matrices)
    return [CollectiveCall(first, _FLOAT32), CollectiveCall(sum(options.rank * m.columns for m in matrices), _FLOAT32)]


@dataclass(frozen=True)
class _BucketBytes:
    shapes: list[tuple[int, ...]]
    numel: int
    rest: int  # what travels with the gradients as it is


def _buckets(gradients: Gradients, plan: Plan) -> Iterator[_BucketBytes]:
    for members, length in zip(gradients.groups, gradients.buckets(plan.degrees), strict=True):
        shapes = [gradients.parameters[i].shape for i in members]
        numel = sum(map(prod, shapes))
        yield _BucketBytes(shapes, numel, length - numel)


def payload(gradients: Gradients, plan: Plan) -> int:
    """Bytes of a step's gradients as one rank hands them to collectives, without what travels with them."""
    called = [call for bucket in _buckets(gradients, plan) for call in calls(plan, bucket.shapes)]
    return sum(call.numel * call.itemsize for call in called)


def compressed(gradients: Gradients, plan: Plan, rank: int, sampled: bool = False) -> Iterator[SizedCollective] | None:
    """A step of data parallelism with the plan's compression; None where it depends on who is on which host.

    `sampled`: with the exact sums that the guard compares.
    """
    if plan.collectives.all_reduce == "hierarchical":
        return None
    wire = _Algorithm(plan.collectives.all_reduce, gradients.on_cpu, rank, plan.degrees.divides_grains)
    return _compressed(gradients, plan, wire, sampled)


def _compressed(gradients: Gradients, plan: Plan, wire: _Algorithm, sampled: bool) -> Iterator[SizedCollective]:
    for bucket in _buckets(gradients, plan):
        exact = 1 + (plan.compression.feedback and plan.collectives.compression in FED_BACK) if sampled else 0
        beside = [CollectiveCall(bucket.rest, _FLOAT32)] if bucket.rest else []
        for call in (*calls(plan, bucket.shapes), *beside, *[CollectiveCall(bucket.numel, _FLOAT32)] * exact):
            yield from wire.call(call)
    if sampled:
        yield from wire.broadcast(NUM_COMPARED * 8)


@dataclass(frozen=True)
class _Algorithm:
    """What one rank sends and receives in a call, by an algorithm; through shared memory nothing."""

    name: str
    on_cpu: bool
    rank: int
    world_size: int

    def call(self, call: CollectiveCall) -> Iterator[SizedCollective]:
        """A collective of a tensor, which may be empty."""
        num_bytes = call.numel * call.itemsize
        if self.name == "native":
            if call.kind == "all_gather" or (call.adds and gathers(num_bytes, self.world_size, self.on_cpu)):
                yield SizedCollective(WORLD, "all_gather", self.world_size * num_bytes)
            else:
                yield SizedCollective(WORLD, "all_reduce", num_bytes)
        elif self.name != "shared_memory" and call.kind == "all_gather":
            yield from self._gather(num_bytes)
        elif self.name != "shared_memory":
            yield from messages(self.name, call.numel, call.itemsize, self.rank, self.world_size)

    def _gather(self, num_bytes: int) -> Iterator[SizedCollective]:
        """Around a ring, or a broadcast from each rank."""
        yield from _HEADER
        if self.name == "ring":
            for kind in ("send", "recv"):
                yield SizedCollective(WORLD, kind, num_bytes, self.world_size - 1)
            return
        for root in range(self.world_size):
            yield from self._pass_on(num_bytes, root)

    def broadcast(self, num_bytes: int) -> Iterator[SizedCollective]:
        """From the first rank."""
        if self.name == "native":
            yield SizedCollective(WORLD, "broadcast", num_bytes)
        elif self.name != "shared_memory":
            yield from _HEADER
            yield from self._pass_on(num_bytes, 0)

    def _pass_on(self, num_bytes: int, root: int) -> Iterator[SizedCollective]:
        """Down a binomial tree: who is d = 1, 2, 4, ... or less from the root sends it d on."""
        place = (self.rank - root) % self.world_size
        distances = [1 << bit for bit in range((self.world_size - 1).bit_length())]
        sends = sum(place < distance and place + distance < self.world_size for distance in distances)
        yield SizedCollective(WORLD, "send", num_bytes, sends)
        yield SizedCollective(WORLD, "recv", num_bytes, int(place > 0))


def buffers(gradients: Gradients, plan: Plan) -> int:
    """Bytes of compression's buffers: buckets, sent and received data, and residuals twice."""
    scheme, ranks = plan.collectives.compression, plan.degrees.divides_grains
    native = plan.collectives.all_reduce == "native"
    total, scratch = 0, 0

    def gathered(call: CollectiveCall) -> int:
        size = call.numel * call.itemsize
        return ranks * size if native and call.adds and gathers(size, ranks, gradients.on_cpu) else 0

    for bucket in _buckets(gradients, plan):
        total += (bucket.numel + bucket.rest) * _FLOAT32 + gathered(CollectiveCall(bucket.rest, _FLOAT32))
        total += 2 * bucket.numel * _FLOAT32 * (plan.compression.feedback and scheme in FED_BACK)
        for call in calls(plan, bucket.shapes):
            size = call.numel * call.itemsize
            total += size * (1 + ranks) if call.kind == "all_gather" else size + gathered(call)
        if scheme == "powersgd":
            matrices, _ = factored(bucket.shapes, plan.compression.rank)
            total += sum(plan.compression.rank * m.columns for m in matrices) * _FLOAT32
            scratch = max([scratch, *(m.rows * m.columns for m in matrices)])
        elif scheme != "bfloat16":
            scratch = max(scratch, bucket.numel)
    return total + scratch * _FLOAT32
