"""Communication volume of model parallelism: messages between stages, and sums of partial gradients.

Conventions as in `collectives`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from shoal.plans.accounting.collectives import Heads, SizedCollective, num_positions
from shoal.plans.plan import Layout

# Gradients are summed in at least float32; first the ranks exchange float32 flags of the existing gradients.
_FLOAT32 = 4


@dataclass(frozen=True)
class Crossing:
    """Activation between two stages in each microbatch: bytes per sample, and bytes of tensors without a sample dim."""

    sample_bytes: int
    fixed_bytes: int = 0
    needs_gradient: bool = True

    def num_bytes(self, num_samples: int) -> int:
        """Return the bytes for a microbatch of `num_samples` samples."""
        return self.sample_bytes * num_samples + self.fixed_bytes

    @classmethod
    def of(cls, shape: Sequence[int], itemsize: int, num_samples: int, needs_gradient: bool) -> Crossing:
        """Return the crossing of a tensor from a batch of `num_samples` samples; a sample dim comes first, if any."""
        whole = prod(shape) * itemsize
        if shape and num_samples and shape[0] == num_samples:
            return cls(whole // num_samples, 0, needs_gradient)
        return cls(0, whole, needs_gradient)


@dataclass(frozen=True)
class Staged:
    """Stages of a pipeline: `own` are on this rank, `cuts[s]` crosses from stage s to s + 1."""

    own: tuple[int, ...]
    cuts: tuple[tuple[Crossing, ...], ...]
    used: Mapping[int, frozenset[str]] = field(default_factory=dict)  # parameter and buffer names of own stages
    halves: bool = False  # backwards consist of two halves


@dataclass(frozen=True)
class Partial:
    """Partial gradients over an axis: number of exchanged flags, and (elements, itemsize) of this rank's gradients."""

    axis: str
    num_flags: int
    sizes: tuple[tuple[int, int], ...]


def messages(staged: Staged, samples: Sequence[int]) -> Iterator[SizedCollective]:
    """Yield a step's messages between stages; `samples` has the size of each microbatch.

    A tensor goes forward, and its gradient, if any, comes back. Stages of one rank exchange no messages.
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
    """Yield the sums of partial gradients: for each axis an all_reduce of flags, and one for each gradient."""
    for one in partial:
        yield SizedCollective(one.axis, "all_reduce", one.num_flags * _FLOAT32)
        for numel, itemsize in one.sizes:
            yield SizedCollective(one.axis, "all_reduce", numel * max(_FLOAT32, itemsize))


# -------------------------------------------------------------------------------------------------------------- tensor


@dataclass(frozen=True)
class LayerPair:
    """A column-parallel layer and its row-parallel layer; bytes are of one microbatch's activation."""

    input_bytes: int  # the input is whole on every rank
    output_bytes: int  # the output is a partial sum
    input_needs_gradient: bool = True  # the gradient is summed in the backward


@dataclass(frozen=True)
class Positions:
    """Sequences of `length`, divided over `degree` ranks in parts of equal size; see Span in parallel/sequence."""

    length: int
    degree: int

    def padded(self, num_bytes: int) -> int:
        """Return the bytes of all ranks' parts of a tensor with `num_bytes` in total."""
        return num_bytes // self.length * num_positions(self.length, self.degree) * self.degree


def tensor_parallel(
    pairs: Iterable[LayerPair], gathered_bytes: Iterable[int], microbatches: int, positions: Positions | None = None
) -> Iterator[SizedCollective]:
    """Yield the collectives of Megatron-style tensor parallelism: for each pair an all_reduce per direction.

    `gathered_bytes`: outputs of column-parallel layers without a row-parallel partner, each with an all_gather in the
    forward. The caller counts the backward's all_reduce of their input as a LayerPair without output.
    `positions`: for sequences that are divided between the pairs. The input is gathered and the output is
    reduce-scattered; the backward does the opposite.
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
    """Return the gathers at the ends of blocks that pass on parts of sequences: after the last, before the first.

    The first is in the forward, the second in the backward. Before the first block the hidden state is whole on every
    rank, so taking a part sends nothing in the forward.
    """
    return SizedCollective("tensor", "all_gather", positions.padded(hidden_bytes), 2 * microbatches)


def sharded_loss(
    num_targets: int, microbatches: int, smoothed: bool = False, itemsize: int = 4
) -> Iterator[SizedCollective]:
    """Yield the collectives of the cross entropy of divided logits: row maxima, then row sums; none in the backward."""
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
    """Block that computes a part of the positions of sequences of `length`; sizes are per sample and position."""

    name: str
    length: int
    width: int
    opens: bool  # it cuts its hidden state of `width`, and gathers the gradient
    closes: bool  # it gathers its output
    attentions: tuple[Attention, ...] = ()
    needs_gradient: bool = True


def exchanges(
    blocks: Sequence[SlicedBlock], layout: Layout, rank: int, samples: Sequence[int]
) -> Iterator[SizedCollective]:
    """Yield a step's float32 exchanges of a context axis for one rank's blocks; `samples`: size of each microbatch.

    Each attention has an all_to_all of query, key and value, one of its output, and the same for their gradients.
    """
    degree, place = layout.context, layout.coordinate(rank).context

    def width(heads: Heads, attention: Attention, of: int) -> int:
        """Return the numbers of query, key and value per position of one rank."""
        (start, stop), (first, last) = heads.bounds(of), heads.read(of)
        return (stop - start + last - first) * attention.width + (last - first) * attention.value_width

    for block in blocks:
        size = num_positions(block.length, degree)
        for count in samples:
            unit = count * size * _FLOAT32
            for attention in block.attentions:
                ways = 2 if attention.needs_gradient else 1
                heads = Heads(attention.num_query, attention.num_key, degree)
                start, stop = heads.bounds(place)
                whole = sum(width(heads, attention, of) for of in range(degree))
                # The larger of sent and received.
                there = max(whole, degree * width(heads, attention, place))
                back = attention.value_width * max(attention.num_query, degree * (stop - start))
                yield SizedCollective("context", "all_to_all", unit * there, ways)
                yield SizedCollective("context", "all_to_all", unit * back, ways)
            ends = block.closes + (block.opens and block.needs_gradient)
            yield SizedCollective("context", "all_gather", unit * degree * block.width, ends)
