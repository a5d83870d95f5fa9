"""Which units a stage gets."""

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from shoal.planner.predict.workload import ModelPart, StageDivision, balanced, by_names, equal, thresholds
from shoal.planner.profile.values import Body, Unit

PLAIN, REPEATED = Body(()), Body((), repeated=True)
UNITS = (Unit("embedding", PLAIN), *(Unit(f"blocks.{i}", REPEATED) for i in range(6)), Unit("head", PLAIN))


def names(stages: tuple[tuple[Unit, ...], ...]) -> list[list[str]]:
    return [[unit.name.removeprefix("blocks.") for unit in stage] for stage in stages]


def test_stages_begin_with_the_names_of_the_plan():
    assert names(by_names(UNITS, ["blocks.1", "blocks.4"])) == [["embedding", "0"], ["1", "2", "3"], ["4", "5", "head"]]


def test_ranks_of_a_model_with_equal_units_share_them_but_for_the_first():
    known: dict[tuple[bool, tuple[Body, ...]], ModelPart] = {}
    blocks = UNITS[1:7]
    two, three = (StageDivision(equal(blocks, number), known).parts(number) for number in (2, 3))
    four = StageDivision((blocks[:2], blocks[2:5], blocks[5:6]), known).parts(3)
    assert two[1] is four[1]  # three blocks each
    assert three[1] is three[2]
    assert two[0] is not two[1]  # the batch enters on the first rank
    assert [unit.name for unit in two[0].units] == ["blocks.0", "blocks.1", "blocks.2"]


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


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), min_size=1, max_size=3), st.integers(1, 5))
def test_stages_of_runs_of_equal_blocks_are_as_fast_as_the_best_of_all_divisions(runs, num_stages):
    seconds = [float(one) for one, count in runs for _ in range(count)]
    num_stages = min(num_stages, len(seconds))

    def slowest(inner: tuple[int, ...]) -> float:
        return max(sum(seconds[a:b]) for a, b in pairwise((0, *inner, len(seconds))))

    best = min(map(slowest, combinations(range(1, len(seconds)), num_stages - 1)))
    stages = balanced(seconds, seconds, num_stages)
    assert max(map(sum, stages)) == best


@given(st.lists(st.tuples(st.floats(0.01, 10), st.integers(1, 40)), min_size=1, max_size=5), st.integers(1, 60))
def test_runs_of_equal_blocks_are_cut_as_blocks_one_by_one(runs, num_stages):
    seconds = [one for one, count in runs for _ in range(count)]
    stages = balanced(seconds, seconds, num_stages)
    assert list(map(len, stages)) == one_by_one(seconds, max(map(sum, stages)), num_stages)


def one_by_one(seconds: list[float], limit: float, num_stages: int) -> list[int]:
    """Each stage takes units up to the limit, and leaves one to each of those after it."""
    found, filled = [0], 0.0
    for place, one in enumerate(seconds):
        left, after = len(seconds) - place, num_stages - len(found)
        if found[-1] and after and (filled + one > limit * (1 + 1e-9) or left <= after):
            found.append(0)
            filled = 0.0
        found[-1] += 1
        filled += one
    return found
