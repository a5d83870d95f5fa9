"""Communication volume of all_reduce algorithms, plain and compressed: each rank's partners, messages and bytes.

A call of a message-passing algorithm starts with one message of HEADER_BYTES, by which neighbours compare their calls.
The messages after it are counted exactly, also for uneven parts. Integers only: algorithms and codecs divide tensors by
these rules, and the formulas predict with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod

from shoal.plans.accounting.collectives import WORLD, Gradients, SizedCollective, cuts, gathers
from shoal.plans.accounting.collectives import data_parallel as native
from shoal.plans.accounting.collectives import sums as step_sums
from shoal.plans.plan import Layout, Plan
from shoal.plans.rules import FED_BACK

HEADER_BYTES = 64
# A tree passes on pieces of this size, so that its levels work at the same time.
SEGMENT_BYTES = 1 << 20
# Up to this size ranks exchange whole vectors, with half the messages of halving and doubling.
DOUBLING_BYTES = 16 << 10
# Levels of a signed byte on either side of zero.
INT8_LEVELS = 127
# Number of float64 values with which a rank reports the guard's findings.
NUM_COMPARED = 6
_FLOAT32 = 4
_HEADER = tuple(SizedCollective(WORLD, kind, HEADER_BYTES) for kind in ("send", "recv"))


def messages(algorithm: str, numel: int, itemsize: int, rank: int, world_size: int) -> Iterator[SizedCollective]:
    """Yield the messages that `rank` sends and receives in an all_reduce of all ranks, header included.

    A rank receives as much as it sends, except in a ring, where it receives what the previous rank sends. Empty
    messages are not sent. Raises: KeyError for an algorithm that sends no messages.
    """
    if world_size == 1:
        return
    formula = {"ring": _ring, "tree": _tree, "recursive_doubling": _recursive_doubling}[algorithm]
    before = (rank - 1) % world_size if algorithm == "ring" else rank
    for kind, sender in (("send", rank), ("recv", before)):
        yield SizedCollective(WORLD, kind, HEADER_BYTES)
        for length in filter(None, formula(numel, itemsize, sender, world_size)):
            yield SizedCollective(WORLD, kind, length * itemsize)


def data_parallel(gradients: Gradients, layout: Layout, algorithm: str, rank: int) -> Iterator[SizedCollective]:
    """Yield a step's collectives of fast data parallelism over all ranks; shared memory sends no gradients."""
    if algorithm == "native" or layout.world_size == 1:
        yield from native(gradients, layout)
        return
    for length in gradients.buckets(layout) if algorithm != "shared_memory" else ():
        yield from messages(algorithm, length, gradients.reduce_itemsize, rank, layout.world_size)
    if not gradients.carries_sums(layout):
        yield step_sums(gradients)


# -------------------------------------------------------------------------------------------------------------- ring


def _ring(numel: int, itemsize: int, rank: int, world_size: int) -> list[int]:
    """Return 2 (P - 1) message lengths, 2 N (P - 1) / P bytes: all parts but one's own, then all but the successor's.

    Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
    """
    places = cuts(numel, world_size)
    parts = [places[p + 1] - places[p] for p in range(world_size)]
    after = (rank + 1) % world_size
    reduced = [parts[p] for p in range(world_size) if p != rank]
    return [*reduced, *(parts[p] for p in range(world_size) if p != after)]


# -------------------------------------------------------------------------------------------------------------- tree


@dataclass(frozen=True)
class TreePosition:
    """Neighbours of a rank in a tree; the root has no parent."""

    parent: int | None
    children: tuple[int, ...]


def place_in_tree(rank: int, world_size: int, tree: int) -> TreePosition:
    """Return a rank's position in one of two binary trees; an inner rank of one tree is a leaf of the other.

    The positions are 1..P; the height of a position is its number of trailing zero bits. The second tree is the first,
    shifted by one rank. Sanders, Speck and Träff, Two-tree algorithms for full bandwidth broadcast, reduction and scan,
    2009.
    """

    def parent(position: int) -> int:
        bit = position & -position
        above = (position - bit) | bit << 1
        return above if above <= world_size else position - bit

    mine = (rank + tree) % world_size + 1

    def rank_at(position: int) -> int:
        return (position - 1 - tree) % world_size

    children = [p for p in range(1, world_size + 1) if p != mine and parent(p) == mine]
    above = parent(mine)
    return TreePosition(rank_at(above) if above else None, tuple(rank_at(p) for p in children))


