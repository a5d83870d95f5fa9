"""Traffic of a tensor-parallel model in a step, by the planner's formulas, from the shapes of a traced run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from shoal.parallel.sequence.tensor_sequence import SequencePlan
from shoal.parallel.tensor.heads import sizes
from shoal.parallel.tensor.plan import TensorPlan
from shoal.plans.accounting.collectives import SizedCollective
from shoal.plans.accounting.model_parallel import LayerPair, Positions, sharded_loss, stream, tensor_parallel

# Everything is float32.
_ITEMSIZE = 4


@dataclass(frozen=True)
class TensorTraffic:
    """Traffic of a model divided by `plan`, traced with a batch of `rows` samples. All batches have its lengths."""

    plan: TensorPlan
    sequences: SequencePlan
    rows: int
    degree: int

    def __call__(self, microbatches: Sequence[int]) -> list[SizedCollective] | None:
        """Return the traffic of microbatches of these sample counts; None if blocks contain whole sequences."""
        blocks = self.sequences.blocks.values()
        if any(block.wholes for block in blocks):
            return None
        return [one for samples in microbatches for one in self._of(samples)]

    def _of(self, samples: int) -> Iterator[SizedCollective]:
        opened, names = 0, list(self.sequences.blocks)
        for pair in self.plan.pairs:
            block = next((b for b in self.sequences.blocks if pair.candidate.row.startswith(f"{b}.")), None)
            shapes = self.plan.shapes
            for into, out in zip(shapes[pair.candidate.columns[0]], shapes[pair.candidate.row], strict=True):
                sent = LayerPair(
                    self._bytes(into.input, samples), self._bytes(out.output, samples), into.needs_gradient
                )
                where = Positions(into.input[1], self.degree) if block is not None else None
                yield from tensor_parallel([sent], [], 1, positions=where)
                if where is not None and block is not None:
                    begun = sum(self.sequences.blocks[name].opens for name in names[: names.index(block) + 1])
                    if opened < begun:
                        opened += 1
                        yield stream(sent.output_bytes, where, 1)
        for name in self.plan.rows:
            for call in self.plan.shapes[name]:
                yield from tensor_parallel([LayerPair(0, self._bytes(call.output, samples), False)], [], 1)
        for name in self.plan.gathered:
            for call in self.plan.shapes[name]:
                entry = LayerPair(self._bytes(call.input, samples), 0, call.needs_gradient)
                size = call.output[call.feature_dim]
                largest = self._bytes(call.output, samples) // size * max(sizes(size, self.degree))
                gathered = [] if name in self.plan.sliced else [largest * self.degree]
                yield from tensor_parallel([entry], gathered, 1)
        for targets, smoothed in self.plan.losses:
            yield from sharded_loss(targets * samples // self.rows, 1, smoothed, _ITEMSIZE)

    def _bytes(self, shape: tuple[int, ...], samples: int) -> int:
        """Scale the bytes of a tensor of the traced batch to `samples`, if its first dim counts samples."""
        scales = shape[0] % self.rows == 0 if len(shape) != 2 else shape[0] == self.rows
        return prod(shape) * _ITEMSIZE * (samples if scales else self.rows) // self.rows
