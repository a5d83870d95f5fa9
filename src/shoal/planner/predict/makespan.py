"""Makespan of a pipeline: seconds from the first forward to the end of the last rank under a schedule."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.planner.predict.lower_bounds import PipelineShape
from shoal.planner.predict.stage_time import Passes
from shoal.plans.schedule import Action, ActionKind, actions, simulate


def makespan(shape: PipelineShape, stages: Sequence[Passes], message: float) -> float:
    """Return the seconds of all passes of a step over these stages. `message`: seconds between two stages."""
    forwards = [one.forward_seconds + message for one in stages]
    backwards = [one.backward_seconds + message for one in stages]
    inputs = [one.backward_seconds - one.weight_seconds + message for one in stages]
    weights = [one.weight_seconds for one in stages]
    if shape.schedule == "1f1b":
        return _in_turns(forwards, backwards, (), shape.microbatches)
    if shape.schedule == "zero_bubble":  # the first rank does not split its backwards, see `actions`
        return _in_turns(forwards, [backwards[0], *inputs[1:]], weights, shape.microbatches)

    def seconds(action: Action) -> float:
        kind, stage, _ = action
        if kind is ActionKind.FORWARD:
            return forwards[stage]
        if kind is ActionKind.BACKWARD:
            return backwards[stage]
        return inputs[stage] if kind is ActionKind.BACKWARD_INPUT else weights[stage]

    return simulate(actions(*shape), seconds)[0]


def _in_turns(
    forwards: Sequence[float], backwards: Sequence[float], weights: Sequence[float], microbatches: int
) -> float:
    """Return what `simulate` returns, to the bit, for schedules of one stage per rank that alternate the passes.

    A search calls this for thousands of pipelines, so no action becomes an object. Rank r of P runs P - r - 1 + m
    forwards before its backward of microbatch m. Deferred `weights` passes of microbatch m - r follow that backward.
    """
    ranks = range(len(forwards))
    clocks = [0.0 for _ in ranks]
    sent: list[list[float]] = [[] for _ in ranks]  # end time of each forward, by rank
    for turn in range(microbatches):
        above: list[float] = []
        for rank in ranks:
            clock, own, seconds = clocks[rank], sent[rank], forwards[rank]
            for microbatch in range(len(own), min(len(forwards) - rank + turn, microbatches)):
                if rank and above[microbatch] > clock:
                    clock = above[microbatch]
                clock += seconds
                own.append(clock)
            clocks[rank], above = clock, own
        message = 0.0
        for rank in reversed(ranks):
            message = clocks[rank] = max(message, clocks[rank]) + backwards[rank]
            if weights and 0 < rank <= turn:
                clocks[rank] += weights[rank]
    for rank in ranks[1:] if weights else ():
        for _ in range(min(rank, microbatches)):
            clocks[rank] += weights[rank]
    return max(clocks)
