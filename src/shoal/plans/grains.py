"""Grains: the fixed division of a global batch, and the share of each rank. Integers only.

Only `share` knows the number of ranks, and no result of this module enters the maths.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

# 1, 2, 4 and 8 workers share this number evenly, 3, 5, 6 and 7 unevenly.
FEW_GRAINS = 8
# Activations of a grain, the smallest microbatch: an eighth of the memory of common small devices (8 GiB), which leaves
# the rest to parameters, gradients and optimizer state.
MOST_BYTES_OF_A_GRAIN = 2**30


@dataclass(frozen=True, slots=True)
class Grain:
    """Samples [start, start + size) of a step's global batch; `index` is the grain's number in 0..G-1."""

    index: int
    start: int
    size: int


def grain_size(global_batch: int, num_grains: int) -> int:
    """Return the samples in a full grain: the global batch over the grains, rounded up."""
    return -(-global_batch // num_grains)


def default_grains(global_batch: int, sample_bytes: float) -> int:
    """Return the default number of grains for a job whose samples have `sample_bytes` of activations.

    The default is 8 if those grains are light. Otherwise it is the fewest light grains whose size divides the batch, at
    least one sample each. A heavier sample never gives fewer grains.
    """
    fitting = MOST_BYTES_OF_A_GRAIN / max(sample_bytes, 1.0)
    if grain_size(global_batch, FEW_GRAINS) <= max(1.0, fitting):
        return FEW_GRAINS
    size = next(size for size in range(max(1, int(fitting)), 0, -1) if global_batch % size == 0)
    return global_batch // size


def grains_of_statistics(global_batch: int, num_samples: int) -> int:
    """Return the default number of grains for a job with batch statistics. `num_samples`: those of an epoch.

    The default is 8, unless the last grain of a full step or of an epoch's last one then has one sample: one value has
    no variance. Then it is the most grains without such a step, whose last grain in a full step is at least half full.
    """

    def lone(size: int) -> bool:
        return size > 1 and 1 in (global_batch % size, num_samples % global_batch % size)

    def half_full(size: int) -> bool:
        return 2 * ((global_batch - 1) % size + 1) >= size

    sizes = {count: grain_size(global_batch, count) for count in range(FEW_GRAINS, 0, -1)}
    if not lone(sizes[FEW_GRAINS]):
        return FEW_GRAINS
    fitting = (count for count, size in sizes.items() if size > 1 and half_full(size) and not lone(size))
    return next(fitting, FEW_GRAINS)


def divide(num_samples: int, global_batch: int, num_grains: int) -> list[Grain]:
    """Return the nonempty grains of a step with `num_samples` <= `global_batch`, in order; the last may be short.

    A short step has fewer grains, not smaller ones: the size of a grain never depends on the remaining samples.
    """
    return list(_divided(num_samples, grain_size(global_batch, num_grains)))


@functools.lru_cache(maxsize=8)  # nearly all steps have the same number of samples
def _divided(num_samples: int, size: int) -> tuple[Grain, ...]:
    return tuple(Grain(i, start, min(size, num_samples - start)) for i, start in enumerate(range(0, num_samples, size)))


@functools.lru_cache(maxsize=256)  # a rank asks for its share in each step
def share_sizes(count: int, num_parts: int, shares: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return the numbers of grains, of `count`, that the data ranks compute.

    `shares`: the ranks' speeds, as whole numbers; empty if they are equal. Equal ranks get numbers that differ by at
    most one. Otherwise the largest quotient of grains and speed, which is the step's time, is as small as possible.
    A plan with another number of speeds than ranks is refused, and its ranks count as equal here.
    """
    if len(shares) != num_parts:
        return tuple((part + 1) * count // num_parts - part * count // num_parts for part in range(num_parts))
    sizes = [count * one // sum(shares) for one in shares]
    for _ in range(count - sum(sizes)):
        first = min(range(num_parts), key=lambda part: (sizes[part] + 1) / shares[part])
        sizes[first] += 1
    return tuple(sizes)


# The excess of a step over the ideal shares' step from which a note appears.
UNEVEN = 0.05


def excess_of_shares(num_grains: int, shares: tuple[int, ...]) -> float:
    """Return by how much whole grains make a step longer than ideal shares would, relative to the latter."""
    sizes = share_sizes(num_grains, len(shares), shares)
    return max(size / one for size, one in zip(sizes, shares, strict=True)) * sum(shares) / num_grains - 1


def enough_grains(shares: tuple[int, ...], num_grains: int, size: int) -> int | None:
    """Return the least larger number of equal grains that suits shares, or None. `size`: samples of a grain now."""
    samples = num_grains * size
    finer = (count for count in range(num_grains + 1, samples + 1) if samples % count == 0)
    return next((count for count in finer if excess_of_shares(count, shares) <= UNEVEN), None)


def share(grains: list[T], part: int, num_parts: int, shares: tuple[int, ...] = ()) -> list[T]:
    """Return the contiguous run of grains that data rank `part` of `num_parts` computes; it may be empty.

    Every rank derives every other rank's share from this function alone. `shares`: as in `share_sizes`.
    """
    sizes = share_sizes(len(grains), num_parts, shares)
    first = sum(sizes[:part])
    return grains[first : first + sizes[part]]


def microbatches(grains: list[T], grains_per_microbatch: int) -> list[list[T]]:
    """Return runs of neighbouring grains that are computed together; `grains` may hold any value per grain."""
    step = max(1, grains_per_microbatch)
    return [grains[i : i + step] for i in range(0, len(grains), step)]


def legal_data_degrees(num_grains: int) -> str:
    """Return the data degrees that a job with `num_grains` grains can use, in words."""
    even = [d for d in range(1, num_grains + 1) if num_grains % d == 0]
    return f"1 to {num_grains} (evenly: {', '.join(map(str, even))})"


def random_key(*parts: int | str) -> int:
    """Return a 63-bit generator seed that belongs to these parts alone.

    SHA-256 instead of arithmetic on the seed makes neighbouring seeds, steps and grains share no bits.
    """
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1
