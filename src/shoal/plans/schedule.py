"""Pipeline schedules as lists of actions, one per rank, for the planner to time and the pipeline to execute.

Rank r of P has the stages r, r + P, r + 2P and so on. Receives block and sends do not. Every schedule runs the
backwards of a stage in the order of the microbatches, so gradients are summed in the same order under each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from shoal.errors import PlanError

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")


class ActionKind(StrEnum):
    """Kind of an action; a backward covers inputs and weights, or only one of the two."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"


class Action(NamedTuple):
    """One computation on one stage for one microbatch."""

    kind: ActionKind
    stage: int
    microbatch: int


_STAGE, _MICROBATCH = attrgetter("stage"), attrgetter("microbatch")
Actions = tuple[Action, ...]
Schedule = tuple[Actions, ...]


def refuse_illegal(schedule: str, num_ranks: int, stages_per_rank: int) -> None:
    """Check that a schedule exists for these ranks and stages. Raises: PlanError with the nearest legal values."""
    given = f'pipeline.schedule = "{schedule}" with pipeline.stages_per_rank = {stages_per_rank}'
    if num_ranks < 1 or stages_per_rank < 1:
        given += f" on {num_ranks} ranks"
        conflict, remedy = "a pipeline has at least one rank, and a rank at least one stage", "write 1 at least"
    elif schedule not in SCHEDULES:
        conflict, remedy = "there is no such schedule", f"write one of {', '.join(SCHEDULES)}"
    elif schedule == "interleaved_1f1b" and stages_per_rank < 2:
        conflict = "interleaving takes turns between the stages of a rank, so it needs two of them"
        remedy = 'write stages_per_rank = 2, or schedule = "1f1b"'
    elif schedule in ("1f1b", "zero_bubble") and stages_per_rank > 1:
        conflict = f"{schedule} is defined for one stage a rank"
        remedy = 'write stages_per_rank = 1, or schedule = "interleaved_1f1b"'
    else:
        return
    raise PlanError(given=given, conflict=conflict, remedy=remedy)


