"""Grains: the fixed division of a global batch, and the share of each rank. Integers only.

Nothing here knows the number of devices except `share`, and nothing that it returns enters the maths.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

# 1, 2, 4 and 8 workers share so many evenly, 3, 5, 6 and 7 unevenly.
FEW_GRAINS = 8
# Activations of a grain, which is the smallest microbatch: an eighth of the smallest devices that people train on, of
# 8 GiB, so that parameters, gradients and the optimizer's state have the rest.
MOST_BYTES_OF_A_GRAIN = 2**30


@dataclass(frozen=True, slots=True)
class Grain:
    """Samples [start, start + size) of a step's global batch; `index` is the grain's number in 0..G-1."""

    index: int
    start: int
    size: int


def grain_size(global_batch: int, num_grains: int) -> int:
    """Samples in a full grain: the global batch over the grains, rounded up."""
    return -(-global_batch // num_grains)


def default_grains(global_batch: int, sample_bytes: float) -> int:
    """Grains of a job that says none, of which a sample has so many bytes of activations.

    8 where these grains are light; else as few as are, of a size that divides the batch, down to one sample each.
    Never fewer for a heavier sample.
    """
    fitting = MOST_BYTES_OF_A_GRAIN / max(sample_bytes, 1.0)
    if grain_size(global_batch, FEW_GRAINS) <= max(1.0, fitting):
        return FEW_GRAINS
    size = next(size for size in range(max(1, int(fitting)), 0, -1) if global_batch % size == 0)
    return global_batch // size


def divide(num_samples: int, global_batch: int, num_grains: int) -> list[Grain]:
    """The non-empty grains of a step that holds `num_samples` <= `global_batch`, in order; the last may be short.

    A short step has fewer grains, not smaller ones: a grain's size never depends on how many samples are left.
    """
    return list(_divided(num_samples, grain_size(global_batch, num_grains)))


@functools.lru_cache(maxsize=8)  # nearly every step holds as many samples as the one before
def _divided(num_samples: int, size: int) -> tuple[Grain, ...]:
    return tuple(Grain(i, start, min(size, num_samples - start)) for i, start in enumerate(range(0, num_samples, size)))


def share(grains: list[T], part: int, num_parts: int) -> list[T]:
    """The contiguous run of grains that data rank `part` of `num_parts` computes; may be empty.

    Sizes differ by one grain at most. Every rank derives every other rank's share from this function alone.
    """
    count = len(grains)
    return grains[part * count // num_parts : (part + 1) * count // num_parts]


def microbatches(grains: list[T], grains_per_microbatch: int) -> list[list[T]]:
    """Runs of neighbouring grains that are computed together, or of what there is one of for each grain."""
    step = max(1, grains_per_microbatch)
    return [grains[i : i + step] for i in range(0, len(grains), step)]


def legal_data_degrees(num_grains: int) -> str:
    """The data degrees that a job of so many grains can use, in words."""
    even = [d for d in range(1, num_grains + 1) if num_grains % d == 0]
    return f"1 to {num_grains} (evenly: {', '.join(map(str, even))})"


def random_key(*parts: int | str) -> int:
    """A 63-bit key from its parts: the seed of a generator that belongs to those parts and to nothing else.

    SHA-256 rather than arithmetic on the seed, so that neighbouring seeds, steps and grains share no bits.
    """
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1