def segments(numel: int, itemsize: int) -> list[int]:
    """Return the lengths of the pieces in which a tree sends its half of a vector."""
    most = SEGMENT_BYTES // itemsize
    return [min(most, numel - start) for start in range(0, numel, most)]


def _tree(numel: int, itemsize: int, rank: int, world_size: int) -> list[int]:
    """Return the message lengths: each half to the parent and to each child; about 2 log2 P messages deep.

    A rank sends at most 2 N bytes.
    """
    half = numel // 2
    lengths: list[int] = []
    for tree, size in enumerate((half, numel - half)):
        place = place_in_tree(rank, world_size, tree)
        neighbours = len(place.children) + (place.parent is not None)
        lengths += segments(size, itemsize) * neighbours
    return lengths


# ------------------------------------------------------------------------------------------------ recursive doubling


@dataclass(frozen=True)
class HalvingStep:
    """One step of recursive halving: the partner, the range that this rank sends, and the range that stays."""

    partner: int
    sends: tuple[int, int]
    stays: tuple[int, int]


@dataclass(frozen=True)
class Halving:
    """Steps of one rank in recursive halving and doubling; ranks beyond a power of two pair up first."""

    folds_into: int | None  # the rank that does this rank's work and sends it the result
    folded: int | None  # the rank whose work this rank does
    exchanges: tuple[HalvingStep, ...]


def halving(numel: int, rank: int, world_size: int) -> Halving:
    """Return the exchanges of a rank, farthest partner first; doubling reverses them.

    Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005.
    """
    power = 1 << (world_size.bit_length() - 1)
    extra = world_size - power
    if rank < 2 * extra and rank % 2 == 0:
        return Halving(rank + 1, None, ())
    folded = rank - 1 if rank < 2 * extra else None
    own = rank // 2 if rank < 2 * extra else rank - extra

    def actual(number: int) -> int:
        return 2 * number + 1 if number < extra else number + extra

    steps: list[HalvingStep] = []
    low, high, distance = 0, numel, power // 2
    while distance:
        middle = low + (high - low) // 2
        lower, upper = (low, middle), (middle, high)
        stays, sends = (upper, lower) if own & distance else (lower, upper)
        steps.append(HalvingStep(actual(own ^ distance), sends, stays))
        (low, high), distance = stays, distance // 2
    return Halving(None, folded, tuple(steps))


def doubles(numel: int, itemsize: int) -> bool:
    """Return True if ranks exchange whole vectors."""
    return numel * itemsize <= DOUBLING_BYTES


def _recursive_doubling(numel: int, itemsize: int, rank: int, world_size: int) -> list[int]:
    """Return the message lengths of recursive doubling.

    For powers of two: 2 log2 P messages and 2 N (P - 1) / P bytes, or log2 P messages of N if N is small. Otherwise the
    first ranks also send N once, to or from the rank that does their work.
    """
    way = halving(numel, rank, world_size)
    lengths = [numel] if way.folds_into is not None or way.folded is not None else []
    for step in way.exchanges:
        if doubles(numel, itemsize):
            lengths.append(numel)
        else:
            lengths += [step.sends[1] - step.sends[0], step.stays[1] - step.stays[0]]
    return lengths


# -------------------------------------------------------------------------------------------------------- compressed


def num_kept(numel: int, density: float) -> int:
    """Return the number of values of a bucket that topk sends, at least one."""
    return min(numel, max(1, ceil(numel * density)))


@dataclass(frozen=True)
class Matrix:
    """Tensor in a bucket that PowerSGD factors as a matrix; `start` is its first index among the bucket's values."""

    start: int
    rows: int
    columns: int


def factored(shapes: Sequence[tuple[int, ...]], rank: int) -> tuple[list[Matrix], list[tuple[int, int]]]:
    """Return the tensors that two factors of this rank make smaller, and the ranges [start, stop) of other values."""
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
    """A collective: elements of this rank's tensor and bytes per element. `adds`: whether it sums floats."""

    numel: int
    itemsize: int
    kind: str = "all_reduce"
    adds: bool = True


def compressed_calls(plan: Plan, shapes: Sequence[tuple[int, ...]]) -> list[CollectiveCall]:
    """Return the collectives of the plan's scheme for a bucket of gradients with these shapes."""
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


def _buckets(gradients: Gradients, plan: Plan) -> Iterator[tuple[list[tuple[int, ...]], int, int]]:
    """Yield for each bucket the shapes and elements of its gradients, and the elements that travel uncompressed."""
    for members, length in zip(gradients.groups, gradients.buckets(plan.layout), strict=True):
        shapes = [gradients.parameters[i].shape for i in members]
        numel = sum(map(prod, shapes))
        yield shapes, numel, length - numel


