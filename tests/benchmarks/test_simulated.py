"""The supervisor's own code in simulated time: shares of effective time, and a refusal where no start helps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.simulated import DAY, World, simulated

from shoal.errors import RankLostError
from shoal.planner.answer.outlook import Failures, daly, share_left

# Two ranks on one machine, where a start takes four seconds and hosts do not break.
SMALL = World(
    ranks=2,
    ranks_per_host=2,
    length=1800.0,
    step=0.02,
    checkpoint=0.02,
    start=4.0,
    kinds={"a process ends": 9, "a rank hangs": 1},
    repair=0.0,
)


@pytest.mark.parametrize(("mtbf", "least"), [(60.0, 0.9), (15.0, 0.6)])
def test_most_of_the_time_counts_at_the_rates_of_the_soak(mtbf: float, least: float) -> None:
    found = simulated(replace(SMALL, mtbf=mtbf))
    assert sum(found.losses.values()) == found.recovery.count > 15
    assert found.ettr > least


def test_sixteen_thousand_ranks_lose_what_the_formula_says() -> None:
    """Of a world whose processes only end, since the formula knows no hangs."""
    world = World(length=10 * DAY, kinds={"a process ends": 1})
    failures = Failures(world.mtbf, world.checkpoint, world.start)
    assert simulated(world).ettr == pytest.approx(share_left(daly(failures), failures), abs=0.01)


def test_hosts_that_are_missing_are_waited_for() -> None:
    world = World(length=10 * DAY, spares=0, kinds={"a host is gone": 1})
    found = simulated(world)
    assert found.spent["waits for a host"] == pytest.approx(world.repair * found.recovery.count, rel=0.01)
    assert found.ettr < simulated(replace(world, spares=16)).ettr - 0.2


def test_a_fault_of_the_job_ends_the_run_at_any_size() -> None:
    """After two starts that ended alike, whatever else failed in between."""
    with pytest.raises(RankLostError, match="lost twice in the same way, both times after step 700"):
        simulated(World(ranks=1, ranks_per_host=1, deterministic_step=700))
