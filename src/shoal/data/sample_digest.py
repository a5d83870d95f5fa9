"""Sample digest: a hash over every sample id that a run has read, in its records and checkpoints."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]

# Words of a grain's digest: each below 2^32, so that their float64 sum over up to 2^21 grains is exact.
DIGEST_WORDS = 8
EMPTY_DIGEST = hashlib.sha256(b"shoal sample digest 1").hexdigest()


def grain_words(step: int, grains: Sequence[int], ids: Sequence[Ids]) -> list[float]:
    """Digests of several grains, added up: of each the 8 words of SHA-256 over (step, grain, ids).

    They add up in any order, so that the sum over a step is the same whichever rank held which grain.
    """
    head = step.to_bytes(8, "little")
    named = zip(grains, ids, strict=True)
    texts = (head + grain.to_bytes(8, "little") + own.astype("<i8", copy=False).tobytes() for grain, own in named)
    digests = b"".join(hashlib.sha256(text).digest() for text in texts)
    words = struct.unpack(f"<{len(digests) // 4}I", digests)  # a few words cost less in Python than in numpy
    return [float(sum(words[place::DIGEST_WORDS])) for place in range(DIGEST_WORDS)]


def chain_digest(previous: str, words: npt.NDArray[np.float64]) -> str:
    """The digest after a step: SHA-256 over the digest before it and the sum of the step's grain digests."""
    return hashlib.sha256(bytes.fromhex(previous) + words.astype("<u8").tobytes()).hexdigest()
