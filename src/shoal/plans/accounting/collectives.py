"""Communication volume of a rank in a step: messages and bytes of every collective, from shapes and degrees alone.

Bytes are the `size` of nccl-tests (its doc/PERFORMANCE.md): the larger of a rank's two buffers. That is the tensor for
an all_reduce, a broadcast, a send or a recv; all ranks' parts together for an all_gather (the output) and a
reduce_scatter (the input). It is the same for every algorithm; `wire_bytes` is what a ring then moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

from shoal.plans.accounting.partition import (
    GLOO_BUCKET_BYTES,
    NCCL_BUCKET_BYTES,
    PIECE_BYTES,
    divide,
    divide_into_buckets,
    gathers,
    pack,
    pieces,
)
from shoal.plans.layout import Layout

# The group of all ranks, and of those that hold the same of the model where they are not all.
WORLD, REPLICAS = "world", "replicas"
# A step's sums are 11 float64 numbers (loss total, weight, samples, 8 words of digest) and the weighted buffers. In a
# float32 bucket all but the loss take four numbers each. A rank's row about the next step has 14 numbers; an agreement
# on an error that nobody has is the word "null" and its length.
NUM_STEP_SUMS, NUM_LIMBS, NUM_FLAGS, ROW_NUMBERS = 11, 4, 2, 14
_NULL_BYTES, _FLOAT64 = 4, 8


@dataclass(frozen=True)
class Volume:
    """Messages and bytes of one kind of collective in one group, by one rank, in one step."""

    messages: int
    bytes: int


class Volumes(dict[tuple[str, str], Volume]):
    """Volumes by (group, kind of collective); a group is the name of its axis, or `world`."""

    def add(self, group: str, kind: str, num_bytes: int, messages: int = 1) -> None:
        """Counts so many messages of `num_bytes` each."""
        before = self.get((group, kind), Volume(0, 0))
        if messages:
            self[group, kind] = Volume(before.messages + messages, before.bytes + messages * num_bytes)

    def plus(self, *others: Mapping[tuple[str, str], Volume]) -> Volumes:
        """The sum of these and the others."""
        total = Volumes(self)
        for (group, kind), volume in (item for other in others for item in other.items()):
            before = total.get((group, kind), Volume(0, 0))
            total[group, kind] = Volume(before.messages + volume.messages, before.bytes + volume.bytes)
        return total

    def to_json(self) -> dict[str, dict[str, dict[str, int]]]:
        """{group: {kind: {"messages": ..., "bytes": ...}}}, sorted."""
        document: dict[str, dict[str, dict[str, int]]] = {}
        for (group, kind), volume in sorted(self.items()):
            document.setdefault(group, {})[kind] = {"messages": volume.messages, "bytes": volume.bytes}
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Volumes:
        """From `to_json`."""
        return cls(
            {(g, k): Volume(v["messages"], v["bytes"]) for g, kinds in document.items() for k, v in kinds.items()}
        )


@dataclass(frozen=True)
class Array:
    """Shape of a parameter, its bytes an element, and whether it lies in memory in one piece."""

    shape: tuple[int, ...]
    itemsize: int = 4
    contiguous: bool = True
    kind: str = "float32"

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the whole."""
        return self.numel * self.itemsize

    def padded_numel(self, parts: int) -> int:
        """Elements where dim 0 is rounded up to a multiple of `parts`, as fully_shard cuts it."""
        return -(-self.shape[0] // parts) * parts * prod(self.shape[1:])


@dataclass(frozen=True)
class Gradients:
    """Trainable parameters, in the model's order, and how their gradients are summed.

    `buffer_numel`: elements of the buffers that the forward changes (batch statistics), which travel as sums.
    `row_numbers`: what each rank says of the next step, if anything (0 in a Session).
    """

    parameters: tuple[Array, ...]
    reduce_itemsize: int = 4
    on_cpu: bool = True
    buffer_numel: int = 0
    row_numbers: int = ROW_NUMBERS

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(p.numel for p in self.parameters)

    def carries_sums(self, layout: Layout) -> bool:
        """Whether the step's sums and rows travel in the last bucket: of float32, and summed over all ranks."""
        return self.reduce_itemsize == 4 and layout.shares_grains == 1

    def groups(self) -> list[list[int]]:
        """The parameters of each flat buffer, in the order in which they are sent."""
        sizes = [p.numel * self.reduce_itemsize for p in self.parameters]
        return divide_into_buckets(sizes, GLOO_BUCKET_BYTES if self.on_cpu else NCCL_BUCKET_BYTES)

    def buckets(self, layout: Layout) -> list[int]:
        """Elements of each flat buffer, in the order in which they are sent; the last one carries the sums."""
        lengths = [sum(self.parameters[i].numel for i in group) for group in self.groups()]
        lengths[-1] += NUM_FLAGS + len(self.parameters)
        if self.carries_sums(layout) and layout.world_size > 1:
            lengths[-1] += 1 + NUM_LIMBS * (NUM_STEP_SUMS - 1) + self.buffer_numel
            lengths[-1] += layout.world_size * self.row_numbers
        return lengths

    @property
    def num_sums(self) -> int:
        """Float64 numbers of a step's sums."""
        return NUM_STEP_SUMS + self.buffer_numel


def wire_bytes(kind: str, num_bytes: int, group_size: int) -> int:
    """Bytes that a ring algorithm makes each rank send for a collective of that size (nccl-tests' bus bandwidth)."""
    factors = {"all_reduce": 2 * (group_size - 1), "broadcast": group_size, "send": group_size, "recv": group_size}
    return num_bytes * factors.get(kind, group_size - 1) // group_size


# -------------------------------------------------------------------------------------------------------------- data


def data_parallel(gradients: Gradients, layout: Layout) -> Volumes:
    """A step of fast data parallelism: a bucket is one all_reduce, or an all_gather where gathering is cheaper.

    What a step sends between its agreement and its update, by native collectives; see parallel/data/buckets.py.
    """
    volumes, ranks = Volumes(), layout.divides_grains
    if layout.world_size == 1:
        return volumes
    group = WORLD if ranks == layout.world_size else REPLICAS
    for length in gradients.buckets(layout) if ranks > 1 else ():
        num_bytes = length * gradients.reduce_itemsize
        if gathers(num_bytes, ranks, gradients.on_cpu):
            volumes.add(group, "all_gather", ranks * num_bytes)
        else:
            volumes.add(group, "all_reduce", num_bytes)
    if not gradients.carries_sums(layout):
        return volumes.plus(sums(gradients))
    return volumes


def sums(gradients: Gradients, num_used: int = 0) -> Volumes:
    """A step's sums and flags by themselves: one all_reduce of float64 numbers over all ranks.

    `num_used`: parameters of which each rank says whether it had a gradient.
    """
    volumes = Volumes()
    volumes.add(WORLD, "all_reduce", (gradients.num_sums + num_used + NUM_FLAGS) * _FLOAT64)
    return volumes


def norm() -> Volumes:
    """The gradient's norm where ranks hold different parts of it: one number over all ranks."""
    volumes = Volumes()
    volumes.add(WORLD, "all_reduce", _FLOAT64)
    return volumes


def exact_data_parallel(gradients: Gradients, held: Sequence[Sequence[int]], num_grains: int, rank: int) -> Volumes:
    """A step of exact mode on `rank`, where rank r computes the grains `held[r]`; see collectives/exact/fixed_tree.py.

    Two all_reduces (a row of sums for each grain; flags and which parameters were used), an all_to_all of the ranks'
    tree nodes cut by rank, and an all_gather of the summed cuts.
    """
    volumes, world_size = Volumes(), len(held)
    if world_size == 1:
        return volumes
    volumes.add(WORLD, "all_reduce", num_grains * (gradients.num_sums + 1) * _FLOAT64)
    volumes.add(WORLD, "all_reduce", (NUM_FLAGS + len(gradients.parameters)) * _FLOAT64)
    length, itemsize = gradients.numel, gradients.reduce_itemsize
    cuts = [length * part // world_size for part in range(world_size + 1)]
    own = cuts[rank + 1] - cuts[rank]
    longest = max(b - a for a, b in pairwise(cuts))
    nodes = [len(pieces(grains, num_grains)) for grains in held]
    volumes.add(WORLD, "all_to_all", max(nodes[rank] * length, sum(nodes) * own) * itemsize)
    volumes.add(WORLD, "all_gather", world_size * longest * itemsize)
    return volumes


def agreement(world_size: int, messages: int = 1) -> Volumes:
    """An agreement on an error that no rank has: a length, and the JSON text `null`."""
    volumes = Volumes()
    if world_size > 1:
        volumes.add(WORLD, "all_gather", world_size * _FLOAT64, messages)
        volumes.add(WORLD, "all_gather", world_size * _NULL_BYTES, messages)
    return volumes


def owners(parameters: Sequence[Array], degree: int) -> list[int]:
    """Which place on the shard axis owns each parameter's optimizer state, under ZeRO-1."""
    return divide([p.bytes for p in parameters], degree)


def sharded_optimizer(gradients: Gradients, layout: Layout) -> Volumes:
    """Volumes of ZeRO-1 beside the gradients: an agreement after the update, broadcasts of owned parameters."""
    volumes = Volumes()
    if layout.shard == 1:
        return volumes
    owned = owners(gradients.parameters, layout.shard)
    for owner in range(layout.shard):
        mine = [p for p, of in zip(gradients.parameters, owned, strict=True) if of == owner]
        sizes = [p.bytes for p in mine]
        alone = [p.contiguous and p.bytes >= PIECE_BYTES for p in mine]
        for members in pack(sizes, alone, [p.kind for p in mine]):
            volumes.add("shard", "broadcast", sum(sizes[i] for i in members))
    return volumes.plus(agreement(layout.world_size))


# --------------------------------------------------------------------------------------- gradients and parameters cut


@dataclass(frozen=True)
class Sharding:
    """Division of a model's units (each a call of fully_shard, the root last) over the shard axis.

    `gather_itemsize` and `reduce_itemsize` are of the compute and the reduce dtype. Units in `kept` (all of them at
    level `gradients`) are gathered once a microbatch, the others again for the backward.
    `reduce_every`: gradients are scattered after each microbatch, not only after the last. `root_early`: elements of
    the root whose gradients the backward has before the other units' (a head, no embedding); None for all of them.
    """

    units: tuple[tuple[Array, ...], ...]
    degree: int
    replicas: int = 1
    microbatches: int = 1
    kept: frozenset[int] = frozenset()
    gather_itemsize: int = 4
    reduce_itemsize: int = 4
    reduce_every: bool = True
    root_early: int | None = None
    resharded: bool = True  # after the backward, so that each microbatch gathers anew
    uses: tuple[int, ...] = ()  # in how many stages of a rank each unit is used, where that is not one
    halves: bool = False  # backwards come in two, and each gathers
    shard_group: str = "shard"
    replica_group: str = "data"

    def padded_numel(self, unit: int) -> int:
        """Elements of a unit gathered, with what rounding dim 0 of each parameter adds."""
        return sum(p.padded_numel(self.degree) for p in self.units[unit])


def fully_sharded(sharding: Sharding) -> Volumes:
    """A step of ZeRO-2 or ZeRO-3 as fully_shard does it, hybrid where there are replicas.

    A unit's parameters travel in one all_gather, its gradients in one reduce_scatter, and the scattered sum in one
    all_reduce over the replicas.
    """
    volumes = Volumes()
    for number, unit in enumerate(sharding.units):
        if not unit:
            continue
        numel = sharding.padded_numel(number)
        computed = sharding.microbatches * (sharding.uses[number] if sharding.uses else 1)
        reductions = computed if sharding.reduce_every else 1
        if sharding.degree > 1:
            gathered = (computed if sharding.resharded else 1) if number in sharding.kept else computed * 2
            if sharding.halves and number not in sharding.kept:
                gathered += computed
            volumes.add(sharding.shard_group, "all_gather", numel * sharding.gather_itemsize, gathered)
            volumes.add(sharding.shard_group, "reduce_scatter", numel * sharding.reduce_itemsize, reductions)
        if sharding.replicas > 1:
            part = numel // sharding.degree * sharding.reduce_itemsize
            volumes.add(sharding.replica_group, "all_reduce", part, reductions)
    return volumes


# ------------------------------------------------------------------------------------------ tensor, pipeline, context


@dataclass(frozen=True)
class LayerPair:
    """A column-parallel layer and its row-parallel layer; bytes are of one microbatch's activation.

    `input_bytes` enters the pair whole on every rank (its gradient is summed in the backward, where it needs one),
    `output_bytes` leaves it as a partial sum.
    """

    input_bytes: int
    output_bytes: int
    input_needs_gradient: bool = True


@dataclass(frozen=True)
class Positions:
    """Sequences of `length`, divided over `degree` ranks in parts of one size; see Span in parallel/sequence."""

    length: int
    degree: int

    def padded(self, num_bytes: int) -> int:
        """Bytes of all ranks' parts of what has `num_bytes` in all."""
        return num_bytes // self.length * max(-(-self.length // self.degree), 2) * self.degree


def tensor_parallel(
    pairs: Iterable[LayerPair],
    gathered_bytes: Iterable[int],
    microbatches: int,
    recomputed: bool = False,
    positions: Positions | None = None,
) -> Volumes:
    """Megatron-style tensor parallelism: per pair an all_reduce in the forward and one in the backward.

    `gathered_bytes` are outputs of column-parallel layers with no row-parallel partner: an all_gather in the forward,
    and in the backward an all_reduce of their input counted by the caller as a Pair of no output.
    Recomputation repeats the forward's. With `positions` ranks have parts of the sequences between the pairs: the
    input is gathered and the output scattered as it is summed, the other way in the backward.
    """
    volumes, forwards = Volumes(), microbatches * (2 if recomputed else 1)
    for pair in pairs:
        if positions is not None:
            into, out = positions.padded(pair.input_bytes), positions.padded(pair.output_bytes)
            volumes.add("tensor", "all_gather", into, forwards)
            volumes.add("tensor", "reduce_scatter", out, forwards)
            volumes.add("tensor", "all_gather", out, microbatches)
            volumes.add("tensor", "reduce_scatter", into, microbatches if pair.input_needs_gradient else 0)
            continue
        if pair.output_bytes:
            volumes.add("tensor", "all_reduce", pair.output_bytes, forwards)
        if pair.input_needs_gradient:
            volumes.add("tensor", "all_reduce", pair.input_bytes, microbatches)
    for num_bytes in gathered_bytes:
        volumes.add("tensor", "all_gather", num_bytes, forwards)
    return volumes


def stream(hidden_bytes: int, positions: Positions, microbatches: int) -> Volumes:
    """The ends of blocks that hand each other parts of sequences: gathered behind the last, and back before the first.

    Before the first the hidden state is whole on every rank, and a part of it is taken without sending anything.
    """
    volumes = Volumes()
    volumes.add("tensor", "all_gather", positions.padded(hidden_bytes), 2 * microbatches)
    return volumes


def sharded_loss(num_targets: int, microbatches: int, smoothed: bool = False, itemsize: int = 4) -> Volumes:
    """The cross entropy of logits that stay cut: the largest of each row, then its sums; nothing in the backward."""
    volumes = Volumes()
    for numbers in (1, 3 if smoothed else 2):
        volumes.add("tensor", "all_reduce", numbers * num_targets * itemsize, microbatches)
    return volumes


def pipeline(cut_bytes: Sequence[int], stages: Sequence[int], microbatches: int, num_tensors: int = 1) -> Volumes:
    """A step of a pipeline on the rank of `stages`, where `cut_bytes[s]` crosses from stage s to s + 1 per microbatch.

    An activation goes forward and a gradient of its size comes back; between stages of one rank nothing is sent.
    `num_tensors` cross each cut.
    """
    volumes, mine = Volumes(), set(stages)
    for cut, num_bytes in enumerate(cut_bytes):
        if (cut in mine) != (cut + 1 in mine):  # one send and one receive, in either direction
            for kind in ("send", "recv"):
                volumes.add("pipeline", kind, num_bytes // num_tensors, microbatches * num_tensors)
    return volumes


def context_parallel(heads_bytes: Iterable[int], microbatches: int, recomputed: bool = False) -> Volumes:
    """Ulysses: each exchange of a layer (q, k, v, output; local bytes) is an all_to_all, and one in the backward."""
    volumes = Volumes()
    for num_bytes in heads_bytes:
        volumes.add("context", "all_to_all", num_bytes, microbatches * (3 if recomputed else 2))
    return volumes
