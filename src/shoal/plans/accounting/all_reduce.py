"""Communication volume of all-reduce algorithms: partners, messages and bytes of each rank. Integers only.

A call of a message-passing algorithm begins with one message of HEADER_BYTES, by which neighbours compare what they
call. What follows is counted here exactly, also where the ranks' parts are uneven.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shoal.plans.accounting.collectives import WORLD, Gradients, SizedCollective
from shoal.plans.accounting.collectives import data_parallel as native
from shoal.plans.accounting.collectives import sums as step_sums
from shoal.plans.layout import Layout

HEADER_BYTES = 64
# A tree passes pieces of this size on, so that its levels work at the same time.
SEGMENT_BYTES = 1 << 20
# Up to here ranks exchange whole vectors: half the messages of halving and doubling.
DOUBLING_BYTES = 16 << 10


def cuts(length: int, parts: int) -> list[int]:
    """First index of each of so many parts of a vector, and the end of the last."""
    return [length * part // parts for part in range(parts + 1)]


def messages(algorithm: str, numel: int, itemsize: int, rank: int, world_size: int) -> Iterator[SizedCollective]:
    """Messages that `rank` sends and receives in an all-reduce of all ranks, header included.

    It receives as much as it sends, but around a ring what the rank before it sends; an empty message is not sent.
    Raises: KeyError for an algorithm that sends no messages.
    """
    if world_size == 1:
        return
    formula = {"ring": _ring, "tree": _tree, "recursive_doubling": _recursive_doubling}[algorithm]
    before = (rank - 1) % world_size if algorithm == "ring" else rank
    for kind, sender in (("send", rank), ("recv", before)):
        yield SizedCollective(WORLD, kind, HEADER_BYTES)
        for length in filter(None, formula(numel, itemsize, sender, world_size)):
            yield SizedCollective(WORLD, kind, length * itemsize)


def data_parallel(gradients: Gradients, layout: Layout, algorithm: str, rank: int) -> Iterator[SizedCollective] | None:
    """A step of fast data parallelism of all ranks on `rank`; None where it depends on who is on which host.

    Through shared memory no message is sent at all.
    """
    if algorithm == "native" or layout.world_size == 1:
        return native(gradients, layout)
    return None if algorithm == "hierarchical" else _messages(gradients, layout, algorithm, rank)


def _messages(gradients: Gradients, layout: Layout, algorithm: str, rank: int) -> Iterator[SizedCollective]:
    for length in gradients.buckets(layout) if algorithm != "shared_memory" else ():
        yield from messages(algorithm, length, gradients.reduce_itemsize, rank, layout.world_size)
    if not gradients.carries_sums(layout):
        yield step_sums(gradients)


# -------------------------------------------------------------------------------------------------------------- ring


def _ring(numel: int, itemsize: int, rank: int, world_size: int) -> list[int]:
    """2 (P - 1) messages, 2 N (P - 1) / P bytes: all parts but the own, then all but the successor's.

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
    """Position of a rank in one of two binary trees: a rank with children in one of them is a leaf in the other.

    Positions 1..P in order, the height of one is its number of trailing zeros; the second tree is the first moved on by
    one rank. Sanders, Speck and Träff, Two-tree algorithms for full bandwidth broadcast, reduction and scan, 2009.
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
    """Lengths of the pieces in which a tree's half of a vector travels."""
    most = SEGMENT_BYTES // itemsize
    return [min(most, numel - start) for start in range(0, numel, most)]


def _tree(numel: int, itemsize: int, rank: int, world_size: int) -> list[int]:
    """Each half once to the parent and once to each child: at most 2 N bytes a rank, about 2 log2 P messages deep."""
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
    """One step of recursive halving: the partner, and the ranges that this rank sends and keeps."""

    partner: int
    given: tuple[int, int]
    kept: tuple[int, int]


@dataclass(frozen=True)
class Halving:
    """Steps of one rank in recursive halving and doubling.

    Beyond a power of two the first ranks pair up: `folds_into` does the work of this one and gives it the result;
    `folded` is whose work this rank does.
    """

    folds_into: int | None
    folded: int | None
    exchanges: tuple[HalvingStep, ...]


def halving(numel: int, rank: int, world_size: int) -> Halving:
    """The exchanges of a rank, farthest partner first; doubling goes the same way back.

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
        kept, given = (upper, lower) if own & distance else (lower, upper)
        steps.append(HalvingStep(actual(own ^ distance), given, kept))
        (low, high), distance = kept, distance // 2
    return Halving(None, folded, tuple(steps))


def doubles(numel: int, itemsize: int) -> bool:
    """Whether whole vectors are exchanged."""
    return numel * itemsize <= DOUBLING_BYTES


def _recursive_doubling(numel: int, itemsize: int, rank: int, world_size: int) -> list[int]:
    """2 log2 P messages and 2 N (P - 1) / P bytes for powers of two; log2 P messages of N where N is small.

    Else the first ranks send N once: to who does their work, or back to whose work they did.
    """
    way = halving(numel, rank, world_size)
    lengths = [numel] if way.folds_into is not None or way.folded is not None else []
    for step in way.exchanges:
        if doubles(numel, itemsize):
            lengths.append(numel)
        else:
            lengths += [step.given[1] - step.given[0], step.kept[1] - step.kept[0]]
    return lengths
