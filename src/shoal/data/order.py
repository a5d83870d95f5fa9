"""Sample order as arithmetic: the ids of a step follow from seed, epoch and position.

A seeded permutation of [0, N) without a table: a balanced Feistel network on the next even number of bits, with
cycle-walking for values outside [0, N) (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002). The cost of a
position is the same for ten samples and for 10^10.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shoal.data.sample_digest import Ids
from shoal.jobs.job import Epochs, Length, Samples
from shoal.plans.grains import Grain, divide, random_key

# Positions permuted at once, since a step may have few and a numpy call costs as much as some thousand elements.
_BLOCK = 1 << 14
_Words = npt.NDArray[np.uint64]
# Luby and Rackoff show 4 rounds to be a strong pseudorandom permutation given a random round function; the round
# function here is a mixer, not a cipher, hence twice as many.
_ROUNDS = 8


def permute(positions: Ids, count: int, key: int) -> Ids:
    """Return the ids at `positions` (int64, each in [0, count)) of the permutation of [0, count) selected by `key`."""
    half_bits = max(1, (max(count - 1, 1).bit_length() + 1) // 2)
    half = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    keys = _round_keys(key)
    values = _feistel(positions.astype(np.uint64), half, mask, keys)
    outside = values >= np.uint64(count)
    while outside.any():  # the domain is below 4 * count, so each pass leaves at most about 3/4
        values[outside] = _feistel(values[outside], half, mask, keys)
        outside = values >= np.uint64(count)
    return values.astype(np.int64)


def _permuted(start: int, stop: int, count: int, seed: int, epoch: int) -> Ids:
    """Return the ids at positions [start, stop) of an epoch, from cached blocks."""
    first = start // _BLOCK
    parts = []
    for index in range(first, (stop - 1) // _BLOCK + 1):
        begin = index * _BLOCK
        parts.append(_permuted_block(index, count, seed, epoch)[max(0, start - begin) : stop - begin])
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


@functools.lru_cache(maxsize=4)
def _permuted_block(index: int, count: int, seed: int, epoch: int) -> Ids:
    key = random_key(seed, "order", epoch)
    return permute(np.arange(index * _BLOCK, min(count, (index + 1) * _BLOCK), dtype=np.int64), count, key)


@functools.lru_cache(maxsize=64)
def _round_keys(key: int) -> tuple[np.uint64, ...]:
    return tuple(np.uint64(random_key(key, "round", i)) for i in range(_ROUNDS))


def _feistel(values: _Words, half: np.uint64, mask: np.uint64, keys: tuple[np.uint64, ...]) -> _Words:
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << half) | right


def _mix(words: _Words) -> _Words:
    """Apply the finaliser of splitmix64 (Steele, Lea and Flood, 2014), modulo 2^64."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


@dataclass(frozen=True)
class Order:
    """Sample order of a map-style dataset of `num_samples`, for a job's batch, grains, seed and length."""

    num_samples: int
    global_batch: int
    num_grains: int
    seed: int
    shuffle: bool
    length: Length

    @functools.cached_property
    def steps_per_epoch(self) -> int:
        """Number of steps in one pass. The last step may be short."""
        return -(-self.num_samples // self.global_batch)

    @functools.cached_property
    def num_steps(self) -> int:
        """Number of steps in the job's whole length."""
        if isinstance(self.length, Epochs):
            return max(1, round(self.length.count * self.steps_per_epoch))
        if isinstance(self.length, Samples):
            epochs, rest = divmod(self.length.count, self.num_samples)
            return epochs * self.steps_per_epoch - (-rest // self.global_batch)
        return self.length.count

    def samples_before(self, step: int) -> int:
        """Return the number of samples in all steps before `step`."""
        epochs, place = divmod(step, self.steps_per_epoch)
        before = epochs * self.num_samples + place * self.global_batch
        return min(before, self.length.count) if isinstance(self.length, Samples) else before

    def grains(self, step: int) -> list[Grain]:
        """Return the non-empty grains of `step`."""
        first = step % self.steps_per_epoch * self.global_batch
        size = min(self.global_batch, self.num_samples - first)
        if isinstance(self.length, Samples) and step < self.num_steps:
            size = min(size, self.length.count - self.samples_before(step))
        return divide(size, self.global_batch, self.num_grains)

    def ids(self, step: int, grains: list[Grain]) -> list[Ids]:
        """Return the sample ids of neighbouring grains of `step`: one int64 array [grain.size] per grain."""
        if not grains:
            return []
        epoch, place = divmod(step, self.steps_per_epoch)
        start = place * self.global_batch + grains[0].start
        stop = start + sum([g.size for g in grains])
        if self.shuffle:
            ids = _permuted(start, stop, self.num_samples, self.seed, epoch)
        else:
            ids = np.arange(start, stop, dtype=np.int64)
        first = grains[0].start
        return [ids[g.start - first : g.start - first + g.size] for g in grains]
