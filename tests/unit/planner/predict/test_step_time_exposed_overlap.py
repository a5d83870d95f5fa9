"""What shows of collectives beside computation."""

import pytest

from shoal.planner.predict.step_time import gathered, hidden

NOTHING = [0.0] * 4


def test_the_first_gather_shows_and_the_others_hide():
    assert gathered([10.0] * 4, [1.0] * 4, NOTHING, 0.0) == pytest.approx(41.0)


def test_slow_gathers_hide_the_computation_instead():
    assert gathered([1.0] * 4, [10.0] * 4, NOTHING, 0.0) == pytest.approx(41.0)


def test_the_last_scatter_shows():
    assert gathered([10.0] * 4, NOTHING, [2.0] * 4, 0.0) == pytest.approx(42.0)


def test_the_last_scatter_shows_where_the_last_unit_has_none():
    assert gathered([1.0, 0.001], [0.0] * 2, [10.0, 0.0], 0.0) == pytest.approx(11.0)


def test_compute_beside_a_collective_is_slowed():
    assert gathered([10.0] * 4, [1.0] * 4, NOTHING, 0.5) == pytest.approx(41.0 + 3 * 0.5)


def test_at_least_the_last_bucket_shows():
    assert hidden(10.0, 1.0, 100.0) == 1.0
    assert hidden(10.0, 1.0, 4.0) == 6.0
    assert hidden(0.0, 0.0, 4.0) == 0.0
