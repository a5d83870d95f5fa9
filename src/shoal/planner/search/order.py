"""One pass through a plan space in the order of one aim (best-first search).

A node of the queue is a layout class, a schedule of a class, a place, or a plan, with a lower bound of its key. The
search expands the node with the least bound. A predicted plan that leaves the queue is the next best, since no node in
the queue can be better. So only plans that no bound excludes are predicted, and expensive bounds come last.
Source: Hart, Nilsson and Raphael, A formal basis for the heuristic determination of minimum cost paths (1968).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from itertools import count
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from shoal.planner.search.aims import Aim, Ceiling, Key, Limit
from shoal.planner.search.candidates import Candidate, Seen
from shoal.planner.search.costs import LayoutClass
from shoal.planner.search.schedules import Schedules
from shoal.planner.search.space import Degrees, MicrobatchSchedule, simplicity
from shoal.plans.plan import Plan

if TYPE_CHECKING:
    from shoal.planner.search.search import Search

_NEVER = float("inf")
# Factor on the seconds of a class when it competes with the queue for its turn: a little look-ahead costs less than a
# pass through the queue for each bound, and changes no order.
_AHEAD = 0.97
_Noted = tuple[Key, Callable[..., None], tuple[object, ...]]  # key reached, note, arguments


class Node(NamedTuple):
    """Node of the search tree: plans of some places with their expansion, or a predicted plan."""

    where: LayoutClass | Degrees
    branch: Callable[[], None] | Candidate

    def is_within(self, places: Set[Degrees]) -> bool:
        """Check whether `places` include all places of the node."""
        if isinstance(self.where, Degrees):
            return self.where in places
        return all(Degrees(number, self.where.cut) in places for number in self.where.replicas)


class PlanOrder:
    """One pass in the order of one aim."""

    def __init__(self, search: Search, aim: Aim, limit: Limit, ceiling: Ceiling) -> None:
        self._search, self._aim, self._limit, self._ceiling = search, aim, limit, ceiling
        self.ended: set[Degrees] = set()  # places of which no more plans are needed
        self._queue: list[tuple[Key, tuple[int, ...], int, Node]] = []
        self._later: Iterator[tuple[Key, LayoutClass]] = iter(())  # layout classes not yet in the queue, in order
        self._numbers = count()
        self._reached: Key = ()  # the largest key that left the queue
        self._noted: list[_Noted] = []

    def run(self, layouts: Sequence[LayoutClass]) -> Iterator[Candidate]:
        """Yield the predicted plans of the layouts up to the ceiling, the best one first."""
        self._later = iter(self._floors(layouts))
        self._next_layout()
        watch = self._search.watch
        while self._queue:
            if watch is not None:
                watch()
            if not self._ceiling.allows(self._queue[0][0]):
                return
            key, *_, node = heapq.heappop(self._queue)
            self._reached = max(self._reached, key)
            if self.ended and node.is_within(self.ended):
                continue
            if isinstance(node.branch, Candidate):
                yield node.branch
            else:
                node.branch()

    def settle(self, key: Key, seen: Seen) -> None:
        """Add the notes up to this key to `seen`.

        Notes that are evaluated later behave as if the pass had ended at this key.
        """
        self._reached = key
        for reached, note, arguments in self._noted:
            if reached <= key:
                note(seen, *arguments)

    def _note(self, note: Callable[..., None], *arguments: object) -> None:
        self._noted.append((self._reached, note, arguments))

    def _wait(self, place: Degrees, seconds: float, node: Node) -> None:
        if self._limit.allows(place.devices, seconds):
            self._push(self._aim.key(place.devices, seconds), node)

    def _bounded(self, layouts: LayoutClass, seconds: float) -> Key:
        """Return the least key of a class whose plans take at least `seconds`."""
        return self._aim.key(layouts.most if self._aim.prefers_more else layouts.fewest, seconds)

    def _key(self, layouts: LayoutClass, seconds: float) -> Key:
        """Return the least key of a class whose plans take at least `seconds` plus the `beside` of the class."""
        return self._bounded(layouts, seconds + layouts.beside)

    def _is_next(self, layouts: LayoutClass, seconds: float) -> bool:
        """Check whether plans of a class with this bound are about as good as the next node of the queue."""
        if not self._ceiling.allows(self._key(layouts, seconds)):
            return False
        return not self._queue or self._key(layouts, _AHEAD * seconds) <= self._queue[0][0]

    def _is_passed(self, layouts: LayoutClass, seconds: float) -> bool:
        """Check whether plans with this bound would have left the queue by now."""
        allowed = self._limit.allows(layouts.fewest, seconds + layouts.beside)
        return allowed and self._key(layouts, seconds) <= self._reached

    def _wait_class(self, layouts: LayoutClass, seconds: float, branch: Callable[[], None]) -> None:
        if self._limit.allows(layouts.fewest, seconds + layouts.beside):  # more devices only add device-seconds
            self._push(self._key(layouts, seconds), Node(layouts, branch))

    def _push(self, key: Key, node: Node) -> None:
        # Among equal keys predicted plans leave last and in order of simplicity, so that all of them are known.
        rank = simplicity(node.branch.plan) if isinstance(node.branch, Candidate) else ()
        heapq.heappush(self._queue, (key, rank, next(self._numbers), node))

    def _floors(self, layouts: Sequence[LayoutClass]) -> list[tuple[Key, LayoutClass]]:
        """Return the layout classes in the order of the bounds from their degrees alone."""
        floors = ((one, self._search.floor(one.first) + one.beside) for one in layouts)
        allowed = ((one, seconds) for one, seconds in floors if self._limit.allows(one.fewest, seconds))
        return sorted(((self._bounded(one, seconds), one) for one, seconds in allowed), key=itemgetter(0))

    def _next_layout(self) -> None:
        """Push the next layout class. Most classes are never expanded, and a short queue is fast."""
        for key, layouts in self._later:
            self._push(key, Node(layouts, partial(self._floored, layouts)))
            return

    def _floored(self, layouts: LayoutClass) -> None:
        self._next_layout()
        schedules = self._search.schedules(layouts)
        self._note(Seen.lacks_later, layouts.divided, partial(self._least_lacking, layouts, schedules))
        self._next_schedule(layouts, schedules, 0)

    def _next_schedule(self, layouts: LayoutClass, schedules: Schedules, number: int) -> None:
        """Search the next schedule of a class until another node of the queue has a far smaller key."""
        seconds, way = schedules.at(number)
        while way is None and seconds < _NEVER and self._is_next(layouts, seconds):
            schedules.look()
            seconds, way = schedules.at(number)
        if seconds < _NEVER:
            self._wait_class(layouts, seconds, partial(self._schedule, layouts, schedules, number))

    def _schedule(self, layouts: LayoutClass, schedules: Schedules, number: int) -> None:
        _, way = schedules.at(number)
        self._next_schedule(layouts, schedules, number if way is None else number + 1)
        if way is not None:
            self._fitting(layouts, way)

    def _least_lacking(self, layouts: LayoutClass, schedules: Schedules, below: float) -> float:
        """Return the least bytes that crowded families lack, if their bounds are within the searched keys.

        Returns infinity if no such family lacks less than `below`.
        """
        search, place, least = self._search, layouts.divided, _NEVER
        for seconds, whole in schedules.crowded:
            if not self._is_passed(layouts, seconds):
                break
            if search.missing_uncut(place, whole.group) >= min(least, below):
                continue
            for bound, way in search.bounded(layouts, whole):
                if self._is_passed(layouts, max(seconds, bound, search.least_seconds(place, way))):
                    least = min(least, search.missing_bytes(place, way))
        return least

    def _fitting(self, layouts: LayoutClass, way: MicrobatchSchedule) -> None:
        """Continue with the places of a class if its most divided place may fit."""
        missing = self._search.missing_bytes(layouts.divided, way)
        if missing > 0:
            self._note(Seen.lacks, layouts.divided, missing)
            return
        self._next_place(layouts, way, self._replicas(layouts))

    def _replicas(self, layouts: LayoutClass) -> Iterator[int]:
        """Return the replicas in the order of the aim's keys, given that seconds never shrink with more replicas."""
        return iter(layouts.replicas[::-1] if self._aim.prefers_more else layouts.replicas)

    def _next_place(self, layouts: LayoutClass, way: MicrobatchSchedule, others: Iterator[int]) -> None:
        """Push the next allowed place of a class. All places share a bound, plus their own `beside`."""
        search = self._search
        seconds = search.least_for_all(layouts, way)
        for replicas in others:
            place = Degrees(replicas, layouts.cut)
            least = seconds + search.beside(place)
            if self._limit.allows(place.devices, least):
                node = Node(layouts, partial(self._place, layouts, way, place, others))
                self._push(self._aim.key(place.devices, least), node)
                return

    def _place(self, layouts: LayoutClass, way: MicrobatchSchedule, place: Degrees, others: Iterator[int]) -> None:
        search = self._search
        self._next_place(layouts, way, others)
        self._wait(place, search.least_at(place, way), Node(place, partial(self._way, place, way)))

    def _way(self, place: Degrees, way: MicrobatchSchedule) -> None:
        search = self._search
        missing = search.missing_bytes(place, way)
        if missing > 0:
            self._note(Seen.lacks, place, missing)
            return
        plans = search.plans(place, way)
        self._note(Seen.bounded, len(plans))
        for plan, missing, seconds in plans:
            if missing > 0:
                self._note(Seen.lacks, place, missing)
            else:
                self._wait(place, seconds, Node(place, partial(self._plan, place, plan)))

    def _plan(self, place: Degrees, plan: Plan) -> None:
        refusal = self._search.space.refusal(plan)
        if refusal is not None:
            self._note(Seen.refuses, place, refusal)
            return
        candidate = Candidate(plan, self._search.predict(plan))
        self._note(Seen.predicts, place, candidate)
        if candidate.prediction.fits:
            self._wait(place, candidate.seconds, Node(place, candidate))
