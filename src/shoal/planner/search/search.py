"""Best-first branch and bound over a plan space.

A node of the queue is a class of layouts, a schedule family, a schedule, a place or a plan, with a lower bound of its
key. The search replaces the node with the least bound by its children. A predicted plan that leaves the queue is the
next best, since no node in the queue can be better. So only plans that no bound excludes are predicted.
Source: Hart, Nilsson and Raphael, A formal basis for the heuristic determination of minimum cost paths (1968).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import count
from typing import NamedTuple

from shoal.planner.predict.workload import Prediction
from shoal.planner.search.aims import TIE, Aim, Key, Limit
from shoal.planner.search.bounds import Bounds, LayoutClass, ScheduleFamily
from shoal.planner.search.costs import Costs
from shoal.planner.search.space import Degrees, MicrobatchSchedule, ModelDegrees, Space, simplicity
from shoal.plans.plan import Plan

_NEVER = float("inf")


@dataclass(frozen=True)
class Candidate:
    """A plan and its prediction."""

    plan: Plan
    prediction: Prediction

    @property
    def devices(self) -> int:
        """Number of ranks."""
        return self.plan.layout.world_size

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.prediction.step_seconds

    @property
    def rank(self) -> tuple[float, tuple[int, ...]]:
        """Sort key among candidates: seconds, then simplicity."""
        return self.seconds, simplicity(self.plan)

    @property
    def place(self) -> Degrees:
        """The degrees of the plan, with data x shard as one number."""
        at = self.plan.layout
        return Degrees(at.data * at.shard, ModelDegrees(at.tensor, at.pipeline, at.context))


class Wanted(NamedTuple):
    """Plans that a search looks for: the first `number` in the order of an aim on these numbers of devices.

    `ties`: take only plans that tie with the first one. `each_place`: take only the best plan of each place.
    """

    aim: Aim = Aim()
    limit: Limit = Limit()
    fewest: int = 1
    most: float = _NEVER
    number: float = 1
    ties: bool = False
    each_place: bool = False
    but: Degrees | None = None  # an excluded place


@dataclass
class Notes:
    """Statistics of searches on the plans that they did not choose."""

    predicted: dict[Degrees, Candidate] = field(default_factory=dict)  # best fitting plan of each place
    refused: dict[Degrees, str] = field(default_factory=dict)  # a reason per place with illegal plans
    missing: dict[Degrees, float] = field(default_factory=dict)  # least bytes that an examined plan lacks
    num_predicted: int = 0
    num_bounded: int = 0

    def lacks(self, place: Degrees, missing: float) -> None:
        """Record the bytes that a plan lacks."""
        self.missing[place] = min(missing, self.missing.get(place, missing))


class Node(NamedTuple):
    """Node of the search tree: all plans that agree in the fields that are not None.

    `seconds`: lower bound of their step time, or the predicted step time of a candidate.
    """

    seconds: float
    layouts: LayoutClass
    family: ScheduleFamily | None = None
    way: MicrobatchSchedule | None = None
    place: Degrees | None = None
    plan: Plan | None = None
    candidate: Candidate | None = None

    def children(self, bounds: Bounds, aim: Aim, notes: Notes) -> Iterator[Node]:
        """Yield the parts of this node that may fit, in the order of the aim's keys. `notes` records the others."""
        layouts, least = self.layouts, self.seconds
        if self.family is None:
            for seconds, family in bounds.families(layouts):
                yield Node(max(least, seconds + layouts.beside), layouts, family)
        elif self.way is None:
            for seconds, way in bounds.schedules(layouts, self.family):
                yield Node(max(least, seconds + layouts.beside), layouts, self.family, way)
        elif self.place is None:
            missing = bounds.missing_bytes(layouts.divided, self.way)
            if missing > 0:
                notes.lacks(layouts.divided, missing)
                return
            least = max(least, bounds.staged(layouts, self.way) + layouts.beside)
            for replicas in layouts.replicas[::-1] if aim.prefers_more else layouts.replicas:
                place = Degrees(replicas, layouts.cut)
                seconds = least - layouts.beside + bounds.costs(place.devices).beside(place)
                yield Node(max(least, seconds), layouts, self.family, self.way, place)
        elif self.plan is None:
            if (seconds := bounds.at(self.place, self.way)) > least:
                yield self._replace(seconds=seconds)
                return
            plans = bounds.plans(self.place, self.way)
            notes.num_bounded += len(plans)
            for plan, missing, seconds in plans:
                if missing > 0:
                    notes.lacks(self.place, missing)
                else:
                    yield Node(max(least, seconds), layouts, self.family, self.way, self.place, plan)
        elif (refusal := bounds.space.refusal(self.plan)) is not None:
            notes.refused[self.place] = min(refusal, notes.refused.get(self.place, refusal))
        else:
            found = Candidate(self.plan, bounds.predict(self.plan))
            notes.num_predicted += 1
            if not found.prediction.fits:
                notes.lacks(self.place, found.prediction.missing_bytes)
                return
            if self.place not in notes.predicted or found.rank < notes.predicted[self.place].rank:
                notes.predicted[self.place] = found
            yield Node(found.seconds, layouts, self.family, self.way, self.place, self.plan, found)

    def key(self, aim: Aim) -> Key:
        """Return a lower bound of the aim's key. No child has a smaller one."""
        if self.place is not None:
            return aim.key(self.place.devices, self.seconds)
        return aim.key((self.layouts.divided if aim.prefers_more else self.layouts.first).devices, self.seconds)


