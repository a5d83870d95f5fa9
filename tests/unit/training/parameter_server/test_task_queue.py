"""What is given out, when, and how stale it may become: every order of events that a run can have."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.training.parameter_server.task_queue import Rules, Task, TaskQueue


def desk(num_parts: int, bound: int | None, version: int = 0, limit: int = 100) -> TaskQueue:
    found = TaskQueue(Rules(num_parts, bound), version, lambda step, part, parts: True)
    found.limit = limit
    return found


def test_a_step_in_parts_is_begun_once_the_one_before_is_applied() -> None:
    found = desk(2, 0)
    first, second = found.take(), found.take()
    assert [(t.step, t.part, t.version) for t in (first, second) if t] == [(0, 0, 0), (0, 1, 0)]
    assert found.take() is None
    for task in (first, second):
        assert task is not None
        assert found.done(task.ticket) == task
    assert found.take() is None
    found.applied()
    assert (after := found.take()) is not None
    assert (after.step, after.version) == (1, 1)


def test_parts_without_grains_are_not_given_out() -> None:
    found = TaskQueue(Rules(3, 0), 0, lambda step, part, parts: part < 2)
    found.limit = 1
    assert [t.part for t in (found.take(), found.take(), found.take()) if t] == [0, 1]
    assert found.parts(0) == 2


def test_what_is_put_back_comes_first_and_under_another_ticket() -> None:
    found = desk(1, None)
    first, second = found.take(), found.take()
    assert first is not None
    assert second is not None
    found.put_back(first)
    again = found.take()
    assert again is not None
    assert (again.step, again.part) == (first.step, first.part)
    assert again.ticket > second.ticket
    assert found.done(first.ticket) is None, "somebody else has it"
    assert found.done(again.ticket) == again


def test_nothing_beyond_the_limit() -> None:
    found = desk(1, None, limit=2)
    assert [t.step for t in (found.take(), found.take(), found.take()) if t] == [0, 1]
    assert found.frontier == 2


@given(
    bound=st.integers(0, 5),
    num_workers=st.integers(1, 6),
    choices=st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=80),
)
def test_no_update_is_staler_than_the_bound(bound: int, num_workers: int, choices: list[tuple[int, bool]]) -> None:
    """Workers finish in any order, and die at any time: staleness stays within the bound, and every step is done."""
    found = desk(1, bound, limit=30)
    out: list[Task] = []
    done: list[int] = []

    def fill() -> None:
        while len(out) < num_workers and (task := found.take()) is not None:
            out.append(task)

    def finish(place: int) -> None:
        task = out.pop(place)
        assert found.done(task.ticket) == task
        assert found.version - task.version <= bound
        found.applied()
        done.append(task.step)

    for place, dies in choices:
        fill()
        if not out:
            break
        if dies:
            found.put_back(out.pop(place % len(out)))
        else:
            finish(place % len(out))
    fill()
    while out:
        finish(0)
        fill()
    assert sorted(done) == list(range(30))


def test_a_bound_lets_so_many_compute_at_a_time() -> None:
    for bound in range(4):
        found = desk(1, bound)
        taken = [found.take() for _ in range(6)]
        assert sum(task is not None for task in taken) == bound + 1
