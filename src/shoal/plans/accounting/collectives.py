"""Messages and peak bytes of a rank in a step under data parallelism and ZeRO, from shapes and degrees alone.

Bytes of a message are the `size` of nccl-tests (its doc/PERFORMANCE.md): the larger of a rank's two buffers. That is
the tensor for an all_reduce, a broadcast, a send or a recv; all ranks' parts together for an all_gather (the output)
and a reduce_scatter (the input). It is the same for every algorithm. The formulas yield each collective with its size.
A run compares its count with their sum, and the planner estimates the time of each one on a network.

The strategies divide tensors, gradients and optimizer states into parts and buckets by the rules here, in integers.

Peak bytes have categories, which may peak at different moments, so their sum is an upper bound. Not included: buffers
of the model, temporaries inside an operator, the allocator's fragments, the process itself.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from math import prod
from operator import add
from typing import NamedTuple

from shoal.plans.plan import Layout

# The first bucket is small, as in DDP, so that the first all_reduce starts early. The last is small too, unlike in DDP,
# because the backward cannot hide it. Other buckets have 4 MiB over Gloo; NCCL needs DDP's 25 MiB for its bandwidth.
END_BUCKET_BYTES, GLOO_BUCKET_BYTES, NCCL_BUCKET_BYTES = 1 << 20, 4 << 20, 25 << 20
# Up to these limits Gloo gathers and each rank sums: one exchange instead of the two of an all_reduce. Between two busy
# processes 0.5 MB took 1.7 ms instead of 2 to 4 ms; 13 MB took 21 ms instead of 12 ms.
GATHER_BYTES, GATHER_RANKS = 2 << 20, 4
# Smaller parameters of one owner share a message up to this size: starting a broadcast costs as much as 0.1 MB.
PIECE_BYTES = 1 << 20
# Elements that a divided update keeps together: a row of the gradient's norm, and whole vector registers.
PIECE_ROW = 256
# An update is divided further if a rank exceeds its share of the bytes by this fraction; shortest run in bytes.
_UNEVEN, _LEAST_RUN = 0.05, 1 << 15
_ROW_BYTES = PIECE_ROW * 8


Range = tuple[int, int]


def cuts(length: int, parts: int) -> list[int]:
    """Return the bounds of an even division: the first index of each of `parts` parts, and the end of the last."""
    return [length * part // parts for part in range(parts + 1)]


def shared_part(num_bytes: int, parts: int, place: int) -> int:
    """Return one rank's portion of memory that `parts` ranks share, so that it counts once in total."""
    bounds = cuts(num_bytes, parts)
    return bounds[place + 1] - bounds[place]


def divide_into_buckets(sizes: Sequence[int], middle_bytes: int) -> list[list[int]]:
    """Group parameters of these sizes in bytes into buckets of indices, last first, as the backward reaches them.

    A bucket closes once it has reached its size: END_BUCKET_BYTES for the first and the last, else `middle_bytes`.
    """
    order = list(reversed(range(len(sizes))))
    cut, tail = len(order), 0
    while cut and tail < END_BUCKET_BYTES:  # fill the last bucket from its end
        cut -= 1
        tail += sizes[order[cut]]
    groups: list[list[int]] = []
    size, limit = 0, 0
    for i in order[:cut]:
        if size >= limit:
            limit = middle_bytes if groups else END_BUCKET_BYTES
            groups.append([])
            size = 0
        groups[-1].append(i)
        size += sizes[i]
    return [*groups, order[cut:]]


def gathers(num_bytes: int, world_size: int, on_cpu: bool) -> bool:
    """Return True if ranks gather a bucket of `num_bytes` and sum it themselves, instead of an all-reduce."""
    return on_cpu and num_bytes <= GATHER_BYTES and world_size <= GATHER_RANKS


