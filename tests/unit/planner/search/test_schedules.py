"""Schedules of a class come out by their better bound, and those of crowded families are not bounded at all."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.planner.predict.lower_bounds import Blocks, BlockSize
from shoal.planner.search.costs import ScheduleFamily, Whole
from shoal.planner.search.schedules import Bounds, Schedules
from shoal.planner.search.space import MicrobatchSchedule

FAMILIES = [
    (float(grains), Whole(ScheduleFamily(grains, "none", False), 1.0, 1.0, Blocks(), BlockSize()))
    for grains in (1, 2, 3)
]


def bounded(whole: Whole) -> Iterator[tuple[float, MicrobatchSchedule]]:
    for more, schedule in enumerate(("1f1b", "gpipe")):
        yield whole.group.grains + 0.5 * more, MicrobatchSchedule(*whole.group, schedule)


def least_seconds(way: MicrobatchSchedule) -> float:
    assert way.grains != 2, "the family is crowded"
    return {(1, "1f1b"): 5.0, (1, "gpipe"): 1.0, (3, "1f1b"): 3.25, (3, "gpipe"): 9.0}[way.grains, way.schedule]


def every(schedules: Schedules) -> list[tuple[float, int, str]]:
    found: list[tuple[float, int, str]] = []
    while True:
        seconds, way = schedules.at(len(found))
        if seconds == float("inf"):
            return found
        if way is None:
            schedules.look()
        else:
            found.append((seconds, way.grains, way.schedule))


def test_they_come_by_the_larger_of_their_bounds() -> None:
    schedules = Schedules(Bounds(iter(FAMILIES), lambda one: one.group.grains == 2, bounded, least_seconds))
    wanted = [(1.5, 1, "gpipe"), (3.25, 3, "1f1b"), (5.0, 1, "1f1b"), (9.0, 3, "gpipe")]
    assert every(schedules) == wanted
    assert every(schedules) == wanted  # another order goes through the same
    assert [(seconds, whole.group.grains) for seconds, whole in schedules.crowded] == [(2.0, 2)]


def test_nothing_is_looked_for_before_it_is_asked() -> None:
    schedules = Schedules(Bounds(iter(FAMILIES), lambda one: False, bounded, lambda way: 1 / 0))
    assert schedules.at(0) == (1.0, None)
    schedules.look()  # the first family, not its schedules' better bounds
    assert schedules.at(0) == (1.0, None)
