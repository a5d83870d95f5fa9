"""Which units a stage gets."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.planner.predict.stage_split import balanced, by_names, equal, thresholds
from shoal.planner.profile.values import Body, Unit

PLAIN, REPEATED = Body(()), Body((), repeated=True)
UNITS = (Unit("embedding", PLAIN), *(Unit(f"blocks.{i}", REPEATED) for i in range(6)), Unit("head", PLAIN))


def names(stages: tuple[tuple[Unit, ...], ...]) -> list[list[str]]:
    return [[unit.name.removeprefix("blocks.") for unit in stage] for stage in stages]


def test_stages_begin_with_the_names_of_the_plan():
    assert names(by_names(UNITS, ["blocks.1", "blocks.4"])) == [["embedding", "0"], ["1", "2", "3"], ["4", "5", "head"]]


def test_equal_numbers_of_blocks():
    assert names(equal(UNITS, 3)) == [["embedding", "0", "1"], ["2", "3"], ["4", "5", "head"]]
    assert names(equal(UNITS, 4)) == [["embedding", "0", "1"], ["2", "3"], ["4"], ["5", "head"]]


def test_a_stage_takes_the_unit_that_passes_its_share():
    assert names(thresholds(UNITS, [0, 1, 1, 1, 1, 1, 1, 2], 2)) == [
        ["embedding", "0", "1", "2", "3", "4"],
        ["5", "head"],
    ]


def test_the_slowest_stage_is_as_fast_as_can_be():
    assert names(balanced(UNITS, [0, 1, 1, 1, 1, 1, 1, 3], 3)) == [
        ["embedding", "0", "1", "2"],
        ["3", "4", "5"],
        ["head"],
    ]


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=12), st.integers(1, 12))
def test_every_unit_is_on_one_stage_in_order_and_no_stage_is_empty(seconds, num_stages):
    units = [Unit(str(i), PLAIN) for i in range(len(seconds))]
    stages = balanced(units, seconds, min(num_stages, len(units)))
    assert [unit for stage in stages for unit in stage] == units
    assert len(stages) == min(num_stages, len(units))
    assert all(stages)
