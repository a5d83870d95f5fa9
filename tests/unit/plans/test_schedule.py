from __future__ import annotations

from collections import Counter
from itertools import accumulate, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import PlanError
from shoal.plans.schedule import (
    SCHEDULES,
    Action,
    ActionKind,
    Actions,
    Schedule,
    actions,
    in_flight,
    in_flight_by_stage,
    refuse_illegal,
    simulate,
)

SECONDS = {
    ActionKind.FORWARD: 1.0,
    ActionKind.BACKWARD: 2.0,
    ActionKind.BACKWARD_INPUT: 1.0,
    ActionKind.BACKWARD_WEIGHT: 1.0,
}


def most_in_flight(own: Actions) -> int:
    """The most forwards, over a rank's stages, with activations in memory at once: until their weights' gradient."""
    held = most = 0
    for action in own:
        if action.kind is ActionKind.FORWARD:
            held += 1
            most = max(most, held)
        elif action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT):
            held -= 1
    return most


def seconds(action: Action) -> float:
    return SECONDS[action.kind]


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, int, int, int]:
    schedule = draw(st.sampled_from(SCHEDULES))
    smallest, largest = {"gpipe": (1, 4), "interleaved_1f1b": (2, 4)}.get(schedule, (1, 1))
    return schedule, draw(st.integers(1, 8)), draw(st.integers(smallest, largest)), draw(st.integers(1, 24))


def executed(lists: Schedule, num_stages: int) -> list[tuple[int, Action]]:
    """(rank, action) in an order in which ranks with blocking receives get to run them, and fewer where they hang."""
    done: set[tuple[str, int, int]] = set()
    order = []
    places = [0] * len(lists)
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(lists):
            if places[rank] == len(own):
                continue
            action = own[places[rank]]
            here, m = action.stage, action.microbatch
            if action.kind is ActionKind.FORWARD:
                needs = {("F", here - 1, m)} if here else set()
            elif action.kind is ActionKind.BACKWARD_WEIGHT:
                needs = {("B", here, m)}
            else:
                needs = {("F", here, m)} | ({("B", here + 1, m)} if here < num_stages - 1 else set())
            if not needs <= done:
                continue
            label = {ActionKind.FORWARD: "F", ActionKind.BACKWARD_WEIGHT: "W"}.get(action.kind, "B")
            done.add((label, here, m))
            order.append((rank, action))
            places[rank] += 1
            moved = True
    return order


@given(cases())
def test_every_action_once_on_its_rank_and_nobody_waits_forever(case: tuple[str, int, int, int]) -> None:
    schedule, num_ranks, stages_per_rank, num_microbatches = case
    lists = actions(schedule, num_ranks, stages_per_rank, num_microbatches)
    num_stages = num_ranks * stages_per_rank
    assert len(lists) == num_ranks
    order = executed(lists, num_stages)
    assert len(order) == sum(map(len, lists)), "a rank waits forever"
    assert all(action.stage % num_ranks == rank for rank, action in order)
    counted = Counter((a.kind, a.stage, a.microbatch) for _, a in order)
    assert set(counted.values()) == {1}
    for stage in range(num_stages):
        for m in range(num_microbatches):
            whole = (ActionKind.BACKWARD, stage, m) in counted
            halves = [(kind, stage, m) in counted for kind in (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)]
            assert (ActionKind.FORWARD, stage, m) in counted
            assert whole != all(halves)
            assert all(halves) == any(halves)
    simulate(lists, seconds)


@given(cases())
def test_backwards_of_a_stage_are_in_the_order_of_the_microbatches(case: tuple[str, int, int, int]) -> None:
    schedule, num_ranks, stages_per_rank, num_microbatches = case
    for own in actions(schedule, num_ranks, stages_per_rank, num_microbatches):
        for stage in {action.stage for action in own}:
            for kind in (
                ActionKind.FORWARD,
                ActionKind.BACKWARD,
                ActionKind.BACKWARD_INPUT,
                ActionKind.BACKWARD_WEIGHT,
            ):
                numbers = [a.microbatch for a in own if a.stage == stage and a.kind is kind]
                assert numbers == sorted(numbers)


@given(cases())
def test_messages_are_received_in_the_order_in_which_they_are_sent(case: tuple[str, int, int, int]) -> None:
    """NCCL matches sends and receives between two ranks by their order alone."""
    schedule, num_ranks, stages_per_rank, num_microbatches = case
    num_stages = num_ranks * stages_per_rank
    sent: dict[tuple[int, int, str], list[tuple[int, int]]] = {}
    received: dict[tuple[int, int, str], list[tuple[int, int]]] = {}
    for rank, own in enumerate(actions(schedule, num_ranks, stages_per_rank, num_microbatches)):
        for a in own:
            if a.kind is ActionKind.FORWARD:
                if a.stage > 0:
                    received.setdefault(((rank - 1) % num_ranks, rank, "F"), []).append((a.stage, a.microbatch))
                if a.stage < num_stages - 1:
                    sent.setdefault((rank, (rank + 1) % num_ranks, "F"), []).append((a.stage + 1, a.microbatch))
            elif a.kind is not ActionKind.BACKWARD_WEIGHT:
                if a.stage < num_stages - 1:
                    received.setdefault(((rank + 1) % num_ranks, rank, "B"), []).append((a.stage, a.microbatch))
                if a.stage > 0:
                    sent.setdefault((rank, (rank - 1) % num_ranks, "B"), []).append((a.stage - 1, a.microbatch))
    assert sent == received


