"""Partition of tensors, gradients, optimizer states and sums over parts, buckets and ranks.

The strategies divide tensors by these rules, and the formulas predict with them. Integers only.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
    """Return True if a bucket of `num_bytes` is gathered and summed by each rank instead of all-reduced."""
    return on_cpu and num_bytes <= GATHER_BYTES and world_size <= GATHER_RANKS


def divide(sizes: Sequence[int], num_owners: int) -> list[int]:
    """Return an owner for each size, the largest first to the least loaded. Within 4/3 of the best (Graham 1969)."""
    owners = [0] * len(sizes)
    loads = [(0, owner) for owner in range(min(num_owners, len(sizes)))]  # a heap
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        load, owners[i] = loads[0]
        heapq.heapreplace(loads, (load + sizes[i], owners[i]))
    return owners


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