def compressed(gradients: Gradients, plan: Plan, rank: int, sampled: bool = False) -> Iterator[SizedCollective]:
    """Yield a step's collectives of compressed data parallelism; `sampled`: include the guard's exact sums."""
    for bucket in compressed_buckets(gradients, plan, rank, sampled):
        yield from bucket
    if sampled:
        wire = _Algorithm(plan.collectives.all_reduce, gradients.on_cpu, rank, plan.layout.divides_grains)
        yield from wire.broadcast(NUM_COMPARED * 8)


def compressed_buckets(
    gradients: Gradients, plan: Plan, rank: int, sampled: bool = False
) -> Iterator[list[SizedCollective]]:
    """Yield the collectives of each bucket, as in `compressed`."""
    wire = _Algorithm(plan.collectives.all_reduce, gradients.on_cpu, rank, plan.layout.divides_grains)
    for shapes, numel, rest in _buckets(gradients, plan):
        exact = 1 + (plan.compression.feedback and plan.collectives.compression in FED_BACK) if sampled else 0
        beside = [CollectiveCall(rest, _FLOAT32)] if rest else []
        calls = (*compressed_calls(plan, shapes), *beside, *[CollectiveCall(numel, _FLOAT32)] * exact)
        yield [sent for call in calls for sent in wire.call(call)]


@dataclass(frozen=True)
class _Algorithm:
    """Messages of one rank in a call, for one algorithm; shared memory sends none."""

    name: str
    on_cpu: bool
    rank: int
    world_size: int

    def call(self, call: CollectiveCall) -> Iterator[SizedCollective]:
        """Yield the messages of a collective on a tensor, which may be empty."""
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
        """Yield the messages of an all_gather: in a ring, or as a broadcast from each rank."""
        yield from _HEADER
        if self.name == "ring":
            for kind in ("send", "recv"):
                yield SizedCollective(WORLD, kind, num_bytes, self.world_size - 1)
            return
        for root in range(self.world_size):
            yield from self._pass_on(num_bytes, root)

    def broadcast(self, num_bytes: int) -> Iterator[SizedCollective]:
        """Yield the messages of a broadcast from rank 0."""
        if self.name == "native":
            yield SizedCollective(WORLD, "broadcast", num_bytes)
        elif self.name != "shared_memory":
            yield from _HEADER
            yield from self._pass_on(num_bytes, 0)

    def _pass_on(self, num_bytes: int, root: int) -> Iterator[SizedCollective]:
        """Yield the messages of a binomial tree: for d = 1, 2, 4, ..., ranks within d of the root send d ranks on."""
        place = (self.rank - root) % self.world_size
        distances = [1 << bit for bit in range((self.world_size - 1).bit_length())]
        sends = sum(place < distance and place + distance < self.world_size for distance in distances)
        yield SizedCollective(WORLD, "send", num_bytes, sends)
        yield SizedCollective(WORLD, "recv", num_bytes, int(place > 0))


def compression_buffers(gradients: Gradients, plan: Plan) -> int:
    """Return the bytes of compression's buffers: buckets, sent and received data, and residuals twice."""
    scheme, ranks = plan.collectives.compression, plan.layout.divides_grains
    native = plan.collectives.all_reduce == "native"
    total, scratch = 0, 0

    def gathered(call: CollectiveCall) -> int:
        size = call.numel * call.itemsize
        return ranks * size if native and call.adds and gathers(size, ranks, gradients.on_cpu) else 0

    for shapes, numel, rest in _buckets(gradients, plan):
        total += (numel + rest) * _FLOAT32 + gathered(CollectiveCall(rest, _FLOAT32))
        total += 2 * numel * _FLOAT32 * (plan.compression.feedback and scheme in FED_BACK)
        for call in compressed_calls(plan, shapes):
            size = call.numel * call.itemsize
            total += size * (1 + ranks) if call.kind == "all_gather" else size + gathered(call)
        if scheme == "powersgd":
            matrices, _ = factored(shapes, plan.compression.rank)
            total += sum(plan.compression.rank * m.columns for m in matrices) * _FLOAT32
            scratch = max([scratch, *(m.rows * m.columns for m in matrices)])
        elif scheme != "bfloat16":
            scratch = max(scratch, numel)
    return total + scratch * _FLOAT32
