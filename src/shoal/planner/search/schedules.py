"""Microbatch schedules of a layout class in the order of their lower bounds, computed on demand."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import count
from typing import NamedTuple

from shoal.planner.search.costs import Whole
from shoal.planner.search.space import MicrobatchSchedule

_NEVER = float("inf")
_Waiting = Whole | tuple[MicrobatchSchedule, bool]  # a family, or a schedule and whether its bound is the tighter one


class Bounds(NamedTuple):
    """Bounds of one layout class: its families by seconds, and the schedules of each family with theirs."""

    families: Iterator[tuple[float, Whole]]
    is_crowded: Callable[[Whole], bool]  # whether the blocks of a family alone do not fit
    schedules: Callable[[Whole], Iterator[tuple[float, MicrobatchSchedule]]]  # with a cheap bound each
    least_seconds: Callable[[MicrobatchSchedule], float]  # the tighter bound


class Schedules:
    """Schedules of a layout class whose families may fit, the least bound first. Several orders share one object.

    If the blocks of a family do not fit, its schedules are not bounded, and the family is only recorded in `crowded`.
    """

    def __init__(self, bounds: Bounds) -> None:
        self._bounds, self._numbers = bounds, count()
        self._waiting: list[tuple[float, int, _Waiting]] = []
        self._found: list[tuple[float, MicrobatchSchedule]] = []
        self.crowded: list[tuple[float, Whole]] = []
        self._next_family()

    def at(self, number: int) -> tuple[float, MicrobatchSchedule | None]:
        """Return a schedule and its bound. If it is not computed yet, or there is none, return a bound and None."""
        if number < len(self._found):
            return self._found[number]
        return (self._waiting[0][0] if self._waiting else _NEVER), None

    def look(self) -> None:
        """Replace the least open bound by the bounds behind it."""
        seconds, _, one = heapq.heappop(self._waiting)
        if isinstance(one, Whole):
            self._next_family()
            for bound, way in self._bounds.schedules(one):
                self._wait(max(seconds, bound), (way, False))
            return
        way, is_better = one
        better = seconds if is_better else self._bounds.least_seconds(way)
        if better > seconds:
            self._wait(better, (way, True))
        else:
            self._found.append((seconds, way))

    def _next_family(self) -> None:
        for seconds, whole in self._bounds.families:
            if not self._bounds.is_crowded(whole):
                self._wait(seconds, whole)
                return
            self.crowded.append((seconds, whole))

    def _wait(self, seconds: float, one: _Waiting) -> None:
        heapq.heappush(self._waiting, (seconds, next(self._numbers), one))
