"""Sample order as arithmetic: the ids of a step follow from seed, epoch and position.

A seeded permutation of [0, N) without a table: a balanced Feistel network on the next even number of bits, with
cycle-walking for values outside [0, N) (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002). The cost of a
position is the same for ten samples and for 10^10.

The sample digest proves the order: a hash of all sample ids that a run has read, stored in its records and checkpoints.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.jobs.job import Epochs, Length, Samples
from shoal.plans.grains import Grain, divide, random_key

# Positions permuted at once, since a step may have few and a numpy call costs as much as some thousand elements.
BLOCK = 1 << 14
# The odd word next to 2^64 divided by the golden ratio: the increment of splitmix64.
GOLDEN_WORD = 0x9E3779B97F4A7C15
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


def uniforms(start: int, stop: int, key: int) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) for each position in [start, stop): splitmix64 at that position of its sequence."""
    words = np.arange(start + 1, stop + 1, dtype=np.uint64) * np.uint64(GOLDEN_WORD) + np.uint64(key)
    return (_mix(words) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def shuffled(start: int, stop: int, count: int, seed: int, epoch: int) -> Ids:
    """Return the ids at positions [start, stop) of an epoch in the default order."""
    return from_blocks(lambda index: _shuffled_block(index, count, seed, epoch), start, stop)


def from_blocks(block: Callable[[int], Ids], start: int, stop: int) -> Ids:
    """Return the ids at positions [start, stop), from blocks of BLOCK positions."""
    parts = []
    for index in range(start // BLOCK, (stop - 1) // BLOCK + 1):
        begin = index * BLOCK
        parts.append(block(index)[max(0, start - begin) : stop - begin])
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


@functools.lru_cache(maxsize=4)
def _shuffled_block(index: int, count: int, seed: int, epoch: int) -> Ids:
    key = random_key(seed, "order", epoch)
    return permute(np.arange(index * BLOCK, min(count, (index + 1) * BLOCK), dtype=np.int64), count, key)


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


class Sampler(ABC):
    """Rule for which sample stands at each position of an epoch. It has no state and is the same on every rank."""

    unequal = False  # whether steps have other numbers of samples than the job's global batch

    def bounds(self, order: Order, epoch: int) -> Ids:
        """Return the positions in an epoch where its steps begin, and its end, if they are `unequal`."""
        raise NotImplementedError

    def grains(self, order: Order, epoch: int, start: int, stop: int) -> list[Grain]:
        """Return the grains of a step at positions [start, stop) of an epoch, if steps are `unequal`."""
        raise NotImplementedError

    def draws(self, num_samples: int) -> int:
        """Return the length of an epoch of a dataset with `num_samples`, in samples."""
        return num_samples

    @abstractmethod
    def check(self, num_samples: int) -> None:
        """Raise JobError if the sampler does not fit a dataset of `num_samples`."""

    @abstractmethod
    def ids(self, order: Order, epoch: int, start: int, stop: int) -> Ids:
        """Return the sample ids at positions [start, stop) of an epoch, which are of one step. int64, `start` < `stop`.

        The result follows from the order's numbers and the arguments alone. Ids may repeat.
        """

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return the sampler's values as JSON, for a resume to compare."""


@dataclass(frozen=True)
class Order:
    """Sample order of a map-style dataset, for a job's batch, grains, seed and length.

    num_samples: number of samples in an epoch. sampler: None for a permutation (`shuffle`) or the dataset's own order.
    """

    num_samples: int
    global_batch: int
    num_grains: int
    seed: int
    shuffle: bool
    length: Length
    sampler: Sampler | None = None

    @functools.cached_property
    def _first_steps(self) -> list[int]:
        """First step of each epoch that was computed so far; only for epochs of unequal lengths."""
        return [0]

    def first_step(self, epoch: int) -> int:
        """Return the first step of an epoch."""
        if self.sampler is None or not self.sampler.unequal:
            return epoch * -(-self.num_samples // self.global_batch)
        for number in range(len(self._first_steps) - 1, epoch):
            self._first_steps.append(self._first_steps[number] + len(self.sampler.bounds(self, number)) - 1)
        return self._first_steps[epoch]

    def epoch(self, step: int) -> int:
        """Return the epoch that a step belongs to. The last step of an epoch may be short."""
        if self.sampler is None or not self.sampler.unequal:
            return step // -(-self.num_samples // self.global_batch)
        while self._first_steps[-1] <= step:
            self.first_step(len(self._first_steps))
        return bisect.bisect_right(self._first_steps, step) - 1

    @functools.cached_property
    def num_steps(self) -> int:
        """Number of steps in the job's whole length."""
        if isinstance(self.length, Epochs):
            whole = int(self.length.count)
            first, following = self.first_step(whole), self.first_step(whole + 1)
            return max(1, first + round((self.length.count - whole) * (following - first)))
        if isinstance(self.length, Samples):
            epochs, rest = divmod(self.length.count, self.num_samples)
            return self.first_step(epochs) - (-rest // self.global_batch)
        return self.length.count

    def _span(self, step: int) -> tuple[int, int]:
        """Return the positions in its epoch at which a step begins and ends."""
        epoch = self.epoch(step)
        place = step - self.first_step(epoch)
        if self.sampler is not None and self.sampler.unequal:
            bounds = self.sampler.bounds(self, epoch)
            return int(bounds[place]), int(bounds[place + 1])
        first = place * self.global_batch
        return first, min(first + self.global_batch, self.num_samples)

    def samples_before(self, step: int) -> int:
        """Return the number of samples in all steps before `step`."""
        before = self.epoch(step) * self.num_samples + self._span(step)[0]
        return min(before, self.length.count) if isinstance(self.length, Samples) else before

    def grains(self, step: int) -> list[Grain]:
        """Return the non-empty grains of `step`."""
        first, end = self._span(step)
        if self.sampler is not None and self.sampler.unequal:
            return self.sampler.grains(self, self.epoch(step), first, end)
        size = end - first
        if isinstance(self.length, Samples) and step < self.num_steps:
            size = min(size, self.length.count - self.samples_before(step))
        return divide(size, self.global_batch, self.num_grains)

    def ids(self, step: int, grains: list[Grain]) -> list[Ids]:
        """Return the sample ids of neighbouring grains of `step`: one int64 array [grain.size] per grain."""
        if not grains:
            return []
        epoch = self.epoch(step)
        start = self._span(step)[0] + grains[0].start
        stop = start + sum([g.size for g in grains])
        if self.sampler is not None:
            ids = self.sampler.ids(self, epoch, start, stop)
        elif self.shuffle:
            ids = shuffled(start, stop, self.num_samples, self.seed, epoch)
        else:
            ids = np.arange(start, stop, dtype=np.int64)
        first = grains[0].start
        return [ids[g.start - first : g.start - first + g.size] for g in grains]


Ids = npt.NDArray[np.int64]

# Words of a grain's digest, each below 2^32, so that float64 sums over up to 2^21 grains are exact.
DIGEST_WORDS = 8
# Minimum number of grains for a numpy table; below it, separate byte strings are faster.
_MANY = 16
_GOLDEN = 0.6180339887498949
EMPTY_DIGEST = hashlib.sha256(b"shoal sample digest 1").hexdigest()


def grain_words(step: int, grains: Sequence[int], ids: Sequence[Ids]) -> list[float]:
    """Return the sum of several grains' digests: the 8 words of SHA-256 over (step, grain, ids) of each.

    The order of summation does not matter, so a step's sum is the same for every assignment of grains to ranks.
    """
    digests = b"".join(_digests(step, grains, ids))
    if len(grains) < _MANY:  # Python is faster than numpy for a few words
        words = struct.unpack(f"<{len(digests) // 4}I", digests)
        return [float(sum(words[place::DIGEST_WORDS])) for place in range(DIGEST_WORDS)]
    table = np.frombuffer(digests, dtype="<u4").reshape(-1, DIGEST_WORDS)
    return [float(word) for word in table.sum(axis=0, dtype=np.uint64)]


def words_of_steps(parts: Sequence[tuple[int, Sequence[int], Sequence[Ids]]]) -> list[list[float]]:
    """Return `grain_words` of each non-empty part (step, grains, ids), from one table if grains are equally long."""
    sizes = set().union(*[map(len, ids) for _, _, ids in parts])
    if len(sizes) != 1:
        return [grain_words(*part) for part in parts]
    counts = [len(grains) for _, grains, _ in parts]
    table = np.empty((sum(counts), 2 + sizes.pop()), dtype="<i8")
    table[:, 0] = np.repeat([step for step, _, _ in parts], counts)
    table[:, 1] = np.concatenate([grains for _, grains, _ in parts])
    table[:, 2:] = np.concatenate([own for _, _, ids in parts for own in ids]).reshape(len(table), -1)
    words = np.frombuffer(b"".join(_hashed(table)), dtype="<u4").reshape(-1, DIGEST_WORDS).astype(np.uint64)
    sums: list[list[float]] = np.add.reduceat(words, np.cumsum([0, *counts[:-1]])).astype(np.float64).tolist()
    return sums


def _hashed(table: npt.NDArray[np.int64]) -> list[bytes]:
    """Return the SHA-256 of each row."""
    text, width = memoryview(table.tobytes()), table.itemsize * table.shape[1]
    return [hashlib.sha256(text[at : at + width]).digest() for at in range(0, len(text), width)]


def _digests(step: int, grains: Sequence[int], ids: Sequence[Ids]) -> list[bytes]:
    size = len(ids[0]) if ids else 0
    count = next((place for place, own in enumerate(ids) if len(own) != size), len(ids))  # the last grain may be short
    if count < _MANY:
        named = zip(grains, ids, strict=True)
        head = step.to_bytes(8, "little")
        texts = (head + grain.to_bytes(8, "little") + own.astype("<i8", copy=False).tobytes() for grain, own in named)
        return [hashlib.sha256(text).digest() for text in texts]
    table = np.empty((count, 2 + size), dtype="<i8")
    table[:, 0], table[:, 1], table[:, 2:] = step, grains[:count], np.concatenate(ids[:count]).reshape(count, size)
    return _hashed(table) + _digests(step, grains[count:], ids[count:])


def spread(places: Ids, num_samples: int) -> Ids:
    """Return sample ids that are spread over a dataset, for places 0, 1, 2, ...; ids may repeat."""
    return (places * _GOLDEN % 1.0 * num_samples).astype(np.int64)
