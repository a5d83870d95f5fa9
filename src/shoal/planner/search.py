"""Search: the plans of a space in the order of an aim, best first, and exactly so.

A best-first branch and bound: what waits are kin places, a group or a way of theirs, a plan or a predicted plan, each
with a lower bound of its key, and the least is taken on. A predicted plan that is taken is the next best: nothing that
waits can be better. So a plan is predicted only where no bound excludes it, and the expensive ones last.
Source: Hart, Nilsson and Raphael, A formal basis for the heuristic determination of minimum cost paths (1968).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, islice, product
from typing import Any

from shoal.plan.plan import Plan
from shoal.planner.aims import Aim, Key, Limit
from shoal.planner.bounds import Costs, Group, Kin, Whole
from shoal.planner.filling import Turns
from shoal.planner.space import LEVELS, Cut, Place, Recompute, Space, Way, simplicity
from shoal.planner.workload import Prediction

_ANY = Limit()


@dataclass(frozen=True)
class Candidate:
    """A plan and what is predicted of it."""

    plan: Plan
    prediction: Prediction

    @property
    def devices(self) -> int:
        """Processes in all."""
        return self.plan.layout.world_size

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.prediction.step_seconds

    @property
    def place(self) -> Place:
        """Its degrees, with data x shard as one."""
        at = self.plan.layout
        return Place(at.data * at.shard, Cut(at.tensor, at.pipeline, at.context))


@dataclass
class Seen:
    """What a search learned of the places that it did not choose.

    `predicted`: a place's best plan so far; `missing_bytes`: the least that one of its plans lacks, where some do not
    fit; `refused`: why its plans are illegal, where some are.
    """

    predicted: dict[Place, Candidate] = field(default_factory=dict)
    missing_bytes: dict[Place, float] = field(default_factory=dict)
    refused: dict[Place, str] = field(default_factory=dict)
    num_predicted: int = 0
    num_bounded: int = 0

    def lacks(self, place: Place, missing: float) -> None:
        """Notes a plan that does not fit."""
        self.missing_bytes[place] = min(missing, self.missing_bytes.get(place, missing))


# What waits, by how far it has been looked into: kin places; the best group that is left, and the others; one of their
# ways, of which `True` says that its bound is the better one; a place and a way, or a plan; and what was predicted.
_Groups = Iterator[tuple[float, Whole]]
_Waiting = Kin | tuple[Kin, Whole, _Groups] | tuple[Kin, Way, bool] | tuple[Place, Way | Plan] | Candidate


class Search:
    """The candidates of one space; several orders share what was computed."""

    def __init__(self, space: Space, costs: Callable[[int], Costs], grain_size: int) -> None:
        """`costs`: of a number of devices."""
        self.space, self.costs, self._grain_size = space, costs, grain_size
        self._groups: dict[tuple[object, ...], tuple[list[Whole], list[tuple[int, float]]]] = {}
        self._whole: dict[tuple[int, Cut, Group], Whole] = {}
        self._least: dict[tuple[int, int, Cut, Way], float] = {}
        self._bytes: dict[tuple[object, ...], float] = {}
        self._predicted: dict[tuple[object, ...], Prediction] = {}

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """All of them."""
        return tuple(place for cut in self.space.cuts for place in self.space.places(cut))

    @cached_property
    def by_devices(self) -> dict[int, list[Place]]:
        """The places on each number of devices."""
        found: dict[int, list[Place]] = {}
        for place in self.places:
            found.setdefault(place.devices, []).append(place)
        return found

    def kin(self, places: Sequence[Place]) -> list[Kin]:
        """These places, those together that have the same bounds."""
        found: dict[tuple[int, int, Cut], list[int]] = {}
        for place in places:
            key = id(self.costs(place.devices)), self.space.share(place), place.cut
            found.setdefault(key, []).append(place.replicas)
        return [Kin(share, cut, tuple(sorted(replicas))) for (_, share, cut), replicas in found.items()]

    @cached_property
    def all_kin(self) -> list[Kin]:
        """All places."""
        return self.kin(self.places)

    def in_order(
        self, aim: Aim, limit: Limit = _ANY, places: Sequence[Place] | None = None, seen: Seen | None = None
    ) -> Iterator[Candidate]:
        """The candidates that fit and are within the limit, by the aim's key; equal keys by simplicity."""
        kin = self.all_kin if places is None else self.kin(places)
        return _Order(self, aim, limit, seen if seen is not None else Seen()).run(kin)

    def best_of_each(self, aim: Aim, places: Sequence[Place], seen: Seen) -> Iterator[Candidate]:
        """The best candidate of each of these places, the best of all first; what a place has beside it is left."""
        order = _Order(self, aim, _ANY, seen)
        for candidate in order.run(self.kin(places)):
            order.ended.add(candidate.place)
            yield candidate

    # ------------------------------------------------------------------------------------------------- bounds

    def floor(self, place: Place) -> float:
        """Seconds that no plan of a place goes below, from its degrees alone; without what ranks say to each other."""
        return self.costs(place.devices).floor(self.space.share(place) * self._grain_size, place.cut.ranks)

    def agreed(self, place: Place) -> float:
        """Seconds of what ranks say to each other in any plan of a place."""
        return self.costs(place.devices).agreed(place)

    def groups(self, place: Place) -> _Groups:
        """What a place's ranks may compute at a time and again, by the least seconds; only what may fit.

        The same for every number of replicas that leaves a rank as many grains, on devices that cost the same.
        """
        costs, pipeline = self.costs(place.devices), place.cut.pipeline
        groups, parts = self._all_groups(costs, place)
        floor = max((-(-count // pipeline) * seconds for count, seconds in parts), default=0.0)
        for one in groups:
            # A microbatch of one grain is kept, so that what it lacks is told.
            if one.bytes / pipeline <= costs.memory_bytes or one.group.grains == 1:
                yield max(one.seconds / pipeline, floor), one

    def _all_groups(self, costs: Costs, place: Place) -> tuple[list[Whole], list[tuple[int, float]]]:
        """The groups of places with any number of stages, by their seconds; and the least seconds of their parts."""
        share, sequences = self.space.share(place), self.space.sequences(place.cut)
        alone = place.cut._replace(pipeline=1)
        key = id(costs), share, alone, sequences
        if key not in self._groups:
            kinds = product(self.space.recomputes, sequences)
            found = [whole for kind in kinds for whole in self._sizes(costs, share, alone, kind)]
            found.sort(key=lambda whole: whole.seconds)
            # Every group has the same units.
            parts = [(same[0][0], min(s for _, s in same)) for same in zip(*(one.parts for one in found), strict=True)]
            self._groups[key] = found, parts
        return self._groups[key]

    def _sizes(self, costs: Costs, share: int, alone: Cut, kind: tuple[Recompute, bool]) -> Iterator[Whole]:
        """Ever larger microbatches, until one cannot fit however many stages there are."""
        for grains in reversed(self.space.sizes(share)):
            group = Group(grains, *kind)
            key = (id(costs), alone, group)
            if key not in self._whole:
                self._whole[key] = self._of_microbatch(costs, alone, group)
            one, microbatches = self._whole[key], -(-share // grains)
            if one.bytes / self.space.num_layers > costs.memory_bytes and grains > 1:
                return
            parts = tuple((count, seconds * microbatches) for count, seconds in one.parts)
            yield Whole(group, one.seconds * microbatches, one.bytes, parts)

    def _of_microbatch(self, costs: Costs, alone: Cut, group: Group) -> Whole:
        """A group where a rank has all stages and one microbatch."""
        # The most replicas whose share is not less: no other plan of these microbatches is divided further.
        place, way = Place(self.space.most_replicas(group.grains), alone), Way(*group)
        num_bytes = min(map(costs.least_bytes, self._most_divided(place, way)), default=0.0)
        plan = self.space.plan(place, way)
        return Whole(group, costs.least_seconds(plan), num_bytes, costs.parts(plan))

    def _most_divided(self, place: Place, way: Way) -> list[Plan]:
        """The plans of a family of which one needs the fewest bytes."""
        levels = self.space.levels(place.cut) if place.replicas > 1 else LEVELS[-1:]
        return [self.space.plan(place, way, place.replicas, level) for level in levels]

    def least_seconds(self, place: Place, way: Way) -> float:
        """Seconds that no plan of a family goes below."""
        costs = self.costs(place.devices)
        key = (id(costs), self.space.share(place), place.cut, way)
        if key not in self._least:
            self._least[key] = costs.least_seconds(self.space.plan(place, way))
        return self._least[key]

    def filled(self, kin: Kin, way: Way, whole: Whole) -> float:
        """A cheaper bound of the same: from the seconds of the group where a rank has all stages."""
        microbatches = -(-kin.share // way.grains)
        turns = Turns(way.schedule, kin.cut.pipeline, way.stages, microbatches)
        filled = self.costs(kin.first.devices).filled(whole.seconds / microbatches, turns)
        return max(filled, whole.least_seconds(kin.cut.pipeline))

    def missing_bytes(self, place: Place, way: Way) -> float:
        """What even the most divided plan of a family lacks; not positive where one may fit."""
        return min((self.lacks(place, way, plan) for plan in self._most_divided(place, way)), default=0.0)

    def may_fit(self, place: Place) -> bool:
        """Whether no bound says that nothing of a place fits."""
        ways = (way for _, one in self.groups(place) for way in self.space.ways(place, one.group))
        return any(self.missing_bytes(place, way) <= 0 for way in ways)

    def lacks(self, place: Place, way: Way, plan: Plan) -> float:
        """Bytes that a plan of a family lacks at least; not positive where it may fit."""
        costs = self.costs(place.devices)
        several, shard = place.replicas > 1, plan.layout.shard
        key = id(costs), self.space.share(place), place.cut, way, several, shard, plan.shard.level
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
        self.ended: set[Place] = set()  # of which nothing more is wanted
        self._queue: list[tuple[Key, tuple[int, ...], int, _Waiting]] = []
        self._numbers = count()

    def run(self, kin: Sequence[Kin]) -> Iterator[Candidate]:
        for one in kin:
            self._wait_kin(one, self._search.floor(one.first), one)
        while self._queue:
            waiting = heapq.heappop(self._queue)[-1]
            if self.ended and self._is_ended(waiting):
                continue
            if isinstance(waiting, Candidate):
                yield waiting
            elif isinstance(waiting, Kin):
                self._next_group(waiting, self._search.groups(waiting.first))
            else:
                self._look_into(waiting)

    def _is_ended(self, waiting: _Waiting) -> bool:
        if isinstance(waiting, Candidate):
            return waiting.place in self.ended
        where = waiting if isinstance(waiting, Kin) else waiting[0]
        places = [where] if isinstance(where, Place) else [Place(number, where.cut) for number in where.replicas]
        return self.ended.issuperset(places)

    def _look_into(self, waiting: tuple[Any, ...]) -> None:
        where, what = waiting[:2]
        if isinstance(where, Place):
            if isinstance(what, Way):
                self._way(where, what)
            else:
                self._plan(where, what)
        elif isinstance(what, Way):
            self._way_of_kin(where, what, waiting[2])
        else:
            self._group(where, *waiting[1:])

    def _wait(self, place: Place, seconds: float, waiting: _Waiting) -> None:
        if self._limit.allows(place.devices, seconds):
            self._push(self._aim.key(place.devices, seconds), waiting)

    def _wait_kin(self, kin: Kin, seconds: float, waiting: _Waiting) -> None:
        fewest, most = kin.first.devices, kin.replicas[-1] * kin.cut.ranks
        seconds += self._search.agreed(kin.first)
        if self._limit.allows(fewest, seconds):  # more devices only take more device-seconds
            self._push(min(self._aim.key(fewest, seconds), self._aim.key(most, seconds)), waiting)

    def _push(self, key: Key, waiting: _Waiting) -> None:
        # Equal keys: what is predicted comes out last, so that all equal ones are known, the simplest first.
        rank = simplicity(waiting.plan) if isinstance(waiting, Candidate) else ()
        heapq.heappush(self._queue, (key, rank, next(self._numbers), waiting))

    def _next_group(self, kin: Kin, groups: _Groups) -> None:
        for seconds, whole in islice(groups, 1):
            self._wait_kin(kin, seconds, (kin, whole, groups))

    def _group(self, kin: Kin, whole: Whole, others: _Groups) -> None:
        self._next_group(kin, others)
        for way in self._search.space.ways(kin.first, whole.group):
            self._wait_kin(kin, self._search.filled(kin, way, whole), (kin, way, False))

    def _way_of_kin(self, kin: Kin, way: Way, is_bounded: bool) -> None:
        if not is_bounded:
            self._wait_kin(kin, self._search.least_seconds(kin.first, way), (kin, way, True))
            return
        search = self._search
        seconds, least_at = search.least_seconds(kin.first, way), search.costs(kin.first.devices).least_at
        for replicas in kin.replicas:
            place = Place(replicas, kin.cut)
            agreed = search.agreed(place)
            if self._limit.allows(place.devices, seconds + agreed):
                least = max(seconds, least_at(search.space.plan(place, way)))
                self._wait(place, least + agreed, (place, way))

    def _way(self, place: Place, way: Way) -> None:
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
            self._wait(place, costs.nearly(plan), (place, plan))

    def _plan(self, place: Place, plan: Plan) -> None:
        seen = self._seen
        refusal = self._search.space.refusal(plan)
        if refusal is not None:
            seen.refused[place] = refusal
            return
        prediction = self._search.predict(plan)
        seen.num_predicted += 1
        if not prediction.fits:
            seen.lacks(place, prediction.missing_bytes)
            return
        candidate = Candidate(plan, prediction)
        best = seen.predicted.get(place)
        if best is None or candidate.seconds < best.seconds:
            seen.predicted[place] = candidate
        self._wait(place, candidate.seconds, candidate)
