"""Intervals and goodput against the formulas' own limits, and against a run that is simulated failure by failure."""

import random
from math import inf, sqrt

import pytest

from shoal.planner.answer.outlook import Failures, daly, goodput, share_left


def test_young_and_daly_agree_where_checkpoints_are_cheap() -> None:
    failures = Failures(1e6, 1.0, 10.0)
    young = sqrt(2.0 * failures.checkpoint_seconds * failures.mtbf_seconds)
    assert daly(failures) == pytest.approx(young, rel=0.01)


def test_daly_gives_the_interval_at_which_most_is_left() -> None:
    failures = Failures(10_000.0, 120.0, 300.0)
    best = daly(failures)
    for other in (best / 1.3, best * 1.3):
        assert share_left(other, failures) < share_left(best, failures)


def test_checkpoints_that_take_longer_than_the_machine_lasts() -> None:
    assert daly(Failures(100.0, 250.0, 1.0)) == 100.0
    assert share_left(100.0, Failures(1.0, 1e6, 1.0)) == 0.0


def test_without_failures() -> None:
    assert goodput(Failures(inf, 1.0, 1.0)).share == 1.0
    assert share_left(10.0, Failures(inf, 1.0, 1.0)) == pytest.approx(10 / 11)


def test_the_share_is_that_of_a_simulated_run() -> None:
    failures, interval = Failures(3_000.0, 60.0, 200.0), 600.0
    pick, wall, done = random.Random(1), 0.0, 0

    def survives(seconds: float) -> bool:
        nonlocal wall
        fails = pick.expovariate(1 / failures.mtbf_seconds)
        wall += min(seconds, fails)
        return fails >= seconds

    while done < 20_000:
        if survives(interval + failures.checkpoint_seconds):
            done += 1
            continue
        while not survives(failures.restart_seconds):
            pass
    assert done * interval / wall == pytest.approx(share_left(interval, failures), rel=0.01)