def bubble(schedule: str, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> float:
    """The idle share of the busy time, with forwards of 1 / stages_per_rank seconds."""
    lists = actions(schedule, num_ranks, stages_per_rank, num_microbatches)
    end, busy = simulate(lists, lambda action: seconds(action) / stages_per_rank)
    return (end - busy[0]) / busy[0]


@given(st.integers(1, 8), st.integers(1, 24))
def test_bubble_of_gpipe_and_1f1b(num_ranks: int, num_microbatches: int) -> None:
    for schedule in ("gpipe", "1f1b"):
        assert bubble(schedule, num_ranks, 1, num_microbatches) == pytest.approx((num_ranks - 1) / num_microbatches)


@given(st.integers(2, 8), st.integers(2, 4), st.integers(1, 4))
def test_bubble_of_interleaving(num_ranks: int, stages_per_rank: int, rounds: int) -> None:
    found = bubble("interleaved_1f1b", num_ranks, stages_per_rank, rounds * num_ranks)
    assert found == pytest.approx((num_ranks - 1) / (stages_per_rank * rounds * num_ranks))


@given(st.integers(2, 8), st.integers(0, 16))
def test_bubble_without_weights_in_the_way(num_ranks: int, further: int) -> None:
    num_microbatches = num_ranks + further
    lists = actions("zero_bubble", num_ranks, 1, num_microbatches)
    end, busy = simulate(lists, seconds)
    plain, _ = simulate(actions("1f1b", num_ranks, 1, num_microbatches), seconds)
    assert end < plain
    # (p - 1)(TF + TB - TW) of arXiv 2401.10241, table 2, with all three 1.
    assert end - busy[0] == pytest.approx(num_ranks - 1)


@given(st.integers(1, 8), st.integers(1, 24))
def test_activations_held(num_ranks: int, num_microbatches: int) -> None:
    for rank, own in enumerate(actions("1f1b", num_ranks, 1, num_microbatches)):
        assert most_in_flight(own) == min(num_ranks - rank, num_microbatches)
    for own in actions("gpipe", num_ranks, 1, num_microbatches):
        assert most_in_flight(own) == num_microbatches
    for own in actions("zero_bubble", num_ranks, 1, num_microbatches):
        assert most_in_flight(own) <= min(num_ranks, num_microbatches)


@pytest.mark.parametrize(
    ("schedule", "stages_per_rank", "says"),
    [
        ("interleaved_1f1b", 1, "stages_per_rank = 2"),
        ("1f1b", 2, "stages_per_rank = 1"),
        ("zero_bubble", 3, "interleaved_1f1b"),
        ("1b1f", 1, "gpipe"),
        ("gpipe", 0, "1 at least"),
    ],
)
def test_what_does_not_exist_is_refused_with_what_does(schedule: str, stages_per_rank: int, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        refuse_illegal(schedule, 4, stages_per_rank)


def test_ranks_that_wait_for_each_other_are_noticed() -> None:
    lists = ((Action(ActionKind.FORWARD, 1, 0),), (Action(ActionKind.FORWARD, 2, 0), Action(ActionKind.FORWARD, 0, 0)))
    with pytest.raises(ValueError, match="wait"):
        simulate(lists, seconds)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_in_flight_is_known_without_all_actions(schedule: str) -> None:
    several = {"gpipe": (1, 3), "interleaved_1f1b": (2, 3)}.get(schedule, (1,))
    for ranks, per, microbatches in product((1, 2, 3, 5), several, range(1, 24)):
        whole = actions(schedule, ranks, per, microbatches)
        assert in_flight(schedule, ranks, per, microbatches) == tuple(map(most_in_flight, whole))


def test_fewer_microbatches_are_in_flight_on_later_stages() -> None:
    assert in_flight("1f1b", 4, 1, 8) == (4, 3, 2, 1)
    assert in_flight("1f1b", 4, 1, 2) == (2, 2, 2, 1)
    assert in_flight("gpipe", 4, 1, 8) == (8,) * 4


def most_of_stage(own: Actions, stage: int) -> int:
    """The most microbatches of one stage between forward and backward."""
    changes = [1 if action.kind is ActionKind.FORWARD else -1 for action in own if action.stage == stage]
    return max(accumulate(changes))


@pytest.mark.parametrize(("ranks", "per"), [(2, 2), (4, 2), (3, 3), (4, 4), (8, 2)])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_what_is_in_flight_of_each_stage_is_known_without_all_actions(ranks: int, per: int, rounds: int) -> None:
    whole = actions("interleaved_1f1b", ranks, per, rounds * ranks)
    found = [tuple(most_of_stage(own, rank + turn * ranks) for turn in range(per)) for rank, own in enumerate(whole)]
    assert in_flight_by_stage(ranks, per, rounds * ranks) == tuple(found)
    assert found[-1][-1] == 1  # behind the last stage's forward comes its backward


@pytest.mark.parametrize("microbatches", [1, 3, 5, 7])
def test_of_microbatches_that_do_not_divide_evenly_no_fewer_are_in_flight(microbatches: int) -> None:
    whole = actions("interleaved_1f1b", 4, 2, microbatches)
    for rank, own in enumerate(whole):
        bound = in_flight_by_stage(4, 2, microbatches)[rank]
        assert all(most_of_stage(own, rank + 4 * turn) <= bound[turn] <= microbatches for turn in range(2))
