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
    """Stages of a pipeline: `own` are on this rank, `cuts[s]` crosses from stage s to s + 1."""

    own: tuple[int, ...]
    cuts: tuple[tuple[Crossing, ...], ...]
    used: Mapping[int, frozenset[str]] = field(default_factory=dict)  # names of parameters and buffers of each of `own`
    halves: bool = False  # backwards here come in two


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


# -------------------------------------------------------------------------------------------------------------- tensor


@dataclass(frozen=True)
class LayerPair:
    """A column-parallel layer and its row-parallel layer; bytes are of one microbatch's activation."""

    input_bytes: int  # it enters the pair whole on every rank
    output_bytes: int  # it leaves the pair as a partial sum
    input_needs_gradient: bool = True  # which is summed in the backward


@dataclass(frozen=True)
class Positions:
    """Sequences of `length`, divided over `degree` ranks in parts of one size; see Span in parallel/sequence."""

    length: int
    degree: int

    def padded(self, num_bytes: int) -> int:
        """Bytes of all ranks' parts of what has `num_bytes` in all."""
        return num_bytes // self.length * num_positions(self.length, self.degree) * self.degree


def tensor_parallel(
    pairs: Iterable[LayerPair], gathered_bytes: Iterable[int], microbatches: int, positions: Positions | None = None
) -> Iterator[SizedCollective]:
    """Megatron-style tensor parallelism: per pair an all_reduce in the forward and one in the backward.

    `gathered_bytes` are outputs of column-parallel layers with no row-parallel partner: an all_gather in the forward,
    and in the backward an all_reduce of their input counted by the caller as a LayerPair of no output. With `positions`
    ranks have parts of the sequences between the pairs: the input is gathered and the output scattered as it is summed,
    the other way in the backward.
    """
    for pair in pairs:
        if positions is not None:
            into, out = positions.padded(pair.input_bytes), positions.padded(pair.output_bytes)
            yield SizedCollective("tensor", "all_gather", into, microbatches)
            yield SizedCollective("tensor", "reduce_scatter", out, microbatches)
            yield SizedCollective("tensor", "all_gather", out, microbatches)
            if pair.input_needs_gradient:
                yield SizedCollective("tensor", "reduce_scatter", into, microbatches)
            continue
        if pair.output_bytes:
            yield SizedCollective("tensor", "all_reduce", pair.output_bytes, microbatches)
        if pair.input_needs_gradient:
            yield SizedCollective("tensor", "all_reduce", pair.input_bytes, microbatches)
    for num_bytes in gathered_bytes:
        yield SizedCollective("tensor", "all_gather", num_bytes, microbatches)


def stream(hidden_bytes: int, positions: Positions, microbatches: int) -> SizedCollective:
    """The ends of blocks that hand each other parts of sequences: gathered behind the last, and back before the first.

    Before the first the hidden state is whole on every rank, and a part of it is taken without sending anything.
    """
    return SizedCollective("tensor", "all_gather", positions.padded(hidden_bytes), 2 * microbatches)


def sharded_loss(
    num_targets: int, microbatches: int, smoothed: bool = False, itemsize: int = 4
) -> Iterator[SizedCollective]:
    """The cross entropy of logits that stay cut: the largest of each row, then its sums; nothing in the backward."""
    for numbers in (1, 3 if smoothed else 2):
        yield SizedCollective("tensor", "all_reduce", numbers * num_targets * itemsize, microbatches)


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
    """Block that computes some positions of sequences of `length`, in numbers of a sample and position."""

    name: str
    length: int
    width: int
    opens: bool  # it cuts its hidden state of `width`, whose gradient is put together
    closes: bool  # it puts its output together
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
