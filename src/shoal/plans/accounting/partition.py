"""Partition of tensors, gradients, optimizer states and sums over parts, buckets and ranks.

The strategies divide tensors by them, the formulas predict by them. Integers only.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# As DDP a small bucket first, so that the first all-reduce starts early, and unlike DDP a small one last: it is all
# that the backward cannot hide. Between them 4 MiB over Gloo; NCCL needs DDP's 25 for its bandwidth.
END_BUCKET_BYTES, GLOO_BUCKET_BYTES, NCCL_BUCKET_BYTES = 1 << 20, 4 << 20, 25 << 20
# Below this, and on few ranks, Gloo gathers and each rank adds: one exchange where an all-reduce takes two. 0.5 MB
# between two busy processes took 1.7 ms instead of 2 to 4; 13 MB took 21 instead of 12.
GATHER_BYTES, GATHER_RANKS = 2 << 20, 4
# Smaller parameters of one owner travel together, up to this many bytes: a broadcast costs as much as 0.1 MB of it.
PIECE_BYTES = 1 << 20
# Elements that stay together where a parameter's update is divided: a row of the gradient's norm, and whole vectors.
PIECE_ROW = 256
# An update is divided further where a rank has so much more than its share of the bytes; no run is shorter than this.
_UNEVEN, _LEAST_RUN = 0.05, 1 << 15
_ROW_BYTES = PIECE_ROW * 8


Range = tuple[int, int]


def cuts(length: int, parts: int) -> list[int]:
    """Even division: the first index of each of so many parts of a length, and the end of the last."""
    return [length * part // parts for part in range(parts + 1)]


def shared_part(num_bytes: int, parts: int, place: int) -> int:
    """Of memory that so many ranks share, and that counts once, what counts on one of them."""
    bounds = cuts(num_bytes, parts)
    return bounds[place + 1] - bounds[place]


def divide_into_buckets(sizes: Sequence[int], middle_bytes: int) -> list[list[int]]:
    """Indices of parameters of these sizes in bytes, last first: the order in which the backward comes to them.

    A bucket closes once it has reached its size: END_BUCKET_BYTES for the first and the last, else `middle_bytes`.
    """
    order = list(reversed(range(len(sizes))))
    cut, tail = len(order), 0
    while cut and tail < END_BUCKET_BYTES:  # the last bucket, from its end
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
    """Whether a bucket of so many bytes is gathered and added up by each rank, instead of all-reduced."""
    return on_cpu and num_bytes <= GATHER_BYTES and world_size <= GATHER_RANKS


def divide(sizes: Sequence[int], num_owners: int) -> list[int]:
    """An owner for each size: the largest first, each to whom has least. Within 4/3 of the best (Graham 1969)."""
    owners = [0] * len(sizes)
    loads = [(0, owner) for owner in range(min(num_owners, len(sizes)))]  # a heap
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        load, owners[i] = loads[0]
        heapq.heapreplace(loads, (load + sizes[i], owners[i]))
    return owners


def level(
    sizes: Sequence[int], owners: Sequence[int], num_owners: int, divisible: Sequence[bool]
) -> dict[int, dict[int, Range]]:
    """Bytes [begin, end) of a size by owner, for those sizes of which an owner with too much gives the others a part.

    The largest first; each gives as much as its owner has more than its share of all, and keeps a part. The other
    sizes stay whole.
    """
    loads = [0] * num_owners
    for size, owner in zip(sizes, owners, strict=True):
        loads[owner] += size
    fair = -(-sum(sizes) // num_owners)
    found: dict[int, dict[int, Range]] = {}
    for i in sorted((i for i, may in enumerate(divisible) if may), key=lambda i: (-sizes[i], i)):
        spare = min(loads[owners[i]] - fair, sizes[i] - _LEAST_RUN)
        if spare <= _UNEVEN * fair:
            continue
        runs: dict[int, Range] = {}
        begin = 0
        for taker in sorted(range(num_owners), key=lambda owner: (loads[owner], owner)):
            taken = min(spare - begin, fair - loads[taker]) // _ROW_BYTES * _ROW_BYTES
            if taken >= _LEAST_RUN:
                runs[taker] = begin, begin + taken
                begin += taken
                loads[taker] += taken
        if begin:
            loads[owners[i]] -= begin
            found[i] = {**runs, owners[i]: (begin, sizes[i])}
    return found


def pack(sizes: Sequence[int], alone: Sequence[bool], kinds: Sequence[object]) -> list[list[int]]:
    """Indices of one owner's parameters, by the message in which they travel, in the order of the messages.

    Neighbours of one kind (dtype) go together up to PIECE_BYTES; those that are `alone` go before the ones waiting.
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
    """The two children of the node over positions [lo, hi) of the fixed tree; hi - lo is at least 2."""
    middle = lo + (1 << ((hi - lo - 1).bit_length() - 1))
    return (lo, middle), (middle, hi)


def pieces(held: Iterable[int], num_grains: int) -> list[Range]:
    """The largest nodes of the tree over [0, num_grains) whose every position is held, in order."""
    own = set(held)

    def visit(lo: int, hi: int) -> list[Range]:
        if own.issuperset(range(lo, hi)):
            return [(lo, hi)]
        if hi - lo == 1 or own.isdisjoint(range(lo, hi)):
            return []
        left, right = halves(lo, hi)
        return visit(*left) + visit(*right)

    return visit(0, num_grains)


# ------------------------------------------------------------------------------------------------------------ sequences

# Code that looks at the length of a sequence takes one position for the next token of a text that is being written.
FEWEST_POSITIONS = 2


def num_positions(length: int, degree: int) -> int:
    """The positions of a sequence on each of `degree` ranks; those behind its end are copies of its last."""
    return max(-(-length // degree), FEWEST_POSITIONS)


@dataclass(frozen=True)
class Heads:
    """Partition of attention heads over `degree` ranks: rank i has those in `bounds(i)`, and reads `read(i)`."""

    num_query: int
    num_key: int
    degree: int

    def bounds(self, place: int) -> tuple[int, int]:
        """The query heads [start, stop) of a rank."""
        return self.num_query * place // self.degree, self.num_query * (place + 1) // self.degree

    def read(self, place: int) -> tuple[int, int]:
        """The key and value heads [start, stop) that these attend to; ranks may have some in common."""
        start, stop = self.bounds(place)
        group = self.num_query // self.num_key
        return start // group, -(-stop // group)

    def repeats(self, place: int) -> list[int] | None:
        """For each query head of a rank the place of its key head among those that are read; None: one for one."""
        (start, stop), (first, last) = self.bounds(place), self.read(place)
        group = self.num_query // self.num_key
        return None if stop - start == last - first else [head // group - first for head in range(start, stop)]
