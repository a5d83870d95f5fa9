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
from shoal.training.microbatch.step import ForwardBackward, labelled


def run_stages(
    pipeline: Pipeline, passes: ForwardBackward, microbatches: list[Microbatch], batches: list[Any], own: int
) -> None:
    """Compute all microbatches in this rank's stages, and add their gradients and sums.

    `batches`: of the microbatches, on the device. The first `own` microbatches count. The others keep the rank in step
    with ranks that have more.
    Raises: an error of this rank, after its part for the other ranks; RedoError.
    Collective: the pipeline's ranks, with the same data.
    """
    parts, computer, buffers, strategy = (
        passes.parts,
        passes.parts.computer,
        passes.parts.buffers,
        passes.parts.strategy,
    )
    assert isinstance(strategy, AccumulatingStrategy), "exact mode has no stages"
    num_forwards, loads = [0] * len(microbatches), parts.sharded_model.division.expert_loads
    if computer.computation.randomness == "opaque":
        raise JobError(
            given="a model that draws at random in ways that cannot be told apart by grain, in pipeline stages",
            conflict="a stage does not compute the modules before it, and cannot tell what they would have drawn",
            remedy="draw with torch's functions on tensors whose first dim is the samples, or use layout.pipeline = 1",
        )

    def around(action: Action) -> AbstractContextManager[None]:
        what = f"{action.kind.value.replace('_', ' ')}, stage {action.stage}, microbatch {action.microbatch}, "
        return labelled(parts.clock, microbatches[action.microbatch], what, stage=action.stage)

    def scope(number: int) -> AbstractContextManager[None]:
        loads.counts = number < own
        return computer.scope_of_stage(microbatches[number])

    def begins(number: int) -> None:
        if number < own:
            parts.observer.microbatch(microbatches[number], batches[number])

    def forwarded(number: int, result: Any) -> Tensor | None:
        microbatch = microbatches[number]
        if number >= own:
            buffers.restore(in_graph=True)
            strategy.add(buffer_sums(buffers.zeros()))
            return None if result is None or not result[0].requires_grad else result[0] * 0.0
        computer.check_buffers(buffers)
        written = passes.weighted_buffers(microbatch, again=num_forwards[number] > 0)
        buffers.restore(in_graph=True)
        num_forwards[number] += 1
        if result is None:
            parts.observer.forwarded()
            strategy.add(buffer_sums(written))
            return None
        total, weight = result
        sums, total = passes.terms(microbatch, total, weight, written)
        strategy.add(sums)
        return total if total.requires_grad else None

    def backwarded(number: int, last: bool) -> None:
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

    work = Work(
        computer.pair,
        batches,
        scope,
        begins,
        forwarded,
        before_backward=lambda number, last: strategy.arm() if last else None,
        backwarded=backwarded,
        around=around,
    )
    pipeline.run(work)
    loads.counts = False
    parts.observer.computed()