class Search:
    """Branch-and-bound search of one space."""

    def __init__(
        self, space: Space, costs: Callable[[int], Costs], grain_size: int, watch: Callable[[], None] | None = None
    ) -> None:
        """Create a search with empty caches.

        `costs`: function from a number of devices to costs. `watch`: called repeatedly during the search.
        """
        self.space, self.costs, self.bounds, self._watch = space, costs, Bounds(space, costs, grain_size), watch

    def with_more_memory(self, num_bytes: int) -> Search:
        """Return a search of devices with more memory."""
        larger = cache(lambda costs: costs.with_more_memory(num_bytes))
        costs = self.costs
        return Search(self.space, lambda devices: larger(costs(devices)), self.bounds.grain_size, self._watch)

    def predict(self, plan: Plan) -> Prediction:
        """Return the prediction of a plan, computed once."""
        return self.bounds.predict(plan)

    @cached_property
    def places(self) -> tuple[Degrees, ...]:
        """Every candidate layout, ordered by model-parallel degrees."""
        return tuple(place for cut in sorted(self.space.cuts) for place in self.space.places(cut))

    @cached_property
    def by_devices(self) -> dict[int, list[Degrees]]:
        """The places by number of devices."""
        found: dict[int, list[Degrees]] = {}
        for place in self.places:
            found.setdefault(place.devices, []).append(place)
        return found

    def classes(self, places: Iterable[Degrees]) -> list[Node]:
        """Group places into layout classes, each a node with the bound of its degrees."""
        found: dict[tuple[Costs, int, ModelDegrees], list[int]] = {}
        for place in places:
            key = self.costs(place.devices), self.space.share(place), place.cut
            found.setdefault(key, []).append(place.replicas)
        nodes = []
        for (costs, share, cut), replicas in found.items():
            first, divided = Degrees(min(replicas), cut), Degrees(max(replicas), cut)
            layouts = LayoutClass(share, cut, tuple(sorted(replicas)), first, divided, costs.beside(first))
            nodes.append(Node(self.bounds.floor(layouts.first) + layouts.beside, layouts))
        return nodes

    @cached_property
    def _all_classes(self) -> list[Node]:
        return self.classes(self.places)

    def take(self, wanted: Wanted, notes: Notes | None = None) -> list[Candidate]:
        """Return the wanted plans in order; equal keys by simplicity."""
        aim, notes, numbers = wanted.aim, notes or Notes(), count()
        if wanted.fewest == 1 and wanted.most == _NEVER and wanted.but is None:
            nodes = self._all_classes
        else:
            counts = (n for n in self.by_devices if wanted.fewest <= n <= wanted.most)
            nodes = self.classes(place for n in counts for place in self.by_devices[n] if place != wanted.but)
        found: list[Candidate] = []
        ceiling: Key = (_NEVER,)  # of plans that are still wanted
        ended: set[Degrees] = set()
        # A node waits with its siblings: all of them have larger keys, and most never join the queue.
        queue: list[tuple[Key, tuple[int, ...], int, Node, Iterator[Node]]] = []

        def push(siblings: Iterator[Node]) -> None:
            for node in siblings:
                if wanted.limit.allows((node.place or node.layouts.first).devices, node.seconds):
                    # Among equal keys predicted plans leave last and in order of simplicity, so that all are known.
                    rank = simplicity(node.candidate.plan) if node.candidate is not None else ()
                    heapq.heappush(queue, (node.key(aim), rank, next(numbers), node, siblings))
                    return

        push(iter(sorted(nodes, key=lambda node: node.key(aim))))
        while queue and queue[0][0] <= ceiling and len(found) < wanted.number:
            if self._watch is not None:
                self._watch()
            key, _, _, node, siblings = heapq.heappop(queue)
            push(siblings)
            if (
                ended
                and (node.place or node.layouts.divided) in ended
                and (node.place or len(node.layouts.replicas) == 1)
            ):
                continue
            if node.candidate is None:
                push(node.children(self.bounds, aim, notes))
                continue
            if wanted.ties and not found:
                ceiling = (*key[:-1], key[-1] * (1 + TIE))
            found.append(node.candidate)
            if wanted.each_place:
                ended.add(node.candidate.place)
        return found

    # -------------------------------------------------------------------------------------------- what does not fit

    def nearest_missing(self, notes: Notes, places: Iterable[Degrees]) -> tuple[float, Degrees] | None:
        """Return the least bytes that any plan of these places lacks, and its place, or None if none lacks any.

        No plan of them fits. `notes`: of a search through all of them.
        """
        least = min(((missing, place) for place, missing in notes.missing.items()), default=(_NEVER, None))
        for node in self.classes(places):
            missing = self.bounds.missing_at_least(node.layouts.divided, least[0])
            if 0 < missing < least[0]:
                least = missing, node.layouts.divided
        missing, nearest = least
        return None if nearest is None else (missing, nearest)
