"""Sample digest: a hash of all sample ids that a run has read, stored in its records and checkpoints."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

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


def chain_digest(previous: str, words: npt.NDArray[np.float64]) -> str:
    """Return the digest after a step: SHA-256 over the previous digest and the sum of the step's grain digests."""
    return hashlib.sha256(bytes.fromhex(previous) + words.astype("<u8").tobytes()).hexdigest()


def spread(places: Ids, num_samples: int) -> Ids:
    """Return sample ids that are spread over a dataset, for places 0, 1, 2, ...; ids may repeat."""
    return (places * _GOLDEN % 1.0 * num_samples).astype(np.int64)
