"""Communication volume of a rank in a step: messages and bytes of every collective, from shapes and degrees alone.

Bytes are the `size` of nccl-tests (its doc/PERFORMANCE.md): the larger of a rank's two buffers. That is the tensor for
an all_reduce, a broadcast, a send or a recv; all ranks' parts together for an all_gather (the output) and a
reduce_scatter (the input). It is the same for every algorithm.

The formulas yield each collective with its size. A run compares its count with their sum, and the planner estimates
the time of each one on a network.
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
from shoal.plans.plan import Layout

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
        rows = self.shape[0]
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


def owned(parameters: Sequence[Array], degree: int) -> list[list[Array]]:
    """Return, for each index on the shard axis, the parameters whose optimizer state it owns under ZeRO-1."""
    of_owner: list[list[Array]] = [[] for _ in range(degree)]
    for parameter, owner in zip(parameters, divide([p.bytes for p in parameters], degree), strict=True):
        of_owner[owner].append(parameter)
    return of_owner


def sharded_optimizer(gradients: Gradients, layout: Layout) -> Iterator[SizedCollective]:
    """Yield ZeRO-1's additional collectives: broadcasts of owned parameters, and an agreement after the update."""
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
