"""Which rank is taken for slow, from the extremes of each step over the ranks."""

import random
from collections.abc import Iterator

import pytest

from shoal.plans.plan import Plan
from shoal.runs.records import Spread
from shoal.training.observe.step_records import WINDOW, Straggler, StragglerWatch


def steps(slow: int | None, ratio: float, drawn: random.Random, seconds: float = 0.02) -> Iterator[dict[str, Spread]]:
    """Two ranks whose forwards take about as long, but for the slow one's."""
    while True:
        forward = [seconds * drawn.uniform(0.9, 1.1) * (ratio if rank == slow else 1.0) for rank in range(2)]
        told = Spread(min(forward), max(forward), forward.index(max(forward)))
        yield {"busy_seconds": told, "forward": told, "backward": Spread(0.001, 0.002, drawn.randrange(2))}


def first(watch: StragglerWatch, many: Iterator[dict[str, Spread]], most: int) -> tuple[int, Straggler] | None:
    for number in range(most):
        found = watch.take(next(many))
        if found is not None:
            return number + 1, found
    return None


def watch(ranks: int = 2, grains: int = 8) -> StragglerWatch:
    return StragglerWatch(Plan().with_sections(layout={"data": ranks}), grains)


def test_a_slow_rank_is_named_within_twenty_steps_and_once() -> None:
    one, many = watch(), steps(1, 2.0, random.Random(1))
    found = first(one, many, 100)
    assert found is not None
    number, straggler = found
    assert (number, straggler.rank, straggler.cause) == (WINDOW, 1, "the forward")
    assert straggler.ratio == pytest.approx(2.0, rel=0.1)
    assert first(one, many, 500) is None
    assert first(one, steps(None, 1.0, random.Random(2)), 50) is None  # well again
    assert first(one, many, 50) is not None


@pytest.mark.parametrize("seconds", [0.0005, 0.02, 1.0])
def test_even_ranks_raise_no_alarm(seconds: float) -> None:
    assert first(watch(), steps(None, 1.0, random.Random(3), seconds), 5000) is None


def test_what_uneven_shares_explain_is_no_alarm() -> None:
    """Of 8 grains on 3 ranks one has two and the others three."""
    assert first(watch(3), steps(1, 1.5, random.Random(4)), 200) is None
    assert first(watch(3), steps(1, 2.6, random.Random(4)), 200) is not None


def test_stages_of_a_pipeline_are_not_compared() -> None:
    staged = StragglerWatch(Plan().with_sections(layout={"pipeline": 2}), 8)
    assert first(staged, steps(1, 9.0, random.Random(5)), 200) is None
