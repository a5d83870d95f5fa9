"""Communication volume of model parallelism: messages between stages, and sums of partial gradients.

Conventions as in `collectives`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from shoal.plans.accounting.collectives import SizedCollective
from shoal.plans.accounting.partition import Heads, num_positions
from shoal.plans.layout import Layout

# A sum of gradients is in float32 at least; before it the ranks tell in float32 which of them there are.
_FLOAT32 = 4


@dataclass(frozen=True)
class Crossing:
    """Activation between two stages in each microbatch: bytes of a sample, and of tensors without a samples' dim."""

    sample_bytes: int
    fixed_bytes: int = 0
    needs_gradient: bool = True

    def num_bytes(self, num_samples: int) -> int:
        """Of a microbatch of so many samples."""
        return self.sample_bytes * num_samples + self.fixed_bytes

    @classmethod
    def of(cls, shape: Sequence[int], itemsize: int, num_samples: int, needs_gradient: bool) -> Crossing:
        """The crossing of a tensor from a batch of so many samples; the first dim is the samples', if any is."""
        whole = prod(shape) * itemsize
        if shape and num_samples and shape[0] == num_samples:
            return cls(whole // num_samples, 0, needs_gradient)
        return cls(0, whole, needs_gradient)


@dataclass(frozen=True)
class Staged:
    """Stages of a pipeline: `own` are on this rank, `cuts[s]` crosses from stage s to s + 1.

    `used` names the parameters and buffers of each of this rank's. `halves`: backwards here come in two.
    """

    own: tuple[int, ...]
    cuts: tuple[tuple[Crossing, ...], ...]
    used: Mapping[int, frozenset[str]] = field(default_factory=dict)
    halves: bool = False


@dataclass(frozen=True)
class Partial:
    """Partial gradients over an axis: how many flags ranks exchange, and (elements, itemsize) of those on this rank."""

    axis: str
    num_flags: int
    sizes: tuple[tuple[int, int], ...]


def messages(staged: Staged, samples: Sequence[int]) -> Iterator[SizedCollective]:
    """A step's messages between stages, where `samples` has the size of each microbatch.

    A tensor goes forward and, where it has one, its gradient comes back; between stages of one rank nothing is sent.
    """
    mine = set(staged.own)
    for cut, crossings in enumerate(staged.cuts):
        if (cut in mine) == (cut + 1 in mine):
            continue
        there, back = ("send", "recv") if cut in mine else ("recv", "send")
        for crossing in crossings:
            for count in samples:
                yield SizedCollective("pipeline", there, crossing.num_bytes(count))
                if crossing.needs_gradient:
                    yield SizedCollective("pipeline", back, crossing.num_bytes(count))


def completed(partial: Iterable[Partial]) -> Iterator[SizedCollective]:
    """The sums of partial gradients: for each axis an all_reduce of flags, and one for each gradient."""
    for one in partial:
        yield SizedCollective(one.axis, "all_reduce", one.num_flags * _FLOAT32)
        for numel, itemsize in one.sizes:
            yield SizedCollective(one.axis, "all_reduce", numel * max(_FLOAT32, itemsize))


# ------------------------------------------------------------------------------------------------------------- context


@dataclass(frozen=True)
class Attention:
    """Heads of one attention call, their widths, and whether any input needs a gradient."""

    num_query: int
    num_key: int
    width: int
    value_width: int
    needs_gradient: bool = True


@dataclass(frozen=True)
class SlicedBlock:
    """Block that computes some positions of sequences of `length`, in numbers of a sample and position.

    `opens`: it cuts its hidden state of `width`, whose gradient is put together; `closes`: it puts its output together.
    """

    name: str
    length: int
    width: int
    opens: bool
    closes: bool
    attentions: tuple[Attention, ...] = ()
    needs_gradient: bool = True


def exchanges(
    blocks: Sequence[SlicedBlock], layout: Layout, rank: int, samples: Sequence[int]
) -> Iterator[SizedCollective]:
    """A step's exchanges of a context axis in float32: of a rank whose blocks these are, for microbatches' samples.

    Each attention is an all_to_all of query, key and value and one of what is found, and as many of their gradients.
    """
    degree, place = layout.context, layout.coordinate(rank).context
    for block in blocks:
        size = num_positions(block.length, degree)
        for count in samples:
            unit = count * size * _FLOAT32
            for attention in block.attentions:
                ways = 2 if attention.needs_gradient else 1
                for numel in _exchanged(attention, degree, place):
                    yield SizedCollective("context", "all_to_all", unit * numel, ways)
            ends = block.closes + (block.opens and block.needs_gradient)
            yield SizedCollective("context", "all_gather", unit * degree * block.width, ends)


def _exchanged(attention: Attention, degree: int, place: int) -> tuple[int, int]:
    """Numbers for each position of a rank: the larger of what it gives and takes, on the way there and on that back."""
    heads = Heads(attention.num_query, attention.num_key, degree)

    def width(of: int) -> int:
        (start, stop), (first, last) = heads.bounds(of), heads.read(of)
        return (stop - start + last - first) * attention.width + (last - first) * attention.value_width

    start, stop = heads.bounds(place)
    there = max(sum(map(width, range(degree))), degree * width(place))
    return there, attention.value_width * max(attention.num_query, degree * (stop - start))
