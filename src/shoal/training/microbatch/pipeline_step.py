"""Step of a pipeline rank: all microbatches through its stages, in the order of the schedule."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from shoal.data.loader import Microbatch
from shoal.errors import JobError
from shoal.parallel.base import AccumulatingStrategy, buffer_sums
from shoal.parallel.pipeline.pipeline import Pipeline, Work
from shoal.plans.schedule import Action
from shoal.training.microbatch.compute import ForwardBackward, labelled


class StageStep:
    """The passes of a rank's pipeline stages over its microbatches.

    The first `own` microbatches count. The others keep the rank in step with ranks that have more.
    """

    def __init__(self, passes: ForwardBackward, microbatches: list[Microbatch], batches: list[Any], own: int) -> None:
        """Store the microbatches and their `batches`, which are on the device."""
        assert isinstance(passes.parts.strategy, AccumulatingStrategy), "exact mode has no stages"
        self._passes, self._parts, self._strategy = passes, passes.parts, passes.parts.strategy
        self._microbatches, self._batches, self._own = microbatches, batches, own
        self._done = [0] * len(microbatches)

    def run(self, pipeline: Pipeline) -> None:
        """Compute all microbatches, and add their gradients and sums.

        Raises: an error of this rank, after its part for the other ranks; RedoError.
        Collective: the pipeline's ranks.
        """
        computer = self._parts.computer
        if computer.computation.randomness == "opaque":
            raise JobError(
                given="a model that draws at random in ways that cannot be told apart by grain, in pipeline stages",
                conflict="a stage does not compute the modules before it, and cannot tell what they would have drawn",
                remedy="draw with torch's functions on tensors whose first dim is the samples, or use "
                "layout.pipeline = 1",
            )
        work = Work(
            computer.pair,
            self._batches,
            lambda number: computer.scope_of_stage(self._microbatches[number]),
            self._begins,
            self._forwarded,
            before_backward=lambda number, last: self._strategy.arm() if last else None,
            backwarded=lambda number, last: self._refuse_written(),
            around=self._labelled,
        )
        pipeline.run(work)
        self._parts.observer.computed()

    def _labelled(self, action: Action) -> AbstractContextManager[None]:
        what = f"{action.kind.value.replace('_', ' ')}, stage {action.stage}, microbatch {action.microbatch}, "
        return labelled(self._parts.clock, self._microbatches[action.microbatch], what, stage=action.stage)

    def _refuse_written(self) -> None:
        """Raise JobError if the job's own recomputation has written a buffer in the backward."""
        buffers = self._parts.buffers
        written = sorted(buffers.written())
        buffers.restore()
        if written:
            raise JobError(
                given=f"a backward that writes buffer {written[0]}, in pipeline stages: the model recomputes what "
                "writes it, by torch.utils.checkpoint",
                conflict="the buffer is written in the forward and again in the backward, and between the two a stage "
                "computes other microbatches",
                remedy="leave out the model's own checkpoint and write memory.recompute = 'full', which writes a "
                "buffer once; or use layout.pipeline = 1",
            )

    def _begins(self, number: int) -> None:
        if number < self._own:
            self._parts.observer.microbatch(self._microbatches[number], self._batches[number])

    def _forwarded(self, number: int, result: Any) -> Tensor | None:
        parts, buffers, microbatch = self._parts, self._parts.buffers, self._microbatches[number]
        if number >= self._own:
            buffers.restore(in_graph=True)
            self._strategy.add(buffer_sums(buffers.zeros()))
            return None if result is None or not result[0].requires_grad else result[0] * 0.0
        parts.computer.check_buffers(buffers)
        written = self._passes.weighted_buffers(microbatch, again=self._done[number] > 0)
        buffers.restore(in_graph=True)
        self._done[number] += 1
        if result is None:
            parts.observer.forwarded()
            self._strategy.add(buffer_sums(written))
            return None
        total, weight = result
        sums, total = self._passes.terms(microbatch, total, weight, written)
        self._strategy.add(sums)
        return total if total.requires_grad else None
