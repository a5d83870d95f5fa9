"""Makespan of a pipeline: seconds from the first forward to the last rank's end, under a schedule."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.planner.predict.lower_bounds import PipelineShape
from shoal.planner.predict.stage_time import Passes
from shoal.plans.schedule import Action, ActionKind, actions, simulate


def makespan(shape: PipelineShape, stages: Sequence[Passes], message: float) -> float:
    """Seconds of a step's passes over these stages, each of which waits for a message that takes so long."""
    forwards = [one.forward_seconds + message for one in stages]
    backwards = [one.backward_seconds + message for one in stages]
    inputs = [one.backward_seconds - one.weight_seconds + message for one in stages]
    weights = [one.weight_seconds for one in stages]
    if shape.schedule == "1f1b":
        return _in_turns(forwards, backwards, (), shape.microbatches)
    if shape.schedule == "zero_bubble":  # the first rank's backwards are one, see `actions`
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
    """What `simulate` returns, to the bit, of one stage a rank whose forwards and backwards take turns.

    A search asks for it of thousands of pipelines: here no action is an object. Rank r of P has done P - r - 1 + m
    forwards before its backward m, and `weights`, where they are put off, of microbatch m - r after that backward.
    """
    ranks = range(len(forwards))
    clocks = [0.0 for _ in ranks]
    sent: list[list[float]] = [[] for _ in ranks]  # when each forward ends
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
