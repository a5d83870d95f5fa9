"""Search: the plans of a space in the order of an aim, best first, and exactly so.

A best-first branch and bound: what waits is a place, a family, a plan or a predicted plan, each with a lower bound of
its key, and the least is taken on. A predicted plan that is taken is the next best: nothing that waits can be better.
So a plan is predicted only where no bound excludes it, and the expensive ones (long pipelines) last.
Source: Hart, Nilsson and Raphael, A formal basis for the heuristic determination of minimum cost paths (1968).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import NamedTuple

from shoal.plan.plan import Plan
from shoal.planner.aims import Aim, Key, Limit
from shoal.planner.space import LEVELS, Cut, Place, Recompute, Space, Way, simplicity
from shoal.planner.workload import Prediction

_ANY = Limit()


@dataclass(frozen=True)
class Costs:
    """What plans cost on some numbers of devices. The bounds are of `predict`, and cheap.

    `least_seconds` is the same for all plans of a family, and for all numbers of replicas that leave a rank as many
    grains. Of both bounds, p stages on one rank have at most p times what the busiest of them has. `least_bytes` grows
    with the microbatch and shrinks with the shard axis. `nearly`: a better bound of one plan's seconds, less cheap.
    `floor`: (samples a replica, ranks that share them) -> seconds that no plan goes below. `memory_bytes`: of a device.
    Equal numbers of devices have one and the same Costs, and others may have too.
    """

    predict: Callable[[Plan], Prediction]
    least_seconds: Callable[[Plan], float]
    least_bytes: Callable[[Plan], float]
    nearly: Callable[[Plan], float]
    memory_bytes: float
    floor: Callable[[float, int], float] = lambda samples, ranks: 0.0


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


@dataclass
class Seen:
    """What a search learned of the places that it did not choose.

    `bounds`: the least seconds that a place's plans take; `predicted`: its best plan so far; `missing_bytes`: the least
    that one of its plans lacks, where some do not fit; `refused`: why its plans are illegal, where some are.
    """

    bounds: dict[Place, float] = field(default_factory=dict)
    predicted: dict[Place, Candidate] = field(default_factory=dict)
    missing_bytes: dict[Place, float] = field(default_factory=dict)
    refused: dict[Place, str] = field(default_factory=dict)
    num_predicted: int = 0
    num_bounded: int = 0

    def lacks(self, place: Place, missing: float) -> None:
        """Notes a plan that does not fit."""
        self.missing_bytes[place] = min(missing, self.missing_bytes.get(place, missing))


class Group(NamedTuple):
    """Ways that differ only in the order of their microbatches."""

    grains: int
    recompute: Recompute
    sequence: bool


# What waits in the queue, by how far it has been looked into: a place; a place and the number of its next group; a
# place and a way; a place and a plan; and a plan that was predicted.
_Waiting = Place | tuple[Place, int | Way | Plan] | Candidate


class Search:
    """The candidates of one space; several orders share what was computed."""

    def __init__(self, space: Space, costs: Callable[[int], Costs], grain_size: int) -> None:
        """`costs`: of a number of devices."""
        self.space, self.costs, self._grain_size = space, costs, grain_size
        self._groups: dict[tuple[int, int, Cut], list[tuple[float, Group]]] = {}
        self._whole: dict[tuple[int, Cut, Group], tuple[float, float]] = {}
        self._least: dict[tuple[int, int, Cut, Way], float] = {}
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

    def in_order(
        self, aim: Aim, limit: Limit = _ANY, places: Sequence[Place] | None = None, seen: Seen | None = None
    ) -> Iterator[Candidate]:
        """The candidates that fit and are within the limit, by the aim's key; equal keys by simplicity."""
        places = self.places if places is None else places
        return _Order(self, aim, limit, seen if seen is not None else Seen()).run(places)

    # ------------------------------------------------------------------------------------------------- bounds

    def floor(self, place: Place) -> float:
        """Seconds that no plan of a place goes below, from its degrees alone."""
        return self.costs(place.devices).floor(self.space.share(place) * self._grain_size, place.cut.ranks)

    def groups(self, place: Place) -> list[tuple[float, Group]]:
        """What a place's ranks may compute at a time and again, by the least seconds; only what may fit.

        The same for every number of replicas that leaves a rank as many grains, on devices that cost the same.
        """
        costs, share = self.costs(place.devices), self.space.share(place)
        key = (id(costs), share, place.cut)
        if key not in self._groups:
            found: list[tuple[float, Group]] = []
            for recompute in self.space.recomputes:
                for sequence in self.space.sequences(place.cut):
                    found += self._fitting(costs, share, place.cut, recompute, sequence)
            self._groups[key] = sorted(found, key=lambda group: group[0])
        return self._groups[key]

    def _fitting(
        self, costs: Costs, share: int, cut: Cut, recompute: Recompute, sequence: bool
    ) -> Iterator[tuple[float, Group]]:
        """Groups of ever larger microbatches, with their bounds, until one cannot fit any more."""
        for grains in reversed(self.space.sizes(share)):
            group = Group(grains, recompute, sequence)
            seconds, num_bytes = self._of_all_stages(costs, cut, group)
            if num_bytes / cut.pipeline > costs.memory_bytes and grains > 1:
                return  # a microbatch of one grain is kept, so that what it lacks is told
            yield seconds * -(-share // grains) / cut.pipeline, group

    def _of_all_stages(self, costs: Costs, cut: Cut, group: Group) -> tuple[float, float]:
        """Seconds of a microbatch, and least bytes, of all stages on one rank: the busiest of p has a p-th at least."""
        alone = cut._replace(pipeline=1)
        key = (id(costs), alone, group)
        if key not in self._whole:
            # The most replicas whose share is not less: no other plan of these microbatches is divided further.
            place, way = Place(self.space.most_replicas(group.grains), alone), Way(*group)
            num_bytes = min(map(costs.least_bytes, self._most_divided(place, way)), default=0.0)
            microbatches = -(-self.space.share(place) // group.grains)
            self._whole[key] = costs.least_seconds(self.space.plan(place, way)) / microbatches, num_bytes
        return self._whole[key]

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

    def missing_bytes(self, place: Place, way: Way) -> float:
        """What even the most divided plan of a family lacks; not positive where one may fit."""
        costs = self.costs(place.devices)
        return min(map(costs.least_bytes, self._most_divided(place, way)), default=0.0) - costs.memory_bytes

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
        self._queue: list[tuple[Key, tuple[int, ...], int, _Waiting]] = []
        self._numbers = count()

    def run(self, places: Sequence[Place]) -> Iterator[Candidate]:
        for place in places:
            self._wait(place, self._search.floor(place), place)
        while self._queue:
            waiting = heapq.heappop(self._queue)[-1]
            if isinstance(waiting, Candidate):
                yield waiting
            elif isinstance(waiting, Place):
                self._place(waiting)
            else:
                place, what = waiting
                if isinstance(what, int):
                    self._group(place, what)
                elif isinstance(what, Way):
                    self._way(place, what)
                else:
                    self._plan(place, what)

    def _wait(self, place: Place, seconds: float, waiting: _Waiting) -> None:
        if not self._limit.allows(place.devices, seconds):
            return
        key = self._aim.key(place.devices, seconds)
        # Equal keys: what is predicted comes out last, so that all equal ones are known, the simplest first.
        rank = simplicity(waiting.plan) if isinstance(waiting, Candidate) else ()
        heapq.heappush(self._queue, (key, rank, next(self._numbers), waiting))

    def _place(self, place: Place) -> None:
        self._seen.bounds[place] = self._search.groups(place)[0][0]
        self._next_group(place, 0)

    def _next_group(self, place: Place, number: int) -> None:
        groups = self._search.groups(place)
        if number < len(groups):
            self._wait(place, groups[number][0], (place, number))

    def _group(self, place: Place, number: int) -> None:
        self._next_group(place, number + 1)
        search = self._search
        _, group = search.groups(place)[number]
        for way in search.space.ways(place, group):
            self._wait(place, search.least_seconds(place, way), (place, way))

    def _way(self, place: Place, way: Way) -> None:
        search, seen = self._search, self._seen
        missing = search.missing_bytes(place, way)
        if missing > 0:
            seen.lacks(place, missing)
            return
        costs = search.costs(place.devices)
        for plan in search.space.plans(place, way):
            seen.num_bounded += 1
            missing = costs.least_bytes(plan) - costs.memory_bytes
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
