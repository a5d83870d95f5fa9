"""One step of a rank that computes some stages of the model: all microbatches, in the order of the schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shoal.data.microbatch import Microbatch
from shoal.errors import JobError
from shoal.numerics.batch_statistics import StepBuffers
from shoal.parallel.base import Strategy, buffer_sums, microbatch_sums
from shoal.parallel.pipeline.pipeline import Pipeline, Work
from shoal.training.computation import LossComputer, check_gradient
from shoal.training.observer import Observer


@dataclass(frozen=True)
class StageStep:
    """What the stages of a step are computed with."""

    computer: LossComputer
    strategy: Strategy
    buffers: StepBuffers
    observer: Observer
    counts_loss: bool  # whether this rank, of those with the same grains, counts their losses
    own: int  # microbatches that count; those after them fill up, in step with ranks that have more

    def run(self, pipeline: Pipeline, microbatches: list[Microbatch], batches: list[Any], factor: float) -> None:
        """Adds the gradients and sums of these microbatches; loss totals are multiplied by `factor`.

        Raises: what fails on this rank, after its part for the others; RedoError. Collective: the pipeline's ranks.
        """
        self._refuse_opaque()
        done = [0] * len(microbatches)

        def begins(number: int) -> None:
            if number < self.own:
                self.observer.microbatch(microbatches[number], batches[number])

        def filled(result: Any) -> Tensor | None:
            self.buffers.restore()
            self.strategy.add(buffer_sums(self.buffers.weighted(0)))
            return None if result is None else result[0] * 0.0

        def forwarded(number: int, result: Any) -> Tensor | None:
            if number >= self.own:
                return filled(result)
            microbatch = microbatches[number]
            self.computer.check_buffers(self.buffers)
            buffers = self.buffers.weighted(microbatch.num_samples)
            self.buffers.restore()
            if done[number]:  # a later stage on this rank: the others' buffers were counted with the first
                buffers = buffers - self.buffers.weighted(microbatch.num_samples)
            done[number] += 1
            if result is None:
                self.observer.forwarded()
                self.strategy.add(buffer_sums(buffers))
                return None
            total, weight = result
            check_gradient(total)
            own = microbatch_sums(microbatch, total, weight, buffers) if self.counts_loss else buffer_sums(buffers)
            self.strategy.add(own)
            self.observer.loss(total.detach(), weight)
            scaled: Tensor = total * factor if factor != 1.0 else total
            return scaled

        def before_backward(number: int, last: bool) -> None:
            if last:
                self.strategy.arm()

        def backwarded(number: int, last: bool) -> None:
            self.buffers.restore()  # what recomputation has changed

        pipeline.run(
            self.computer.model,
            Work(
                self.computer.pair,
                batches,
                lambda number: self.computer.scope_of_stage(microbatches[number]),
                begins,
                forwarded,
                before_backward,
                backwarded,
            ),
        )
        self.observer.computed()

    def _refuse_opaque(self) -> None:
        if self.computer.computation.randomness == "opaque":
            raise JobError(
                given="a model that draws at random in ways that cannot be told apart by grain, in pipeline stages",
                conflict="a stage does not compute the modules before it, and cannot tell what they would have drawn",
                remedy="draw with torch's functions on tensors whose first dim is the samples, or use "
                "layout.pipeline = 1",
            )
