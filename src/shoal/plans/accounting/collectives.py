"""Communication volume of a rank in a step: messages and bytes of every collective, from shapes and degrees alone.

Bytes are the `size` of nccl-tests (its doc/PERFORMANCE.md): the larger of a rank's two buffers. That is the tensor for
an all_reduce, a broadcast, a send or a recv; all ranks' parts together for an all_gather (the output) and a
reduce_scatter (the input). It is the same for every algorithm.

The formulas yield each collective with its size: a run's count is compared with their sum, the planner prices them one
by one on a network.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from math import prod
from typing import NamedTuple

from shoal.plans.accounting.partition import (
    GLOO_BUCKET_BYTES,
    NCCL_BUCKET_BYTES,
    PIECE_BYTES,
    cuts,
    divide,
    divide_into_buckets,
    gathers,
    pack,
    pieces,
)
from shoal.plans.layout import Layout

# The group of all ranks, and of those that hold the same of the model where they are not all.
WORLD, REPLICAS = "world", "replicas"
# A step's sums are 12 float64 numbers (loss total, weight, samples, microbatches with a gradient, 8 words of digest)
# and the weighted buffers. In a
# float32 bucket all but the loss take four numbers each. A rank's row about the next step has 15 numbers; an agreement
# on an error that nobody has is the word "null" and its length.
NUM_STEP_SUMS, NUM_LIMBS, NUM_FLAGS, ROW_NUMBERS = 12, 4, 2, 15
# With gradients or parameters cut over ranks: the order in which a rank has called its units, and its square.
NUM_ORDERS = 2
_NULL_BYTES, _FLOAT64 = 4, 8


class SizedCollective(NamedTuple):
    """A collective, send or recv of one rank in one group: `num_bytes` is the size of one, of which there are `count`.

    A group is the name of its axis, or WORLD or REPLICAS.
    """

    group: str
    kind: str
    num_bytes: int
    count: int = 1  # type: ignore[assignment]  # hides tuple.count, which nothing calls


@dataclass(frozen=True)
class Volume:
    """Messages and bytes of one kind of collective in one group, by one rank, in one step."""

    messages: int
    bytes: int


class Volumes(dict[tuple[str, str], Volume]):
    """Volumes by (group, kind of collective)."""

    @classmethod
    def of(cls, *sent: Iterable[SizedCollective]) -> Volumes:
        """Sums of these collectives."""
        volumes = cls()
        for one in chain(*sent):
            volumes.add(*one)
        return volumes

    def add(self, group: str, kind: str, num_bytes: int, messages: int = 1) -> None:
        """Counts so many messages of `num_bytes` each."""
        before = self.get((group, kind), Volume(0, 0))
        if messages:
            self[group, kind] = Volume(before.messages + messages, before.bytes + messages * num_bytes)

    def to_json(self) -> dict[str, dict[str, dict[str, int]]]:
        """{group: {kind: {"messages": ..., "bytes": ...}}}, sorted."""
        document: dict[str, dict[str, dict[str, int]]] = {}
        for (group, kind), volume in sorted(self.items()):
            document.setdefault(group, {})[kind] = {"messages": volume.messages, "bytes": volume.bytes}
        return document


@dataclass(frozen=True)
class Array:
    """Shape of a parameter, its bytes an element, and whether it lies in memory in one piece."""

    shape: tuple[int, ...]
    itemsize: int = 4
    contiguous: bool = True
    kind: str = "float32"
    trainable: bool = True

    @cached_property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the whole."""
        return self.numel * self.itemsize

    def padded_numel(self, parts: int) -> int:
        """Elements where dim 0 is rounded up to a multiple of `parts`, as fully_shard cuts it."""
        rows = self.shape[0]
        return self.numel if rows % parts == 0 else -(-rows // parts) * parts * prod(self.shape[1:])


@dataclass(frozen=True)
class Gradients:
    """Trainable parameters, in the model's order, and how their gradients are summed."""

    parameters: tuple[Array, ...]
    reduce_itemsize: int = 4
    on_cpu: bool = True
    buffer_numel: int = 0  # numbers of the buffers that the forward changes (batch statistics), which travel as sums
    row_numbers: int = ROW_NUMBERS  # what each rank says of the next step, if anything (0 in a Session)

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(p.numel for p in self.parameters)

    def carries_sums(self, layout: Layout) -> bool:
        """Whether the step's sums and rows travel in the last bucket: of float32, and summed over all ranks."""
        return self.reduce_itemsize == 4 and layout.shares_grains == 1

    @cached_property
    def groups(self) -> list[list[int]]:
        """The parameters of each flat buffer, in the order in which they are sent."""
        sizes = [p.numel * self.reduce_itemsize for p in self.parameters]
        return divide_into_buckets(sizes, GLOO_BUCKET_BYTES if self.on_cpu else NCCL_BUCKET_BYTES)

    @cached_property
    def _lengths(self) -> list[int]:
        return [sum(self.parameters[i].numel for i in group) for group in self.groups]

    def buckets(self, layout: Layout) -> list[int]:
        """Elements of each flat buffer, in the order in which they are sent; the last one carries the sums."""
        *others, last = self._lengths
        last += NUM_FLAGS + len(self.parameters)
        if self.carries_sums(layout) and layout.world_size > 1:
            last += 1 + NUM_LIMBS * (NUM_STEP_SUMS - 1) + self.buffer_numel
            last += layout.world_size * self.row_numbers
        return [*others, last]

    @property
    def num_sums(self) -> int:
        """Float64 numbers of a step's sums."""
        return NUM_STEP_SUMS + self.buffer_numel


# -------------------------------------------------------------------------------------------------------------- data


def bucket_sums(gradients: Gradients, layout: Layout, native: bool = True) -> Iterator[SizedCollective]:
    """All-reduces of fast data parallelism's buckets; `native` gathers small ones. See parallel/data/buckets.py."""
    ranks = layout.divides_grains
    group = WORLD if ranks == layout.world_size else REPLICAS
    *others, last = gradients.buckets(layout)
    # Of equal blocks most buckets are equal, and the planner prices each size once.
    for length, count in (*Counter(others).items(), (last, 1)) if ranks > 1 else ():
        num_bytes = length * gradients.reduce_itemsize
        if native and gathers(num_bytes, ranks, gradients.on_cpu):
            yield SizedCollective(group, "all_gather", ranks * num_bytes, count)
        else:
            yield SizedCollective(group, "all_reduce", num_bytes, count)


def data_parallel(gradients: Gradients, layout: Layout) -> Iterator[SizedCollective]:
    """A step of fast data parallelism between its agreement and its update, by native collectives."""
    yield from bucket_sums(gradients, layout)
    if layout.world_size > 1 and not gradients.carries_sums(layout):
        yield sums(gradients)


def sums(gradients: Gradients, num_used: int = 0) -> SizedCollective:
    """A step's sums and flags, and of `num_used` parameters whether there was a gradient: float64 over all ranks."""
    return SizedCollective(WORLD, "all_reduce", (gradients.num_sums + num_used + NUM_FLAGS) * _FLOAT64)


def norm() -> SizedCollective:
    """The gradient's norm where ranks hold different parts of it: one number over all ranks."""
    return SizedCollective(WORLD, "all_reduce", _FLOAT64)


def rows(world_size: int) -> SizedCollective:
    """All-gather of rows about the next step where the last bucket has none; a run's count ends before it."""
    return SizedCollective(WORLD, "all_gather", world_size * ROW_NUMBERS * _FLOAT64)


def exact_data_parallel(
    gradients: Gradients, held: Sequence[Sequence[int]], num_grains: int, rank: int
) -> Iterator[SizedCollective]:
    """A step of exact mode on `rank`, where rank r computes the grains `held[r]`; see collectives/fixed_tree.py.

    Two all_reduces (a row of sums for each grain; flags and which parameters were used), an all_to_all of the ranks'
    tree nodes cut by rank, and an all_gather of the summed cuts.
    """
    world_size = len(held)
    if world_size == 1:
        return
    yield SizedCollective(WORLD, "all_reduce", num_grains * (gradients.num_sums + 1) * _FLOAT64)
    yield SizedCollective(WORLD, "all_reduce", (NUM_FLAGS + len(gradients.parameters)) * _FLOAT64)
    length, itemsize = gradients.numel, gradients.reduce_itemsize
    places = cuts(length, world_size)
    own = places[rank + 1] - places[rank]
    longest = max(b - a for a, b in pairwise(places))
    nodes = [len(pieces(grains, num_grains)) for grains in held]
    yield SizedCollective(WORLD, "all_to_all", max(nodes[rank] * length, sum(nodes) * own) * itemsize)
    yield SizedCollective(WORLD, "all_gather", world_size * longest * itemsize)


def agreement(world_size: int) -> Iterator[SizedCollective]:
    """An agreement on an error that no rank has: a length, and the JSON text `null`."""
    if world_size > 1:
        yield SizedCollective(WORLD, "all_gather", world_size * _FLOAT64)
        yield SizedCollective(WORLD, "all_gather", world_size * _NULL_BYTES)


def owned(parameters: Sequence[Array], degree: int) -> list[list[Array]]:
    """Parameters whose optimizer state each place on the shard axis has, under ZeRO-1."""
    found: list[list[Array]] = [[] for _ in range(degree)]
    for parameter, owner in zip(parameters, divide([p.bytes for p in parameters], degree), strict=True):
        found[owner].append(parameter)
    return found


def sharded_optimizer(gradients: Gradients, layout: Layout) -> Iterator[SizedCollective]:
    """Collectives of ZeRO-1 beside the gradients: an agreement after the update, broadcasts of owned parameters."""
    if layout.shard == 1:
        return
    for mine in filter(None, owned(gradients.parameters, layout.shard)):
        sizes = [p.bytes for p in mine]
        alone = [p.contiguous and p.bytes >= PIECE_BYTES for p in mine]
        for members in pack(sizes, alone, [p.kind for p in mine]):
            yield SizedCollective("shard", "broadcast", sum(sizes[i] for i in members))
    yield from agreement(layout.world_size)


# --------------------------------------------------------------------------------------- gradients and parameters cut


@dataclass(frozen=True)
class Sharding:
    """Division of a model's units (each a call of fully_shard, the root last) over the shard axis.

    Units in `kept` (all of them at level `gradients`) are gathered once a microbatch, others again for the backward.
    `root_early`: elements of the root whose gradients the backward has before the other units' (a head, no embedding).
    """

    units: tuple[tuple[Array, ...], ...]
    degree: int
    replicas: int = 1
    microbatches: int = 1
    kept: frozenset[int] = frozenset()
    gather_itemsize: int = 4  # of the compute dtype
    reduce_itemsize: int = 4  # of the reduce dtype
    reduce_every: bool = True  # gradients are scattered after each microbatch, not only after the last
    root_early: int | None = None  # None: all of them
    resharded: bool = True  # after the backward, so that each microbatch gathers anew
    uses: tuple[int, ...] = ()  # in how many stages of a rank each unit is used, where that is not one
    halves: bool = False  # backwards come in two, and each gathers
    shard_group: str = "shard"
    replica_group: str = "data"
    rounds: bool = True  # dim 0 of each parameter up to a multiple of the degree; else its elements are divided evenly

    def padded_numel(self, parameter: Array) -> int:
        """Elements of a parameter gathered, with what rounding adds."""
        return parameter.padded_numel(self.degree) if self.rounds else parameter.numel

    def each(self, measured: Callable[[tuple[Array, ...]], int]) -> list[int]:
        """A number of each unit; equal blocks share their arrays and are measured once."""
        known: dict[int, int] = {}
        for unit in self.units:
            if id(unit) not in known:
                known[id(unit)] = measured(unit)
        return [known[id(unit)] for unit in self.units]

    @cached_property
    def gathered_bytes(self) -> list[int]:
        """Bytes of each unit's parameters, gathered, with what rounding dim 0 of each parameter adds."""
        return self.each(self.bytes_of)

    def bytes_of(self, unit: tuple[Array, ...]) -> int:
        """Bytes of one unit's parameters, gathered."""
        return sum(map(self.padded_numel, unit)) * self.gather_itemsize

    @cached_property
    def _trained(self) -> list[int]:
        """Elements of each unit that are trained, with what rounding adds."""
        return self.each(self.trained_of)

    def trained_of(self, unit: tuple[Array, ...]) -> int:
        """Elements of one unit that are trained, with what rounding adds."""
        return sum(self.padded_numel(p) for p in unit if p.trainable)

    @cached_property
    def scattered_bytes(self) -> list[int]:
        """Bytes of each unit's gradients before they are scattered, with what rounding adds."""
        return [numel * self.reduce_itemsize for numel in self._trained]

    def gather(self, unit: int) -> SizedCollective:
        """All-gather of a unit's parameters over the shard axis."""
        return SizedCollective(self.shard_group, "all_gather", self.gathered_bytes[unit])

    def scatter(self, unit: int) -> SizedCollective:
        """Reduce-scatter of a unit's gradients over the shard axis."""
        return SizedCollective(self.shard_group, "reduce_scatter", self.scattered_bytes[unit])

    def replica_sum(self, unit: int) -> SizedCollective:
        """All-reduce of a unit's scattered gradients over the replicas."""
        return SizedCollective(self.replica_group, "all_reduce", self.part_of(self._trained[unit]))

    def part_of(self, trained: int) -> int:
        """Bytes of a rank's part of so many elements' gradients."""
        return trained // self.degree * self.reduce_itemsize


def fully_sharded(sharding: Sharding) -> Iterator[SizedCollective]:
    """A step of ZeRO-2 or ZeRO-3 as fully_shard does it, hybrid where there are replicas.

    A unit's parameters travel in one all_gather, its gradients in one reduce_scatter, and the scattered sum in one
    all_reduce over the replicas.
    """
    for number, unit in enumerate(sharding.units):
        if not unit:
            continue
        computed = sharding.microbatches * (sharding.uses[number] if sharding.uses else 1)
        reductions = (computed if sharding.reduce_every else 1) if any(p.trainable for p in unit) else 0
        if sharding.degree > 1:
            gathered = (computed if sharding.resharded else 1) if number in sharding.kept else computed * 2
            if sharding.halves and number not in sharding.kept:
                gathered += computed
            yield sharding.gather(number)._replace(count=gathered)
            yield sharding.scatter(number)._replace(count=reductions)
        if sharding.replicas > 1:
            yield sharding.replica_sum(number)._replace(count=reductions)
