"""Ranks and coordinates are one to one, and the groups of each axis partition the world."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shoal.errors import PlanError
from shoal.plans.plan import AXES, Coordinate, Layout, Plan, divisors


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    degrees = {axis: draw(st.integers(1, 5)) for axis in AXES}
    assume(math.prod(degrees.values()) <= 300)
    return Layout(**degrees)


@given(layouts())
def test_rank_and_coordinate_are_one_to_one(layout: Layout) -> None:
    places = [layout.coordinate(rank) for rank in range(layout.world_size)]
    assert len(set(places)) == layout.world_size
    assert [layout.rank(place) for place in places] == list(range(layout.world_size))
    assert all(0 <= getattr(place, axis) < layout.degree(axis) for place in places for axis in AXES)


@given(layouts(), st.sampled_from(AXES))
def test_groups_of_an_axis_partition_the_world(layout: Layout, axis: str) -> None:
    groups = list(layout.groups(axis))
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    for group in groups:
        assert len(group) == layout.degree(axis)
        assert len({layout.coordinate(rank)._replace(**{axis: 0}) for rank in group}) == 1
        assert [getattr(layout.coordinate(rank), axis) for rank in group] == list(range(layout.degree(axis)))


@given(layouts(), st.data())
def test_experts_of_a_stage_are_divided_among_neighbours(layout: Layout, data: st.DataObject) -> None:
    expert = data.draw(st.sampled_from(divisors(layout.stage_ranks)))
    layout = layout.model_copy(update={"expert": expert})
    groups, copies = layout.expert_groups(), layout.expert_copies()
    for parts, size in ((groups, expert), (copies, layout.stage_ranks // expert)):
        assert sorted(rank for part in parts for rank in part) == list(range(layout.world_size))
        assert {len(part) for part in parts} == {size}
        assert all(len({layout.coordinate(rank).pipeline for rank in part}) == 1 for part in parts)
    assert all(rank % expert == part[0] % expert for part in copies for rank in part)
    assert all(len(set(group) & set(part)) <= 1 for group in groups for part in copies)


def test_tensor_neighbours_are_neighbours_in_rank() -> None:
    layout = Layout(data=2, tensor=4)
    assert list(layout.groups("tensor")) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert list(layout.groups("data")) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_what_is_outside_the_world_is_refused() -> None:
    layout = Layout(data=2, shard=3)
    for rank in (-1, 6):
        with pytest.raises(IndexError, match="world of 6"):
            layout.coordinate(rank)
    with pytest.raises(IndexError, match=r"shard = 3 is not in \[0, 3\)"):
        layout.rank(Coordinate(0, 0, 3, 0, 0))


@pytest.mark.parametrize("degree", [0, -1, True, 2.0, "2"])
def test_degrees_count_processes(degree: object) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_mapping({"layout": {"data": degree, "tensor": 0}}, source="plan")
    assert f"data = {degree!r}" in caught.value.given
    assert "tensor = 0" in caught.value.given