def actions(schedule: str, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Schedule:
    """Return each rank's actions in order, for any number of microbatches.

    gpipe: Huang et al., arXiv 1811.06965, breadth first over several stages per rank. 1f1b and interleaved_1f1b:
    Narayanan et al., arXiv 2104.04473. zero_bubble: the schedule ZB-H1 of Qi et al., arXiv 2401.10241.
    Raises: PlanError as `refuse_illegal` does.
    """
    refuse_illegal(schedule, num_ranks, stages_per_rank)
    ranks = range(num_ranks)
    if schedule == "gpipe":
        steps = range(num_microbatches)
        own = [[rank + turn * num_ranks for turn in range(stages_per_rank)] for rank in ranks]
        return tuple(
            (
                *(Action(ActionKind.FORWARD, stage, m) for stage in stages for m in steps),
                *(Action(ActionKind.BACKWARD, stage, m) for stage in reversed(stages) for m in steps),
            )
            for stages in own
        )
    if schedule == "1f1b":
        return tuple(_one_forward_one_backward(rank, num_ranks, num_microbatches) for rank in ranks)
    if schedule == "zero_bubble":
        return tuple(_zero_bubble(rank, num_ranks, num_microbatches) for rank in ranks)
    return tuple(_interleaved(rank, num_ranks, stages_per_rank, num_microbatches) for rank in ranks)


def _one_forward_one_backward(rank: int, num_ranks: int, num_microbatches: int) -> Actions:
    forwards = [Action(ActionKind.FORWARD, rank, m) for m in range(num_microbatches)]
    backwards = [Action(ActionKind.BACKWARD, rank, m) for m in range(num_microbatches)]
    return _in_turns(forwards, backwards, num_ranks - rank - 1)


def _in_turns(forwards: list[Action], backwards: list[Action], num_ahead: int) -> Actions:
    """Return `num_ahead` forwards, then alternately one forward and one backward, then the remaining backwards."""
    ahead = min(num_ahead, len(forwards))
    turns = forwards[:ahead]
    for place, backward in enumerate(backwards):
        turns += forwards[ahead + place : ahead + place + 1]
        turns.append(backward)
    return tuple(turns)


def _zero_bubble(rank: int, num_ranks: int, num_microbatches: int) -> Actions:
    """Return 1f1b with weight gradients that lag `rank` microbatches behind, which fills the wait at the end.

    Every rank then stores the activations of at most P microbatches, as rank 0 does under 1f1b. Rank 0 passes no input
    gradient on and has no lag, so its backward is whole.
    """
    if rank == 0:
        return _one_forward_one_backward(rank, num_ranks, num_microbatches)
    own: list[Action] = []
    num_inputs = 0
    for action in _one_forward_one_backward(rank, num_ranks, num_microbatches):
        if action.kind is ActionKind.FORWARD:
            own.append(action)
            continue
        own.append(Action(ActionKind.BACKWARD_INPUT, rank, action.microbatch))
        num_inputs += 1
        if num_inputs > rank:
            own.append(Action(ActionKind.BACKWARD_WEIGHT, rank, num_inputs - rank - 1))
    done = max(0, num_inputs - rank)
    return (*own, *(Action(ActionKind.BACKWARD_WEIGHT, rank, m) for m in range(done, num_microbatches)))


def _interleaved(rank: int, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Actions:
    """Return Megatron's order for the next multiple of P microbatches, without the nonexistent ones.

    The order stays legal, because microbatches do not depend on each other.
    """
    whole = -(-num_microbatches // num_ranks) * num_ranks
    period = num_ranks * stages_per_rank
    forwards, backwards = [], []
    for place in range(whole * stages_per_rank):
        turn = place % period // num_ranks
        microbatch = place // period * num_ranks + place % num_ranks
        forwards.append(Action(ActionKind.FORWARD, rank + turn * num_ranks, microbatch))
        last = stages_per_rank - 1 - turn
        backwards.append(Action(ActionKind.BACKWARD, rank + last * num_ranks, microbatch))
    num_ahead = 2 * (num_ranks - rank - 1) + (stages_per_rank - 1) * num_ranks
    turns = _in_turns(forwards, backwards, num_ahead)
    return tuple(action for action in turns if action.microbatch < num_microbatches)


def simulate(lists: Sequence[Actions], seconds_of_action: Callable[[Action], float]) -> tuple[float, list[float]]:
    """Return (when the last rank ends, how long each rank computes), in seconds; messages take no time.

    A forward waits for a message from the previous stage; a whole or input backward waits for one from the next stage.
    A rank's bubble is the first value minus its own part of the second. Raises: ValueError if the ranks wait forever.
    """
    num_stages = 1 + max(map(_STAGE, chain.from_iterable(lists)), default=0)
    width = 1 + max(map(_MICROBATCH, chain.from_iterable(lists)), default=0)
    sent: tuple[dict[int, float], dict[int, float]] = ({}, {})  # backwards, forwards: by stage * width + microbatch
    clocks, busy, places = [0.0] * len(lists), [0.0] * len(lists), [0] * len(lists)
    forward_kind, alone_kind = ActionKind.FORWARD, ActionKind.BACKWARD_WEIGHT  # local names are faster
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(lists):
            began = place = places[rank]
            clock, worked, end = clocks[rank], busy[rank], len(own)
            while place < end:
                kind, stage, microbatch = action = own[place]
                forward, alone = kind is forward_kind, kind is alone_kind
                source = stage - 1 if forward else stage + 1
                if not alone and 0 <= source < num_stages:
                    message = sent[forward].get(source * width + microbatch)
                    if message is None:
                        break
                    if message > clock:
                        clock = message
                seconds = seconds_of_action(action)
                clock += seconds
                worked += seconds
                if not alone:
                    sent[forward][stage * width + microbatch] = clock
                place += 1
            clocks[rank], busy[rank], places[rank] = clock, worked, place
            moved = moved or place > began
    if any(place < len(own) for place, own in zip(places, lists, strict=True)):
        raise ValueError("the ranks of this schedule wait for each other")
    return max(clocks, default=0.0), busy


@lru_cache(maxsize=65536)
def in_flight(schedule: str, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> tuple[int, ...]:
    """Return each rank's maximum of microbatches, over its stages, whose activations are in memory.

    Activations stay until the weights' gradient. The maximum is the forwards ahead of the first backward, plus one.
    """
    if schedule == "gpipe":
        return (num_microbatches * stages_per_rank,) * num_ranks
    if schedule == "1f1b":
        return tuple(min(num_ranks - rank, num_microbatches) for rank in range(num_ranks))
    if schedule == "zero_bubble":
        return (min(num_ranks, num_microbatches),) * num_ranks
    ahead = (2 * (num_ranks - rank - 1) + (stages_per_rank - 1) * num_ranks + 1 for rank in range(num_ranks))
    return tuple(_that_exist(first, num_ranks, stages_per_rank, num_microbatches) for first in ahead)


def _that_exist(first: int, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> int:
    """Return how many of a rank's first forwards in Megatron's order belong to existing microbatches."""
    existing = 0
    while first > 0 and num_microbatches > 0:
        turns, part = divmod(min(first, num_ranks * stages_per_rank), num_ranks)
        among = min(num_ranks, num_microbatches)
        existing += turns * among + min(part, among)
        first -= num_ranks * stages_per_rank
        num_microbatches -= num_ranks
    return existing


@lru_cache(maxsize=65536)
def in_flight_by_stage(num_ranks: int, stages_per_rank: int, num_microbatches: int) -> tuple[tuple[int, ...], ...]:
    """Return the most microbatches in flight on each stage of each rank under interleaved_1f1b, at any time.

    After b backwards of a rank, its forwards lead by the number ahead of the first backward. Both pass through the
    stages of the rank in runs of P microbatches, the backwards from the last stage. A stage has most in flight before
    the first backward, before a run of its backwards, or after a run of its forwards.
    """
    period = num_ranks * stages_per_rank

    def done(turn: int, passes: int) -> int:
        """Return how many of a rank's first passes in this direction belong to the stage of this turn."""
        rounds, rest = divmod(passes, period)
        return rounds * num_ranks + min(num_ranks, max(0, rest - turn * num_ranks))

    def most(turn: int, ahead: int) -> int:
        last = stages_per_rank - 1 - turn
        times = (0, last * num_ranks, ((turn + 1) * num_ranks - ahead) % period)
        return min(num_microbatches, max(done(turn, ahead + time) - done(last, time) for time in times))

    ahead = (2 * (num_ranks - rank - 1) + (stages_per_rank - 1) * num_ranks + 1 for rank in range(num_ranks))
    return tuple(tuple(most(turn, first) for turn in range(stages_per_rank)) for first in ahead)
