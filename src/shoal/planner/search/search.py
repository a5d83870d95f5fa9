"""Best-first branch and bound over a plan space: the best plans of an objective, in exact order.

The queue holds nodes: layouts that share their bounds, a family or a schedule of theirs, one place, one plan, each with
a lower bound of its key, and the least is expanded. A predicted plan that is taken is the next best: nothing in the
queue can be better. So a plan is predicted only where no bound excludes it, and the expensive ones last.
Source: Hart, Nilsson and Raphael, A formal basis for the heuristic determination of minimum cost paths (1968).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence, Set
from functools import cached_property, partial
from itertools import count, islice, product
from operator import itemgetter
from typing import NamedTuple

from shoal.planner.predict.lower_bounds import PipelineShape
from shoal.planner.predict.workload import Prediction
from shoal.planner.search.aims import Aim, Key, Limit
from shoal.planner.search.candidates import Candidate, Seen
from shoal.planner.search.costs import Costs, LayoutClass, ScheduleFamily, Whole
from shoal.planner.search.space import LEVELS, Degrees, MicrobatchSchedule, ModelDegrees, Recompute, Space, simplicity
from shoal.plans.plan import Plan

_ANY = Limit()


_Groups = Iterator[tuple[float, Whole]]


class Node(NamedTuple):
    """Node of the search tree: plans of some places and their expansion, or a predicted plan."""

    where: LayoutClass | Degrees
    branch: Callable[[], None] | Candidate

    def is_within(self, places: Set[Degrees]) -> bool:
        """Whether these places are all of its own."""
        if isinstance(self.where, Degrees):
            return self.where in places
        return all(Degrees(number, self.where.cut) in places for number in self.where.replicas)


class Search:
    """Branch-and-bound search of one space; several orders share cached costs."""

    def __init__(
        self,
        space: Space,
        costs: Callable[[int], Costs],
        grain_size: int,
        watch: Callable[[], None] | None = None,
    ) -> None:
        """`costs`: of a number of devices. `watch`: called again and again as the search goes on."""
        self.space, self.costs, self._grain_size, self.watch = space, costs, grain_size, watch
        self._missing_of: dict[tuple[Degrees, MicrobatchSchedule], float] = {}
        self._missing_uncut: dict[tuple[Degrees, ScheduleFamily], float] = {}
        self._whole: dict[tuple[int, ModelDegrees], dict[tuple[int, Recompute, bool], Whole]] = {}
        self._least: dict[tuple[int, int, ModelDegrees, MicrobatchSchedule], float] = {}
        self._beside: dict[Degrees, float] = {}
        self._bytes: dict[tuple[object, ...], float] = {}
        self._predicted: dict[tuple[object, ...], Prediction] = {}

    @cached_property
    def places(self) -> tuple[Degrees, ...]:
        """All of them."""
        return tuple(place for cut in sorted(self.space.cuts) for place in self.space.places(cut))

    @cached_property
    def by_devices(self) -> dict[int, list[Degrees]]:
        """The places on each number of devices."""
        found: dict[int, list[Degrees]] = {}
        for place in self.places:
            found.setdefault(place.devices, []).append(place)
        return found

    def classes(self, places: Sequence[Degrees]) -> list[LayoutClass]:
        """Layout classes of these places."""
        found: dict[tuple[int, int, ModelDegrees], list[int]] = {}
        for place in places:
            key = id(self.costs(place.devices)), self.space.share(place), place.cut
            found.setdefault(key, []).append(place.replicas)
        classes = []
        for (_, share, cut), replicas in found.items():
            first, last = Degrees(min(replicas), cut), Degrees(max(replicas), cut)
            numbers, beside = tuple(sorted(replicas)), self.beside(first)
            classes.append(LayoutClass(share, cut, numbers, first, first.devices, last.devices, beside))
        return classes

    @cached_property
    def all_classes(self) -> list[LayoutClass]:
        """All places."""
        return self.classes(self.places)

    def in_order(
        self, aim: Aim, limit: Limit = _ANY, places: Sequence[Degrees] | None = None, seen: Seen | None = None
    ) -> Iterator[Candidate]:
        """The candidates that fit and are within the limit, by the aim's key; equal keys by simplicity."""
        layouts = self.all_classes if places is None else self.classes(places)
        return _Order(self, aim, limit, seen if seen is not None else Seen()).run(layouts)

    def best_of_each(self, aim: Aim, places: Sequence[Degrees], seen: Seen) -> Iterator[Candidate]:
        """The best candidate of each of these places, the best of all first; what a place has beside it is left."""
        order = _Order(self, aim, _ANY, seen)
        for candidate in order.run(self.classes(places)):
            order.ended.add(candidate.place)
            yield candidate

    # ------------------------------------------------------------------------------------------------- bounds

    def floor(self, place: Degrees) -> float:
        """Seconds that no plan of a place goes below, from its degrees alone; without what is beside."""
        return self.costs(place.devices).floor(self.space.share(place) * self._grain_size, place.cut)

    def beside(self, place: Degrees) -> float:
        """Seconds of any plan of a place that no other bound but that of a whole plan has."""
        if place not in self._beside:
            self._beside[place] = self.costs(place.devices).beside(place)
        return self._beside[place]

    def groups(self, place: Degrees) -> _Groups:
        """Schedule families of a place, by the least seconds; only those that may fit.

        The same for every number of replicas that leaves a rank as many grains, on devices that cost the same.
        """
        costs, share, pipeline = self.costs(place.devices), self.space.share(place), place.cut.pipeline
        alone, memory = place.cut._replace(pipeline=1), costs.memory_bytes
        known = self._whole.setdefault((id(costs), alone), {})
        found, floor, sizes = [], self.floor(place), self.space.sizes(share)
        for kind in product(self.space.recomputes, self.space.sequences(place.cut)):
            for grains in reversed(sizes):
                one = known.get((grains, *kind))
                if one is None:
                    one = known[(grains, *kind)] = self._of_microbatch(costs, alone, ScheduleFamily(grains, *kind))
                # A microbatch of one grain is kept, so that what it lacks is told; larger ones need more.
                if one.bytes / pipeline > memory and grains > 1:
                    break
                microbatches = -(-share // grains)
                if one.activations_on(pipeline, microbatches) > memory and grains > sizes[-1]:
                    break
                found.append((max(floor, microbatches * one.seconds_on(pipeline)), one))
        found.sort(key=itemgetter(0))
        return iter(found)

    def _of_microbatch(self, costs: Costs, alone: ModelDegrees, group: ScheduleFamily) -> Whole:
        place, way = Degrees(self._most_replicas(costs, alone, group.grains), alone), MicrobatchSchedule(*group)
        plan, microbatches = self.space.plan(place, way), -(-self.space.share(place) // group.grains)
        num_bytes = min(map(costs.least_bytes, self._most_divided(place, way)), default=0.0)
        return Whole(group, costs.least_seconds(plan) / microbatches, num_bytes, costs.blocks(plan))

    def _most_replicas(self, costs: Costs, alone: ModelDegrees, grains: int) -> int:
        """The most replicas whose share is not less, of devices that cost this: no plan of them is divided further.

        A lone rank of a host of cores may have all of them, and so cost something else than many.
        """
        most, size = self.space.most_replicas(grains), Degrees(1, alone).devices
        if self.costs(most * size) is costs:
            return most
        return max((n for n in range(1, most + 1) if self.costs(n * size) is costs), default=1)

    def _most_divided(self, place: Degrees, way: MicrobatchSchedule) -> list[Plan]:
        """The plans of a family of which one needs the fewest bytes, or fewer than any.

        One copy counts at any place: fewer replicas may sum through shared memory where these do not.
        """
        levels = self.space.levels(place.cut) if place.replicas > 1 else LEVELS[-1:]
        divided = [self.space.plan(place, way, place.replicas, level) for level in levels]
        if self.space.one_copy and place.replicas > 1 and place.cut.ranks == 1:
            plan = self.space.plan(place, way)
            divided.append(plan.model_copy(update={"memory": plan.memory.model_copy(update={"shared": True})}))
        return divided

    def least_seconds(self, place: Degrees, way: MicrobatchSchedule) -> float:
        """Seconds that no plan of a family goes below."""
        costs = self.costs(place.devices)
        key = (id(costs), self.space.share(place), place.cut, way)
        if key not in self._least:
            self._least[key] = costs.least_seconds(self.space.plan(place, way))
        return self._least[key]

    def filled(self, layouts: LayoutClass, way: MicrobatchSchedule, whole: Whole) -> float:
        """A cheaper bound of the same: from the seconds of the group where a rank has all stages."""
        turns = PipelineShape(way.schedule, layouts.cut.pipeline, way.stages, -(-layouts.share // way.grains))
        return self.costs(layouts.first.devices).filled(whole, turns)

    def missing_bytes(self, place: Degrees, way: MicrobatchSchedule) -> float:
        """Bytes that even the most divided plan of a family lacks; not positive where one may fit."""
        # Of schedules on as many stages, no other keeps fewer microbatches on any rank.
        way = way._replace(schedule="interleaved_1f1b" if way.stages > 1 else "1f1b")
        if (place, way) not in self._missing_of:
            lacking = (self.lacks(place, way, plan) for plan in self._most_divided(place, way))
            self._missing_of[place, way] = min(lacking, default=0.0)
        return self._missing_of[place, way]

    def missing_uncut(self, place: Degrees, group: ScheduleFamily) -> float:
        """A lower bound of that for all schedules of a family, before stages are cut; not positive where one may fit.

        No schedule keeps fewer microbatches on any rank than 1f1b with a stage a rank.
        """
        if place.cut.pipeline == 1:
            return 0.0
        if (place, group) not in self._missing_uncut:
            costs, plans = self.costs(place.devices), self._most_divided(place, MicrobatchSchedule(*group))
            lacking = (costs.uncut_bytes(plan) - costs.memory_bytes for plan in plans)
            self._missing_uncut[place, group] = min(lacking, default=0.0)
        return self._missing_uncut[place, group]

    def missing_at_least(self, place: Degrees) -> float:
        """Bytes that every plan of a place lacks; not positive where no bound says that nothing of it fits.

        The smallest microbatches first, of which one nearly always fits where any does.
        """
        smallest = self.space.sizes(self.space.share(place))[-1]
        kinds = product(self.space.recomputes, self.space.sequences(place.cut))
        least = min(self._missing(place, [ScheduleFamily(smallest, *kind) for kind in kinds]), default=0.0)
        if least > 0:
            groups = [one.group for _, one in self.groups(place)]
            least = min([least, *self._missing(place, groups)])
        return least

    def _missing(self, place: Degrees, groups: Sequence[ScheduleFamily]) -> Iterator[float]:
        """What the families of these groups lack, up to the first that may fit; not those that surely lack more."""
        least = float("inf")
        bounds = [(self.missing_uncut(place, group), group) for group in groups]
        for bound, group in sorted(bounds, key=itemgetter(0)):
            if bound >= least:
                return
            for way in self.space.ways(place, group):
                missing = self.missing_bytes(place, way)
                yield missing
                if missing <= 0:
                    return
                least = min(least, missing)

    def lacks(self, place: Degrees, way: MicrobatchSchedule, plan: Plan) -> float:
        """Bytes that a plan of a family lacks at least; not positive where it may fit."""
        costs = self.costs(place.devices)
        divided = place.replicas > 1, plan.layout.shard, plan.num_owners
        key = id(costs), self.space.share(place), place.cut, way, divided, plan.shard.level
        if key not in self._bytes:
            self._bytes[key] = costs.least_bytes(plan) - costs.memory_bytes
        return self._bytes[key]

    def predict(self, plan: Plan) -> Prediction:
        """The prediction of a plan, computed once."""
        key = simplicity(plan) + tuple(plan.layout.__dict__.values())
        if key not in self._predicted:
            self._predicted[key] = self.costs(plan.layout.world_size).predict(plan)
        return self._predicted[key]


class _Order:
    """One pass in the order of one aim."""

    def __init__(self, search: Search, aim: Aim, limit: Limit, seen: Seen) -> None:
        self._search, self._aim, self._limit, self._seen = search, aim, limit, seen
        self.ended: set[Degrees] = set()  # of which nothing more is wanted
        self._queue: list[tuple[Key, tuple[int, ...], int, Node]] = []
        self._numbers = count()

    def run(self, layouts: Sequence[LayoutClass]) -> Iterator[Candidate]:
        for one in layouts:
            self._wait_class(one, self._search.floor(one.first), partial(self._floored, one))
        watch = self._search.watch
        while self._queue:
            if watch is not None:
                watch()
            node = heapq.heappop(self._queue)[-1]
            if self.ended and node.is_within(self.ended):
                continue
            if isinstance(node.branch, Candidate):
                yield node.branch
            else:
                node.branch()

    def _wait(self, place: Degrees, seconds: float, node: Node) -> None:
        if self._limit.allows(place.devices, seconds):
            self._push(self._aim.key(place.devices, seconds), node)

    def _wait_class(self, layouts: LayoutClass, seconds: float, branch: Callable[[], None]) -> None:
        seconds += layouts.beside
        if self._limit.allows(layouts.fewest, seconds):  # more devices only take more device-seconds
            devices = layouts.most if self._aim.prefers_more else layouts.fewest
            self._push(self._aim.key(devices, seconds), Node(layouts, branch))

    def _push(self, key: Key, node: Node) -> None:
        # Equal keys: what is predicted comes out last, so that all equal ones are known, the simplest first.
        rank = simplicity(node.branch.plan) if isinstance(node.branch, Candidate) else ()
        heapq.heappush(self._queue, (key, rank, next(self._numbers), node))

    def _floored(self, layouts: LayoutClass) -> None:
        self._next_group(layouts, self._search.groups(layouts.first))

    def _next_group(self, layouts: LayoutClass, groups: _Groups) -> None:
        """The best group that is left."""
        for seconds, whole in islice(groups, 1):
            self._wait_class(layouts, seconds, partial(self._group, layouts, whole, seconds, groups))

    def _group(self, layouts: LayoutClass, whole: Whole, seconds: float, others: _Groups) -> None:
        self._next_group(layouts, others)
        for way in self._search.space.ways(layouts.first, whole.group):
            least = max(seconds, self._search.filled(layouts, way, whole))
            self._wait_class(layouts, least, partial(self._schedule_of_class, layouts, way))

    def _schedule_of_class(self, layouts: LayoutClass, way: MicrobatchSchedule) -> None:
        """Waits again, by the better bound: few come back, and only their memory is looked at, which takes longer."""
        least = self._search.least_seconds(layouts.first, way)
        self._wait_class(layouts, least, partial(self._fitting, layouts, way))

    def _fitting(self, layouts: LayoutClass, way: MicrobatchSchedule) -> None:
        """Goes on where the place whose replicas divide most may fit."""
        divided = Degrees(layouts.replicas[-1], layouts.cut)
        missing = self._search.missing_uncut(divided, ScheduleFamily(*way[:3]))
        if missing > 0:
            self._seen.lacks_at_least(divided, missing, partial(self._search.missing_bytes, divided, way))
            return
        missing = self._search.missing_bytes(divided, way)
        if missing > 0:
            self._seen.lacks(divided, missing)
            return
        self._next_place(layouts, way, self._replicas(layouts))

    def _replicas(self, layouts: LayoutClass) -> Iterator[int]:
        """In the order of the aim's keys, where each place has the same seconds or more for more replicas."""
        return iter(layouts.replicas[::-1] if self._aim.prefers_more else layouts.replicas)

    def _next_place(self, layouts: LayoutClass, way: MicrobatchSchedule, others: Iterator[int]) -> None:
        """The first of the places that are left, by a bound that is the same for all of them but for what is beside."""
        search = self._search
        seconds = search.least_seconds(layouts.first, way)
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
        least = search.costs(place.devices).least_at(search.space.plan(place, way))
        least = max(search.least_seconds(layouts.first, way), least)
        self._wait(place, least + search.beside(place), Node(place, partial(self._way, place, way)))

    def _way(self, place: Degrees, way: MicrobatchSchedule) -> None:
        search, seen = self._search, self._seen
        missing = search.missing_bytes(place, way)
        if missing > 0:
            seen.lacks(place, missing)
            return
        costs = search.costs(place.devices)
        for plan in search.space.plans(place, way):
            seen.num_bounded += 1
            missing = search.lacks(place, way, plan)
            if missing > 0:
                seen.lacks(place, missing)
                continue
            self._wait(place, costs.nearly(plan), Node(place, partial(self._plan, place, plan)))

    def _plan(self, place: Degrees, plan: Plan) -> None:
        seen = self._seen
        refusal = self._search.space.refusal(plan)
        if refusal is not None:
            seen.refused[place] = min(refusal, seen.refused.get(place, refusal))
            return
        prediction = self._search.predict(plan)
        seen.num_predicted += 1
        if not prediction.fits:
            seen.lacks(place, prediction.missing_bytes)
            return
        candidate = Candidate(plan, prediction)
        best = seen.predicted.get(place)
        if best is None or candidate.rank < best.rank:
            seen.predicted[place] = candidate
        self._wait(place, candidate.seconds, Node(place, candidate))
