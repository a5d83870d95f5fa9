"""Why a layout was not chosen: the same whatever the search happened to look at."""

from __future__ import annotations

import pytest
from tests.unit.planner.models import facts, gpus, transformer

from shoal.planner.predict.lower_bounds import costs_of
from shoal.planner.predict.workload import Workload
from shoal.planner.search.search import Aim, Search, choose, gib
from shoal.planner.search.space import Degrees, MicrobatchSchedule, Space, counts
from shoal.plans.plan import Plan

LAYERS, HEADS, POSITIONS = 4, 4, 512


@pytest.fixture(scope="module")
def search() -> Search:
    """On devices so small that some layouts fit and others do not."""
    profile = transformer(LAYERS, 1024, 2048, 8192, POSITIONS, HEADS)
    work, cluster = Workload(profile, 8, 8), gpus(1, 4, gib=1.45)
    space = Space(Plan(), facts(8, LAYERS, HEADS, POSITIONS), counts(cluster))
    return Search(space, costs_of(work, cluster), work.grain_size)


def least_missing(search: Search, place: Degrees) -> float:
    """What the plan that needs least of a place lacks, one by one."""
    space, share, costs = search.space, search.space.share(place), search.costs(place.devices)
    families, pipeline = space.families(place), place.cut.pipeline
    ways = (
        MicrobatchSchedule(*family, *order)
        for family in families
        for order in space.orders(pipeline, -(-share // family.grains))
    )
    return min(costs.least_bytes(plan) for way in ways for plan in space.plans(place, way)) - costs.memory_bytes


def test_a_layout_lacks_what_its_smallest_plan_lacks(search: Search) -> None:
    wanted = {place: least_missing(search, place) for place in search.space.places}
    assert {missing > 0 for missing in wanted.values()} == {True, False}
    for place, missing in wanted.items():
        found = search.bounds.memory.place_lacks(place)
        if missing > 0:
            assert found == missing
        else:
            assert found <= 0
    told = {r.what: r.reason for r in choose(search, Aim()).rejected}
    for place, missing in wanted.items():
        if missing > 0 and str(place) in told:
            assert told[str(place)] == f"does not fit by {gib(missing)}"
