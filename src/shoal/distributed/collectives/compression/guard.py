"""Error guard of gradient compression: the distance of a compressed sum from the exact one, and its limit."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.plans.accounting.compressed import NUM_COMPARED

# Values whose energy is compared by itself where a scheme sends something of every value: one huge value must not hide
# what became of all others.
CHUNK = 256
# The energy of a chunk of values near the smallest that float32 has: int8 cannot scale them, and they mean nothing.
_NOTHING = CHUNK * (2.0**-119) ** 2
# What is held back is sent later: judged is what would be left of it after so many steps more at this rate.
HORIZON_STEPS = 100


@dataclass(frozen=True)
class Comparison:
    """Compressed and exact sum of a sampled step.

    `cosine`: between what the optimizer gets and the exact sum of the gradients. `residual`: the share of the energy of
    what was to be sent that was not. `lost`: the share that never will be, with feedback what at this rate is still
    held back after HORIZON_STEPS; see docs/compression.md. NaN where a gradient is not finite.
    """

    cosine: float
    residual: float
    lost: float

    def to_json(self) -> dict[str, Any]:
        """JSON value; None for a number that is not finite."""
        return {name: number if math.isfinite(number) else None for name, number in asdict(self).items()}


class ErrorSums:
    """Sums of a comparison over the parts of a gradient.

    `by_chunk`: energies are compared chunk by chunk, each with one vote, else all at once. `feedback`: what was not
    sent is held back.
    """

    def __init__(self, by_chunk: bool, feedback: bool) -> None:
        self._by_chunk, self._feedback = by_chunk, feedback
        # found . exact, found . found, exact . exact; what is missing, what is lost, and of how much
        self._numbers = torch.zeros(NUM_COMPARED, dtype=torch.float64)

    def add(self, exact: Tensor, wanted: Tensor, found: Tensor) -> None:
        """One part: the exact sum of the gradients, of what was to be sent, and what was decoded."""
        exact, wanted, found = exact.double(), wanted.double(), found.double()
        missing = (wanted - found).square_()
        energy = wanted.square()
        if self._by_chunk:
            rests, wholes = _chunked(missing), _chunked(energy)
            shares = (rests / wholes)[~(wholes <= _NOTHING)]  # what is not a number is not left out
            told = [shares.sum(), self._lost(shares).sum(), torch.tensor(shares.numel())]
        else:
            told = [missing.sum(), missing.new_zeros(()), energy.sum()]
        told = [found @ exact, found @ found, exact @ exact, *told]
        self._numbers += torch.tensor([float(number) for number in told], dtype=torch.float64)

    def _lost(self, shares: Tensor) -> Tensor:
        return shares**HORIZON_STEPS if self._feedback else shares

    @property
    def numbers(self) -> Tensor:
        """The sums so far, float64: ranks agree on those of one of them."""
        return self._numbers

    def comparison(self) -> Comparison:
        """Of all parts. Nothing to send is sent whole."""
        dot, found, exact, missing, lost, whole = self._numbers.tolist()
        size = math.sqrt(found) * math.sqrt(exact) if min(found, exact) >= 0 else math.nan
        cosine = dot / size if size else float(found == exact)
        residual = missing / whole if whole else 0.0 if missing == 0 else math.inf
        if not self._by_chunk:
            return Comparison(cosine, residual, float(self._lost(torch.tensor(residual, dtype=torch.float64))))
        return Comparison(cosine, residual, lost / whole if whole else residual)


def _chunked(values: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(values, (0, -len(values) % CHUNK))
    return padded.view(-1, CHUNK).sum(dim=1)
