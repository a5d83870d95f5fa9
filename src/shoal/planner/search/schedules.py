"""Microbatch schedules of a layout class in the order of their lower bounds, as far as an order of plans asks."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import count
from typing import NamedTuple

from shoal.planner.search.costs import Whole
from shoal.planner.search.space import MicrobatchSchedule

_NEVER = float("inf")
_Waiting = Whole | tuple[MicrobatchSchedule, bool]  # a family; a schedule, and whether its bound is the better one


class Bounds(NamedTuple):
    """Bounds of one layout class: its families by their seconds, and of each its schedules and theirs."""

    families: Iterator[tuple[float, Whole]]
    is_crowded: Callable[[Whole], bool]  # whether the blocks of a family alone do not fit
    schedules: Callable[[Whole], Iterator[tuple[float, MicrobatchSchedule]]]  # with a cheap bound
    least_seconds: Callable[[MicrobatchSchedule], float]  # the better bound


class Schedules:
    """Schedules of a layout class whose families may fit, the least bound first; several orders go through one.

    Where a family's blocks do not fit, none of its schedules is bounded: it is only noted in `crowded`.
    """

    def __init__(self, bounds: Bounds) -> None:
        self._bounds, self._numbers = bounds, count()
        self._waiting: list[tuple[float, int, _Waiting]] = []
        self._found: list[tuple[float, MicrobatchSchedule]] = []
        self.crowded: list[tuple[float, Whole]] = []
        self._next_family()

    def at(self, number: int) -> tuple[float, MicrobatchSchedule | None]:
        """One of them with its bound; None and a bound of it where it was not looked for yet, or there is none."""
        if number < len(self._found):
            return self._found[number]
        return (self._waiting[0][0] if self._waiting else _NEVER), None

    def look(self) -> None:
        """Replaces the least bound that is open by what is behind it."""
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
