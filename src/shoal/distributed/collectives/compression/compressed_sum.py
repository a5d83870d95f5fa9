"""Compressed all-reduce of gradient buckets by any algorithm, with error feedback and a guard of its error.

A rank adds the unsent part of its gradient to the next gradient (Seide et al., 1-bit stochastic gradient descent, 2014;
Karimireddy et al., Error feedback fixes SignSGD, 2019). A step that does not update changes none of this state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from shoal.distributed.collectives.base import Collective, Handle
from shoal.distributed.collectives.compression.codecs import (
    BFloat16,
    Codec,
    CodecTransport,
    Float16,
    Int8,
    PowerSGD,
    TopK,
)
from shoal.plans.accounting.all_reduce import NUM_COMPARED
from shoal.plans.plan import CompressionSection
from shoal.plans.rules import FED_BACK

# Values whose energies are compared separately if a scheme sends something of every value: one huge value must not hide
# the errors of all others.
_GUARD_CHUNK = 256
# The energy of a chunk of values near float32's smallest: int8 cannot scale them, and they are negligible.
_NOTHING = _GUARD_CHUNK * (2.0**-119) ** 2
# Withheld values are sent later: the guard judges what would be left after this many further steps at this rate.
HORIZON_STEPS = 100


@dataclass(frozen=True)
class Comparison:
    """Compressed and exact sum of a sampled step.

    `cosine`: between the optimizer's gradient and the exact sum. `residual`: the unsent share of the energy to send.
    `lost`: the share that will never be sent; with feedback, the share still withheld after HORIZON_STEPS at this rate
    (see docs/compression.md). NaN if a gradient is not finite.
    """

    cosine: float
    residual: float
    lost: float

    def to_json(self) -> dict[str, Any]:
        """Return the JSON value, with None for non-finite numbers."""
        return {name: number if math.isfinite(number) else None for name, number in asdict(self).items()}


class ErrorSums:
    """Sums of a comparison over the parts of a gradient. Ranks agree on the `numbers`, float64, of one rank.

    `by_chunk`: energies are compared chunk by chunk, with equal weights, else all at once. `feedback`: the unsent part
    is withheld.
    """

    def __init__(self, by_chunk: bool, feedback: bool) -> None:
        self._by_chunk, self._feedback = by_chunk, feedback
        # found . exact, found . found, exact . exact; the missing, the lost and the total energy
        self.numbers = torch.zeros(NUM_COMPARED, dtype=torch.float64)

    def add(self, exact: Tensor, wanted: Tensor, decoded: Tensor) -> None:
        """Add one part: the exact sum of the gradients, the exact sum of the values to send, and the decoded sum."""
        exact, wanted, decoded = exact.double(), wanted.double(), decoded.double()
        missing = (wanted - decoded).square_()
        energy = wanted.square()
        if self._by_chunk:
            rests, wholes = _chunked(missing), _chunked(energy)
            shares = (rests / wholes)[~(wholes <= _NOTHING)]  # keeps NaN
            terms = [shares.sum(), self._lost(shares).sum(), torch.tensor(shares.numel())]
        else:
            terms = [missing.sum(), missing.new_zeros(()), energy.sum()]
        terms = [decoded @ exact, decoded @ decoded, exact @ exact, *terms]
        self.numbers += torch.tensor([float(number) for number in terms], dtype=torch.float64)

    def _lost(self, shares: Tensor) -> Tensor:
        return shares**HORIZON_STEPS if self._feedback else shares

    def comparison(self) -> Comparison:
        """Return the comparison over all parts. An empty sum counts as sent completely."""
        dot, decoded, exact, missing, lost, whole = self.numbers.tolist()
        size = math.sqrt(decoded) * math.sqrt(exact) if min(decoded, exact) >= 0 else math.nan
        cosine = dot / size if size else float(decoded == exact)
        residual = missing / whole if whole else 0.0 if missing == 0 else math.inf
        if not self._by_chunk:
            return Comparison(cosine, residual, float(self._lost(torch.tensor(residual, dtype=torch.float64))))
        return Comparison(cosine, residual, lost / whole if whole else residual)


def _chunked(values: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(values, (0, -len(values) % _GUARD_CHUNK))
    return padded.view(-1, _GUARD_CHUNK).sum(dim=1)


# Schemes that send something of every value. For the others, the comparison covers a whole bucket.
_OF_EVERY_VALUE = ("bfloat16", "float16", "int8")


@dataclass
class _CompressedBucket:
    codec: Codec
    members: list[int]  # indices of the parameters whose gradients are in this bucket
    sizes: list[int]
    withheld: Tensor | None = None  # the part that this rank has not sent, since the last update
    attempt: Tensor | None = None  # the values to send in this step, then their unsent part
    compared: list[Tensor] = field(default_factory=list)  # exact, wanted

    def __post_init__(self) -> None:
        self.numel = sum(self.sizes)

    def clear(self, device: torch.device, *, withholds: bool, sends: bool) -> None:
        """Set the residual to zeros, if the bucket `withholds` values and `sends` them compressed."""
        self.withheld = torch.zeros(self.numel, device=device) if withholds else None
        self.attempt = torch.zeros(self.numel, device=device) if withholds and sends else None


def make_codec(
    scheme: str, options: CompressionSection, wire: CodecTransport, shapes: Sequence[tuple[int, ...]]
) -> Codec:
    """Return the codec of a plan's `collectives.compression` for a vector of consecutive tensors of these shapes.

    Collective: as `CodecTransport.allocate`.
    """
    numel = sum(torch.Size(shape).numel() for shape in shapes)
    if scheme == "bfloat16":
        return BFloat16(wire, numel)
    if scheme == "float16":
        return Float16(wire, numel)
    if scheme == "int8":
        return Int8(wire, numel, options.block)
    if scheme == "topk":
        return TopK(wire, numel, options.density)
    return PowerSGD(wire, shapes, options.rank)


class Compression:
    """Sum of the buckets that `add` has defined, in the order of their numbers. Collective: every method but `commit`.

    `fell_back`: the step and cause with which compression ended; None while it is active. Withheld values are in units
    of the gradient of a step whose loss counted `unit` on this rank; 0 if nothing is withheld.
    """

    def __init__(self, collective: Collective, scheme: str, options: CompressionSection) -> None:
        self.scheme, self.options = scheme, options
        self.carries = scheme in FED_BACK  # whether ranks have tensors that belong to a checkpoint
        self.feedback = options.feedback and self.carries
        self.fell_back: dict[str, Any] | None = None
        self.unit = 0.0
        self._collective = collective
        self._wire: CodecTransport | None = None
        self._buckets: list[_CompressedBucket] = []
        self._going: list[_Going] = []
        self._step = 0
        self.step_unit = 0.0  # the weight of this rank's gradients in this step: the loss's weight times its factor
        self._tally: ErrorSums | None = None
        self._verdict: Comparison | None = None
        self._unused: Sequence[tuple[int, int, int]] = ()

    def add(self, members: Sequence[int], shapes: Sequence[tuple[int, ...]], device: torch.device) -> None:
        """Define the next bucket: consecutive gradients of these parameters and shapes."""
        self._wire = self._wire or CodecTransport(self._collective, device)
        codec = make_codec(self.scheme, self.options, self._wire, shapes)
        self._buckets.append(_CompressedBucket(codec, list(members), [torch.Size(shape).numel() for shape in shapes]))
        self._buckets[-1].clear(device, withholds=self.feedback, sends=True)

    # --------------------------------------------------------------------------------------------------- a step

    def begin(self, step: int) -> None:
        """Prepare for a step's gradients, which may be computed more than once."""
        self._step, self.step_unit = step, 0.0
        self._going = []
        self._verdict = None
        every = self.options.guard_every
        sampled = self.fell_back is None and every > 0 and step % every == 0
        self._tally = ErrorSums(self.scheme in _OF_EVERY_VALUE, self.feedback) if sampled else None

    def start(self, number: int, flat: Tensor) -> Handle:
        """Start to sum a bucket in place; elements after the gradients are summed uncompressed.

        Earlier buckets advance to their last round, the large one, while the backward still runs.
        """
        for going in self._going:
            if going.round < self._buckets[going.number].codec.num_rounds:
                going.advance()
        going = _Going(self, number, self._rounds(self._buckets[number], flat))
        self._going.append(going)
        going.advance()
        return going

    def _rounds(self, bucket: _CompressedBucket, flat: Tensor) -> Iterator[Handle]:
        body, rest = flat[: bucket.numel], flat[bucket.numel :]
        if self.fell_back is not None:
            if bucket.withheld is not None and self.unit:
                body.add_(bucket.withheld, alpha=self.step_unit / self.unit)
            yield self._collective.all_reduce(flat, asynchronous=True)
            return
        beside = [self._collective.all_reduce(rest, asynchronous=True)] if rest.numel() else []
        exact = body.clone() if self._tally is not None else None
        values = body  # to send: the gradient plus the withheld values, scaled to this rank's current weight
        if bucket.withheld is not None and bucket.attempt is not None and self.unit and self.step_unit:
            values = torch.add(body, bucket.withheld, alpha=self.step_unit / self.unit, out=bucket.attempt)
        elif bucket.withheld is not None and bucket.attempt is not None:
            values = bucket.attempt.copy_(body)
        if exact is not None:
            bucket.compared = [exact, values.clone() if self.feedback else exact]
            distinct = bucket.compared if self.feedback else [exact]
            beside += [self._collective.all_reduce(tensor, asynchronous=True) for tensor in distinct]
        yield from bucket.codec.sum(values, body, self.feedback)
        yield from beside
        for tensor in bucket.compared:
            self._collective.release(tensor)
        if self._tally is not None:
            exact, wanted = bucket.compared
            self._tally.add(exact, wanted, body)

    def drain(self) -> None:
        """Finish all buckets, one round of each in turn."""
        while self._going:
            for going in self._going:
                going.advance()
            self._going = [going for going in self._going if not going.done]

    def settle(self, flats: Sequence[Tensor], unused: Sequence[tuple[int, int, int]]) -> Comparison | None:
        """Finish a step's sums. Return the comparison of a sampled step; the guard may replace its sums by exact ones.

        `unused`: (bucket, start, stop) of gradients that no rank had; their withheld values stay.
        Collective: a broadcast in a sampled step.
        """
        comparison = None
        if self._tally is not None:
            self._collective.broadcast(self._tally.numbers)  # added up on one rank, so that all ranks decide the same
            comparison = self._tally.comparison()
            if comparison.lost > self.options.guard_lost:
                self._verdict = comparison
            for bucket, flat in zip(self._buckets, flats, strict=True):
                if self._verdict is not None:
                    flat[: bucket.numel] = bucket.compared[1]
                    if bucket.attempt is not None:
                        bucket.attempt.zero_()
                bucket.compared = []
        self._unused = unused
        for number, start, stop in unused:
            bucket = self._buckets[number]
            if bucket.withheld is not None and bucket.attempt is not None and self.unit:
                torch.mul(bucket.withheld[start:stop], self.step_unit / self.unit, out=bucket.attempt[start:stop])
        return comparison

    def commit(self) -> None:
        """Commit the residuals of a step that updates."""
        if self.fell_back is not None:  # uncompressed sums included all withheld values but those that `unused` names
            for number, bucket in enumerate(self._buckets if self.step_unit else ()):
                if bucket.withheld is None:
                    continue
                left = torch.zeros_like(bucket.withheld)
                for _, start, stop in (place for place in self._unused if place[0] == number):
                    left[start:stop] = bucket.withheld[start:stop]
                bucket.withheld = left if self._unused else None
            self.unit = 0.0 if self.step_unit and not self._unused else self.unit
            return
        for bucket in self._buckets:
            bucket.codec.commit()
            if bucket.attempt is not None and self.step_unit:
                bucket.withheld, bucket.attempt = bucket.attempt, bucket.withheld
        if self.feedback and self.step_unit:
            self.unit = self.step_unit
        if self._verdict is not None:
            self.fell_back = {"step": self._step + 1, **self._verdict.to_json()}
            for bucket in self._buckets:  # from now on, sums include the residuals
                bucket.attempt = None

    def said(self, comparison: Comparison) -> str | None:
        """Return a message if the updating step of this comparison was the last compressed step, else None."""
        if self.fell_back is None:
            return None
        return (
            f"step {self.fell_back['step']}: {self.scheme} loses {comparison.lost:.3g} of the gradients' energy "
            f"(cosine {comparison.cosine:.3g}), more than compression.guard_lost = {self.options.guard_lost}: "
            "from here on gradients are not compressed"
        )

    # --------------------------------------------------------------------------------------------------- its state

    def withheld_of(self) -> Iterator[tuple[int, Tensor]]:
        """Yield this rank's residual of each parameter, flat; nothing without feedback."""
        for bucket in self._buckets:
            if bucket.withheld is not None:
                yield from zip(bucket.members, bucket.withheld.split(bucket.sizes), strict=True)

    def bases(self) -> Iterator[tuple[int, Tensor]]:
        """Yield PowerSGD's next initial factor of each parameter that it factors."""
        for bucket in self._buckets:
            if isinstance(bucket.codec, PowerSGD):
                starts = dict(zip(accumulate(bucket.sizes, initial=0), bucket.members, strict=False))
                yield from ((starts[start], basis) for start, basis in bucket.codec.factors())

    def reset(self, fell_back: dict[str, Any] | None) -> None:
        """Clear the residuals, and set whether the guard has fallen back."""
        self.fell_back, self.unit = fell_back, 0.0
        for bucket in self._buckets:
            assert self._wire is not None, "buckets have a device"
            bucket.clear(self._wire.device, withholds=self.feedback, sends=fell_back is None)

    def buffers(self) -> list[Tensor]:
        """Return the memory of the transport, the codecs and the residuals."""
        tensors = self._wire.buffers() if self._wire is not None else []
        for bucket in self._buckets:
            tensors += bucket.codec.buffers()
            tensors += [tensor for tensor in (bucket.withheld, bucket.attempt) if tensor is not None]
        return tensors


class _Going:
    """Bucket in progress through the rounds of its codec."""

    def __init__(self, owner: Compression, number: int, rounds: Iterator[Handle]) -> None:
        self.number, self.round, self.done = number, 0, False
        self._owner, self._rounds = owner, rounds
        self._handle: Handle | None = None

    def advance(self) -> None:
        """Wait for the current round, and start the next one."""
        if self._handle is not None:
            self._handle.wait()
        self._handle = next(self._rounds, None)
        self.round += 1
        self.done = self._handle is None

    def wait(self) -> None:
        """Finish all started buckets."""
        self._owner.drain()