def divide(sizes: Sequence[int], num_owners: int, room: Sequence[int] = ()) -> list[int]:
    """Return an owner for each size, the largest first to the least loaded. Within 4/3 of the best (Graham 1969).

    `room`: relative room of each owner, as whole numbers; empty if all have the same.
    """
    owners = [0] * len(sizes)
    if room:
        filled = [0] * num_owners
        for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
            owners[i] = min(range(num_owners), key=lambda owner: (filled[owner] + sizes[i]) / room[owner])
            filled[owners[i]] += sizes[i]
        return owners
    loads = [(0, owner) for owner in range(min(num_owners, len(sizes)))]  # a heap
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        load, owners[i] = loads[0]
        heapq.heapreplace(loads, (load + sizes[i], owners[i]))
    return owners


def matrix_cost(shape: Sequence[int]) -> int:
    """Return the relative cost of a step with a whole parameter: m^2 n for a matrix [m, n], m <= n, as of a product."""
    numel = prod(shape)
    return numel * min(shape[0], numel // shape[0]) if numel and shape else numel


def level(
    sizes: Sequence[int], owners: Sequence[int], num_owners: int, divisible: Sequence[bool]
) -> dict[int, dict[int, Range]]:
    """Divide sizes whose owner has too much; return {index: {owner: bytes [begin, end)}} for the divided ones.

    The largest come first. Each owner passes on its excess over the average and keeps a part. Other sizes stay whole.
    """
    loads = [0] * num_owners
    for size, owner in zip(sizes, owners, strict=True):
        loads[owner] += size
    fair = -(-sum(sizes) // num_owners)
    divided: dict[int, dict[int, Range]] = {}
    for i in sorted((i for i, may in enumerate(divisible) if may), key=lambda i: (-sizes[i], i)):
        spare = min(loads[owners[i]] - fair, sizes[i] - _LEAST_RUN)
        if spare <= _UNEVEN * fair:
            continue
        runs: dict[int, Range] = {}
        begin = 0
        for taker in sorted(range(num_owners), key=lambda owner: (loads[owner], owner)):
            size = min(spare - begin, fair - loads[taker]) // _ROW_BYTES * _ROW_BYTES
            if size >= _LEAST_RUN:
                runs[taker] = begin, begin + size
                begin += size
                loads[taker] += size
        if begin:
            loads[owners[i]] -= begin
            divided[i] = {**runs, owners[i]: (begin, sizes[i])}
    return divided


def pack(sizes: Sequence[int], alone: Sequence[bool], kinds: Sequence[object]) -> list[list[int]]:
    """Return the indices of one owner's parameters for each message, in the order of the messages.

    Neighbours of one kind (dtype) share a message up to PIECE_BYTES. Parameters marked `alone` precede waiting ones.
    """
    messages: list[list[int]] = []
    waiting: list[int] = []
    total = 0
    for i, size in enumerate(sizes):
        if alone[i]:
            messages.append([i])
            continue
        if waiting and (total + size > PIECE_BYTES or kinds[i] != kinds[waiting[0]]):
            messages.append(waiting)
            waiting, total = [], 0
        waiting.append(i)
        total += size
    return [*messages, waiting] if waiting else messages


def halves(lo: int, hi: int) -> tuple[Range, Range]:
    """Return the two children of the fixed tree's node over positions [lo, hi); hi - lo is at least 2."""
    middle = lo + (1 << ((hi - lo - 1).bit_length() - 1))
    return (lo, middle), (middle, hi)


def pieces(positions: Iterable[int], num_grains: int) -> list[Range]:
    """Return the largest nodes of the tree over [0, num_grains) with only these positions, in order."""
    own = set(positions)

    def visit(lo: int, hi: int) -> list[Range]:
        if own.issuperset(range(lo, hi)):
            return [(lo, hi)]
        if hi - lo == 1 or own.isdisjoint(range(lo, hi)):
            return []
        left, right = halves(lo, hi)
        return visit(*left) + visit(*right)

    return visit(0, num_grains)


# ------------------------------------------------------------------------------------------------------------ sequences

# Model code that checks the sequence length takes a single position for a step of text generation.
FEWEST_POSITIONS = 2


def num_positions(length: int, degree: int) -> int:
    """Return the positions of a sequence on each of `degree` ranks; positions after its end copy the last one."""
    return max(-(-length // degree), FEWEST_POSITIONS)


@dataclass(frozen=True)
class Heads:
    """Partition of attention heads over ranks: rank i has query heads `bounds(i)`, reads key heads `read(i)`."""

    num_query: int
    num_key: int
    degree: int

    def bounds(self, place: int) -> tuple[int, int]:
        """Return the query heads [start, stop) of a rank."""
        return self.num_query * place // self.degree, self.num_query * (place + 1) // self.degree

    def read(self, place: int) -> tuple[int, int]:
        """Return the key and value heads [start, stop) that a rank's query heads attend to; ranks may share some."""
        start, stop = self.bounds(place)
        group = self.num_query // self.num_key
        return start // group, -(-stop // group)

    def repeats(self, place: int) -> list[int] | None:
        """Return the index, among the read key heads, for each query head of a rank; None if they match one to one."""
        (start, stop), (first, last) = self.bounds(place), self.read(place)
        group = self.num_query // self.num_key
        return None if stop - start == last - first else [head // group - first for head in range(start, stop)]


# The group of all ranks, and the group of ranks with the same part of the model if that is a smaller one.
WORLD, REPLICAS = "world", "replicas"
# A step's sums are 12 float64 numbers (loss total, weight, samples, microbatches with a gradient, 8 words of digest)
# and the weighted buffers. In a float32 bucket all but the loss take four numbers each. A rank's agreement row for the
# next step has 15 numbers. An agreement without an error is the word "null" and its length.
NUM_STEP_SUMS, NUM_LIMBS, NUM_FLAGS, ROW_NUMBERS = 12, 4, 2, 15
# With sharded gradients or parameters: the order in which a rank has called its units, and its square.
NUM_ORDERS = 2
_NULL_BYTES, _FLOAT64 = 4, 8


class SizedCollective(NamedTuple):
    """A collective, send or recv of one rank in one group: `count` calls of `num_bytes` each.

    `group`: the name of its axis, or WORLD or REPLICAS.
    """

    group: str
    kind: str
    num_bytes: int
    count: int = 1  # type: ignore[assignment]  # hides tuple.count, which nothing calls


@dataclass(frozen=True)
class Volume:
    """Messages and bytes of one kind of collective in one group, for one rank and one step."""

    messages: int
    bytes: int


class Volumes(dict[tuple[str, str], Volume]):
    """Volumes by (group, kind of collective)."""

    @classmethod
    def of(cls, *sent: Iterable[SizedCollective]) -> Volumes:
        """Return the sums of these collectives."""
        volumes = cls()
        for one in chain(*sent):
            volumes.add(*one)
        return volumes

    def add(self, group: str, kind: str, num_bytes: int, messages: int = 1) -> None:
        """Count `messages` messages of `num_bytes` each."""
        before = self.get((group, kind), Volume(0, 0))
        if messages:
            self[group, kind] = Volume(before.messages + messages, before.bytes + messages * num_bytes)

    def to_json(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return {group: {kind: {"messages": ..., "bytes": ...}}}, sorted."""
        document: dict[str, dict[str, dict[str, int]]] = {}
        for (group, kind), volume in sorted(self.items()):
            document.setdefault(group, {})[kind] = {"messages": volume.messages, "bytes": volume.bytes}
        return document


@dataclass(frozen=True)
class Array:
    """Shape of a parameter, its bytes per element, and whether it is contiguous in memory."""

    shape: tuple[int, ...]
    itemsize: int = 4
    contiguous: bool = True
    kind: str = "float32"
    trainable: bool = True

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the whole parameter."""
        return self.numel * self.itemsize

    def padded_numel(self, parts: int) -> int:
        """Return the number of elements with dim 0 rounded up to a multiple of `parts`, as fully_shard cuts it."""
        rows = self.shape[0] if self.shape else 0  # ranks have scalars whole
        return self.numel if rows % parts == 0 else -(-rows // parts) * parts * prod(self.shape[1:])


@dataclass(frozen=True)
class Gradients:
    """Trainable parameters in the model's order, and the settings of their gradients' sums."""

    parameters: tuple[Array, ...]
    reduce_itemsize: int = 4
    on_cpu: bool = True
    buffer_numel: int = 0  # elements of the buffers that the forward changes (batch statistics), sent as sums
    row_numbers: int = ROW_NUMBERS  # numbers of each rank's agreement row for the next step (0 in a Session)

    @property
    def numel(self) -> int:
        """Number of elements of all parameters."""
        return sum(p.numel for p in self.parameters)

    def carries_sums(self, layout: Layout) -> bool:
        """Return True if the last bucket carries the step's sums and rows: it is float32 and summed over all ranks."""
        return self.reduce_itemsize == 4 and layout.shares_grains == 1

    @cached_property
    def groups(self) -> list[list[int]]:
        """The parameters of each flat buffer, in the order of sending."""
        sizes = [p.numel * self.reduce_itemsize for p in self.parameters]
        return divide_into_buckets(sizes, GLOO_BUCKET_BYTES if self.on_cpu else NCCL_BUCKET_BYTES)

    @cached_property
    def bucket_numels(self) -> list[int]:
        """Elements of the gradients in each flat buffer."""
        return [sum(self.parameters[i].numel for i in group) for group in self.groups]

    def buckets(self, layout: Layout) -> list[int]:
        """Return the elements of each flat buffer, in the order of sending; the last one carries the sums."""
        *others, last = self.bucket_numels
        last += NUM_FLAGS + len(self.parameters)
        if self.carries_sums(layout) and layout.world_size > 1:
            last += 1 + NUM_LIMBS * (NUM_STEP_SUMS - 1) + self.buffer_numel
            last += layout.world_size * self.row_numbers
        return [*others, last]

    @property
    def num_sums(self) -> int:
        """Number of float64 numbers in a step's sums."""
        return NUM_STEP_SUMS + self.buffer_numel


# -------------------------------------------------------------------------------------------------------------- data


def bucket_sums(gradients: Gradients, layout: Layout, native: bool = True) -> Iterator[SizedCollective]:
    """Yield the all_reduces of fast data parallelism's buckets (parallel/data/replicated.py).

    `native`: whether small buckets are gathered instead.
    """
    ranks = layout.divides_grains
    group = WORLD if ranks == layout.world_size else REPLICAS
    *others, last = gradients.buckets(layout)
    # Equal blocks have mostly equal buckets, and the planner prices each size once.
    for length, count in (*Counter(others).items(), (last, 1)) if ranks > 1 else ():
        num_bytes = length * gradients.reduce_itemsize
        if native and gathers(num_bytes, ranks, gradients.on_cpu):
            yield SizedCollective(group, "all_gather", ranks * num_bytes, count)
        else:
            yield SizedCollective(group, "all_reduce", num_bytes, count)


def data_parallel(gradients: Gradients, layout: Layout) -> Iterator[SizedCollective]:
    """Yield a step's native collectives of fast data parallelism, between its agreement and its update."""
    yield from bucket_sums(gradients, layout)
    if layout.world_size > 1 and not gradients.carries_sums(layout):
        yield sums(gradients)


def sums(gradients: Gradients, num_used: int = 0) -> SizedCollective:
    """Return the float64 all_reduce of a step's sums and flags, and of flags for `num_used` parameters' gradients."""
    return SizedCollective(WORLD, "all_reduce", (gradients.num_sums + num_used + NUM_FLAGS) * _FLOAT64)


def norm() -> SizedCollective:
    """Return the all_reduce of the gradient's norm over ranks with different parts: one number over all ranks."""
    return SizedCollective(WORLD, "all_reduce", _FLOAT64)


def rows(world_size: int) -> SizedCollective:
    """Return the all_gather of agreement rows if the last bucket has none; a run's count ends before it."""
    return SizedCollective(WORLD, "all_gather", world_size * ROW_NUMBERS * _FLOAT64)


def exact_data_parallel(
    gradients: Gradients, grains_of_ranks: Sequence[Sequence[int]], num_grains: int, rank: int
) -> Iterator[SizedCollective]:
    """Yield a step's collectives of exact mode on `rank`, where rank r computes the grains `grains_of_ranks[r]`.

    They are two all_reduces (a row of sums for each grain; flags and used parameters), an all_to_all of the ranks' tree
    nodes cut by rank, and an all_gather of the summed cuts. See distributed/collectives/fixed_tree.py.
    """
    world_size = len(grains_of_ranks)
    if world_size == 1:
        return
    yield SizedCollective(WORLD, "all_reduce", num_grains * (gradients.num_sums + 1) * _FLOAT64)
    yield SizedCollective(WORLD, "all_reduce", (NUM_FLAGS + len(gradients.parameters)) * _FLOAT64)
    length, itemsize = gradients.numel, gradients.reduce_itemsize
    places = cuts(length, world_size)
    own = places[rank + 1] - places[rank]
    longest = max(b - a for a, b in pairwise(places))
    nodes = [len(pieces(grains, num_grains)) for grains in grains_of_ranks]
    yield SizedCollective(WORLD, "all_to_all", max(nodes[rank] * length, sum(nodes) * own) * itemsize)
    yield SizedCollective(WORLD, "all_gather", world_size * longest * itemsize)


def agreement(world_size: int) -> Iterator[SizedCollective]:
    """Yield the collectives of an agreement that no rank failed: a length, and the JSON text `null`."""
    if world_size > 1:
        yield SizedCollective(WORLD, "all_gather", world_size * _FLOAT64)
        yield SizedCollective(WORLD, "all_gather", world_size * _NULL_BYTES)


def owned(parameters: Sequence[Array], degree: int, room: Sequence[int] = ()) -> list[list[Array]]:
    """Return, for each index on the shard axis, the parameters whose optimizer state it owns under ZeRO-1.

    `room`: as in `divide`.
    """
    of_owner: list[list[Array]] = [[] for _ in range(degree)]
    for parameter, owner in zip(parameters, divide([p.bytes for p in parameters], degree, room), strict=True):
        of_owner[owner].append(parameter)
    return of_owner


def sharded_optimizer(gradients: Gradients, layout: Layout, room: Sequence[int] = ()) -> Iterator[SizedCollective]:
    """Yield ZeRO-1's additional collectives: broadcasts of owned parameters, and an agreement after the update.

    `room`: as in `divide`.
    """
    if layout.shard == 1:
        return
    for mine in filter(None, owned(gradients.parameters, layout.shard, room)):
        sizes = [p.bytes for p in mine]
        alone = [p.contiguous and p.bytes >= PIECE_BYTES for p in mine]
        for members in pack(sizes, alone, [p.kind for p in mine]):
            yield SizedCollective("shard", "broadcast", sum(sizes[i] for i in members))
    yield from agreement(layout.world_size)


# --------------------------------------------------------------------------------------- gradients and parameters cut


@dataclass(frozen=True)
class Sharding:
    """Division of a model's units (each one fully_shard call, the root last) over the shard axis.

    `resident` units (all of them at level `gradients`) are gathered once per microbatch, others again for the backward.
    `root_early`: elements of the root with gradients before the other units' backward (a head, not an embedding).
    """

    units: tuple[tuple[Array, ...], ...]
    degree: int
    replicas: int = 1
    microbatches: int = 1
    resident: frozenset[int] = frozenset()
    gather_itemsize: int = 4  # bytes of the compute dtype
    reduce_itemsize: int = 4  # bytes of the reduce dtype
    reduce_every: bool = True  # scatter gradients after each microbatch, not only after the last
    root_early: int | None = None  # None: all elements
    resharded: bool = True  # release parameters after the backward, so that each microbatch gathers again
    uses: tuple[int, ...] = ()  # number of a rank's stages that use each unit, if not one
    halves: bool = False  # backwards consist of two halves, and each gathers
    shard_group: str = "shard"
    replica_group: str = "data"
    rounds: bool = True  # round dim 0 of each parameter up to a multiple of the degree; else divide its elements evenly

    def padded_numel(self, parameter: Array) -> int:
        """Return the elements of a gathered parameter, padding included."""
        return parameter.padded_numel(self.degree) if self.rounds else parameter.numel

    def each(self, measured: Callable[[tuple[Array, ...]], int]) -> list[int]:
        """Return `measured(unit)` for each unit, with one call for units that share their arrays."""
        known: dict[int, int] = {}
        for unit in self.units:
            if id(unit) not in known:
                known[id(unit)] = measured(unit)
        return [known[id(unit)] for unit in self.units]

    @cached_property
    def gathered_bytes(self) -> list[int]:
        """Bytes of each unit's gathered parameters, padding included."""
        return self.each(self.bytes_of)

    def bytes_of(self, unit: tuple[Array, ...]) -> int:
        """Return the bytes of one unit's gathered parameters."""
        return sum(map(self.padded_numel, unit)) * self.gather_itemsize

    @cached_property
    def _trained(self) -> list[int]:
        """Trainable elements of each unit, padding included."""
        return self.each(self.trained_of)

    def trained_of(self, unit: tuple[Array, ...]) -> int:
        """Return the trainable elements of one unit, padding included."""
        return sum(self.padded_numel(p) for p in unit if p.trainable)

    @cached_property
    def scattered_bytes(self) -> list[int]:
        """Bytes of each unit's gradients before they are scattered, padding included."""
        return [numel * self.reduce_itemsize for numel in self._trained]

    def gather(self, unit: int) -> SizedCollective:
        """Return the all_gather of a unit's parameters over the shard axis."""
        return SizedCollective(self.shard_group, "all_gather", self.gathered_bytes[unit])

    def scatter(self, unit: int) -> SizedCollective:
        """Return the reduce_scatter of a unit's gradients over the shard axis."""
        return SizedCollective(self.shard_group, "reduce_scatter", self.scattered_bytes[unit])

    def replica_sum(self, unit: int) -> SizedCollective:
        """Return the all_reduce of a unit's scattered gradients over the replicas."""
        return SizedCollective(self.replica_group, "all_reduce", self.part_of(self._trained[unit]))

    def part_of(self, trained: int) -> int:
        """Return the bytes of a rank's part of the gradients of `trained` elements."""
        return trained // self.degree * self.reduce_itemsize


def fully_sharded(sharding: Sharding) -> Iterator[SizedCollective]:
    """Yield a step's collectives of ZeRO-2 or ZeRO-3 with fully_shard, hybrid if there are replicas.

    A unit has one all_gather for its parameters, one reduce_scatter for its gradients, and one all_reduce of the
    scattered sum over the replicas.
    """
    for number, unit in enumerate(sharding.units):
        if not unit:
            continue
        computed = sharding.microbatches * (sharding.uses[number] if sharding.uses else 1)
        reductions = (computed if sharding.reduce_every else 1) if any(p.trainable for p in unit) else 0
        if sharding.degree > 1:
            gathered = (computed if sharding.resharded else 1) if number in sharding.resident else computed * 2
            if sharding.halves and number not in sharding.resident:
                gathered += computed
            yield sharding.gather(number)._replace(count=gathered)
            yield sharding.scatter(number)._replace(count=reductions)
        if sharding.replicas > 1:
            yield sharding.replica_sum(number)._replace(count=reductions)


@dataclass(frozen=True)
class Footprint:
    """Peak bytes of one rank; None if unknown.

    `gathered`: parameters of other ranks' shards that a computing unit needs, with the buffer in which they arrive.
    """

    parameters: int
    gathered: int | None
    gradients: int | None
    optimizer: int | None
    activations: int | None

    def to_json(self) -> dict[str, int | None]:
        """Return the bytes by category."""
        return asdict(self)


@dataclass(frozen=True)
class StateShape:
    """Optimizer state per parameter: number of tensors with the parameter's shape and dtype, and bytes of scalars."""

    tensors: int
    scalar_bytes: int = 0


# torch.optim, with foreach or without. `step`, NAdam's mu_product and ASGD's eta and mu are float32 scalars.
_STATES = {
    "Adam": StateShape(2, 4),
    "AdamW": StateShape(2, 4),
    "SparseAdam": StateShape(2, 0),
    "NAdam": StateShape(2, 8),
    "RAdam": StateShape(2, 4),
    "Adamax": StateShape(2, 4),
    "Adadelta": StateShape(2, 4),
    "Rprop": StateShape(2, 4),
    "Adagrad": StateShape(1, 4),
    "ASGD": StateShape(1, 12),
    "RMSprop": StateShape(1, 4),
    "Muon": StateShape(1, 0),
    "SGD": StateShape(0, 0),
}


def state_shape(
    optimizer: str, amsgrad: bool = False, momentum: bool = False, centered: bool = False
) -> StateShape | None:
    """Return the state of a torch.optim optimizer, or None if unknown (Adafactor's depends on shapes)."""
    known = _STATES.get(optimizer)
    if known is None:
        return None
    extras = {"Adam": amsgrad, "AdamW": amsgrad, "SGD": momentum, "RMSprop": momentum + centered}
    return StateShape(known.tensors + extras.get(optimizer, 0), known.scalar_bytes)


def whole(arrays: Iterable[Array]) -> int:
    """Return the bytes of these arrays without a division."""
    return sum(a.bytes for a in arrays)


def cut(array: Array, place: int, degree: int) -> Array:
    """Return a rank's rows of `array` if fully_shard cuts dim 0 into `degree` parts: full parts first, then fewer."""
    if not array.shape:  # ranks have scalars whole
        return array
    rows = -(-array.shape[0] // degree)
    mine = min(rows, max(0, array.shape[0] - place * rows))
    return replace(array, shape=(mine, *array.shape[1:]))


def optimizer_state(arrays: Iterable[Array], shape: StateShape) -> int:
    """Return the bytes of the state for the arrays that a rank updates."""
    return sum(shape.tensors * a.bytes + shape.scalar_bytes for a in arrays)


# -------------------------------------------------------------------------------------------------------- gradients


def bucketed(gradients: Gradients, layout: Layout, native: bool = True) -> int:
    """Return the gradient bytes of fast data parallelism at the start of the update.

    They are the buckets, and a copy for each rank of gathered buckets (`native` only). Parameters of another dtype than
    the buckets' have an additional gradient. A single process has only gradients.
    """
    narrow = sum(p.bytes for p in gradients.parameters if p.itemsize != gradients.reduce_itemsize)
    ranks = layout.divides_grains
    if ranks == 1 and not narrow:
        return sum(p.bytes for p in gradients.parameters)
    total = narrow
    for length in gradients.buckets(layout):
        num_bytes = length * gradients.reduce_itemsize
        total += num_bytes
        if native and ranks > 1 and gathers(num_bytes, ranks, gradients.on_cpu):
            total += ranks * num_bytes
    return total


def exact(gradients: Gradients, grains_of_ranks: Sequence[Sequence[int]], num_grains: int, rank: int) -> int:
    """Return the gradient bytes of exact mode at the start of the update.

    They are the tree's template vector, its other vectors and, for several ranks, the sum.
    """
    own = grains_of_ranks[rank]
    tree = max((len(pieces(own[:count], num_grains)) + 1 for count in range(len(own))), default=0)
    vectors = 1 + tree + (len(grains_of_ranks) > 1 or not own)
    narrow = sum(p.bytes for p in gradients.parameters if p.itemsize != gradients.reduce_itemsize)
    return vectors * gradients.numel * gradients.reduce_itemsize + narrow


def shared_pieces(gradients: Gradients, grains_of_ranks: Sequence[Sequence[int]], num_grains: int) -> int:
    """Return the bytes of a rank's slot, without the sum, if exact mode sums through shared memory."""
    most = max(len(pieces(grains, num_grains)) for grains in grains_of_ranks)
    return most * gradients.numel * gradients.reduce_itemsize


# --------------------------------------------------------------------------------------------------------- fully_shard


def sharded_parameters(sharding: Sharding) -> int:
    """Return the bytes of a rank's shard, equal on every rank because dim 0 of each parameter is padded."""

    def own(unit: Sequence[Array]) -> int:
        return sum(sharding.padded_numel(p) // sharding.degree * p.itemsize for p in unit)

    return sum(sharding.each(own))


def gathered_parameters(sharding: Sharding) -> int:
    """Return the bytes of units that stay gathered, and twice the largest other unit: as it arrives and as it is used.

    A unit that stays also needs its arrival buffer until the next unit has arrived. A prefetch takes as much.
    """
    if sharding.degree == 1:
        return 0
    return max(_gathered_at(sharding, sharding.gathered_bytes))


def _gathered_at(sharding: Sharding, sizes: Sequence[int]) -> Iterable[int]:
    # The root, last of the units, is gathered first and stays throughout forward and backward. In the forward an
    # arrival buffer is freed when the next unit has arrived.
    root = len(sizes) - 1
    forward = [root, *range(root)]
    stays, before = 0, 0
    for unit in forward:
        yield stays + before + sizes[unit]  # its gather is issued
        yield stays + 2 * sizes[unit]  # it has arrived
        stays += sizes[unit] if unit in sharding.resident or unit == root else 0
        before = sizes[unit]
    again = [unit for unit in reversed(range(root)) if unit not in sharding.resident]
    if (
        root not in sharding.resident
    ):  # the root was released between forward and backward, and the last unit is prefetched
        yield 2 * sizes[root]
        yield stays + max((sizes[unit] for unit in again[:1]), default=0)
    for unit, following in zip(again, [*again[1:], None], strict=False):
        yield stays + 2 * sizes[unit]
        yield stays + sizes[unit] + (sizes[following] if following is not None else 0)  # the next is prefetched


def scattered_gradients(sharding: Sharding) -> int:
    """Return the peak when a unit's gradients are scattered: its flat whole gradients, and all summed shards.

    The root comes last, so its early gradients wait. From the second scattered microbatch on, all units' shards exist.
    If only the last microbatch is scattered, the other units' whole gradients wait too.
    """
    every = sharding.microbatches > 1 and sharding.reduce_every
    return scattered_peak(sharding.scattered_bytes, waiting_gradients(sharding), sharding.degree, every=every)


def waiting_gradients(sharding: Sharding) -> list[int]:
    """Return the bytes of each unit's gradients before any is scattered."""
    root = len(sharding.units) - 1

    def trained(unit: Sequence[Array]) -> int:
        return sum(p.numel for p in unit if p.trainable)

    early = trained(sharding.units[root]) if sharding.root_early is None else sharding.root_early
    waiting = [0] * root + [early * sharding.gather_itemsize]  # in the backward's dtype
    if sharding.microbatches > 1 and not sharding.reduce_every:  # earlier microbatches, in the reduce dtype
        if sharding.gather_itemsize == sharding.reduce_itemsize:
            waiting[root] = 0  # accumulated in place
        whole = [numel * sharding.reduce_itemsize for numel in sharding.each(trained)]
        waiting = list(map(add, whole, waiting))
    return waiting


def scattered_peak(flat: Sequence[int], waiting: Sequence[int], degree: int, *, every: bool) -> int:
    """Return the peak of units with `flat` bytes to scatter and `waiting` bytes; `every`: for several microbatches."""
    shards = [size // degree for size in flat]
    root = len(flat) - 1
    summed = sum(shards) if every else 0
    peak, left = 0, sum(waiting)
    for unit in [*reversed(range(root)), root]:
        left -= waiting[unit]
        summed += shards[unit]
        peak = max(peak, left + summed + flat[unit])
        summed -= shards[unit] if every else 0
    return peak
