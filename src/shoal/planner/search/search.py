"""Best-first branch and bound over a plan space: the bounds of its plans, which all orders of the space share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import cached_property, lru_cache, partial
from itertools import product
from operator import itemgetter
from typing import NamedTuple

from shoal.planner.predict.lower_bounds import BlockStates, PipelineShape, even_shares
from shoal.planner.predict.workload import Prediction
from shoal.planner.search.aims import Aim, Ceiling, Limit
from shoal.planner.search.candidates import Candidate
from shoal.planner.search.costs import Costs, LayoutClass, ScheduleFamily, Turn, Whole
from shoal.planner.search.order import PlanOrder
from shoal.planner.search.passes import SearchPasses, Wanted
from shoal.planner.search.schedules import Bounds, Schedules
from shoal.planner.search.space import LEVELS, Degrees, MicrobatchSchedule, ModelDegrees, Recompute, Space, simplicity
from shoal.plans.plan import Plan

_ANY = Limit()


_NEVER = float("inf")


@lru_cache(maxsize=65536)
def _shapes(pipeline: int, microbatches: int, orders: tuple[tuple[str, int], ...]) -> tuple[PipelineShape, ...]:
    return tuple(PipelineShape(schedule, pipeline, stages, microbatches) for schedule, stages in orders)


class BoundedPlan(NamedTuple):
    """A plan with lower bounds of its memory shortfall (bytes) and its step time (s; infinite if it cannot fit)."""

    plan: Plan
    missing: float
    seconds: float


class Search:
    """Branch-and-bound search of one space. Several orders share its cached costs."""

    def __init__(
        self,
        space: Space,
        costs: Callable[[int], Costs],
        grain_size: int,
        watch: Callable[[], None] | None = None,
    ) -> None:
        """Create a search with empty caches.

        `costs`: function from a number of devices to costs. `watch`: called repeatedly during the search.
        """
        self.space, self.costs, self.grain_size, self.watch = space, costs, grain_size, watch
        self._whole: dict[tuple[int, ModelDegrees], dict[tuple[int, Recompute, bool], Whole]] = {}
        self._states: dict[Degrees, tuple[BlockStates, ...]] = {}
        self._turns: dict[tuple[int, ModelDegrees, ScheduleFamily, bool], dict[int, Turn]] = {}  # by stages per rank
        self._least: dict[tuple[int, int, ModelDegrees, MicrobatchSchedule], float] = {}
        self._least_for_all: dict[tuple[Degrees, Degrees, MicrobatchSchedule], float] = {}
        self._least_at: dict[tuple[Degrees, MicrobatchSchedule], float] = {}
        self._beside: dict[Degrees, float] = {}
        self._bytes: dict[tuple[object, ...], float] = {}
        self._predicted: dict[tuple[object, ...], Prediction] = {}
        self._forget_what_fits()

    def _forget_what_fits(self) -> None:
        self._missing_of: dict[tuple[Degrees, MicrobatchSchedule], float] = {}
        self._missing_uncut: dict[tuple[Degrees, ScheduleFamily], float] = {}
        self._groups: dict[tuple[int, int, ModelDegrees], list[tuple[float, Whole]]] = {}
        self._schedules: dict[tuple[int, int, Degrees], Schedules] = {}
        self._plans: dict[tuple[Degrees, MicrobatchSchedule], list[BoundedPlan]] = {}

    def with_more_memory(self, num_bytes: int) -> Search:
        """Return a search of devices with more memory. It shares all caches except those of what fits."""
        other, costs = copy(self), self.costs
        known: dict[int, Costs] = {}

        def larger(num_devices: int) -> Costs:
            own = costs(num_devices)
            if own.alike not in known:
                known[own.alike] = own.with_more_memory(num_bytes)
            return known[own.alike]

        other.costs = larger
        other._forget_what_fits()
        return other

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

    def classes(self, places: Sequence[Degrees]) -> list[LayoutClass]:
        """Group places into layout classes."""
        found: dict[tuple[int, int, ModelDegrees], list[int]] = {}
        for place in places:
            key = self.costs(place.devices).alike, self.space.share(place), place.cut
            found.setdefault(key, []).append(place.replicas)
        classes = []
        for (_, share, cut), replicas in found.items():
            first, last = Degrees(min(replicas), cut), Degrees(max(replicas), cut)
            numbers, beside = tuple(sorted(replicas)), self.beside(first)
            classes.append(LayoutClass(share, cut, numbers, first, last, first.devices, last.devices, beside))
        return classes

    @cached_property
    def all_classes(self) -> list[LayoutClass]:
        """The layout classes of all places."""
        return self.classes(self.places)

    def classes_of(self, wanted: Wanted) -> list[LayoutClass]:
        """Return the layout classes that a pass may take plans from."""
        if wanted.takes_all:
            return self.all_classes
        counts = sorted(n for n in self.by_devices if wanted.fewest <= n <= wanted.most)
        return self.classes([place for n in counts for place in self.by_devices[n] if place != wanted.but])

    def passes(self) -> SearchPasses:
        """Return new passes through this search, for one answer."""
        return SearchPasses(self)

    def in_order(self, aim: Aim, limit: Limit = _ANY) -> Iterator[Candidate]:
        """Yield the fitting candidates within the limit by the aim's key; equal keys by simplicity."""
        return PlanOrder(self, aim, limit, Ceiling()).run(self.all_classes)

    # ------------------------------------------------------------------------------------------------- bounds

    def floor(self, place: Degrees) -> float:
        """Return a lower bound of the seconds of a place from its degrees alone, without `beside`."""
        return self.costs(place.devices).floor(self.space.share(place) * self.grain_size, place.cut)

    def beside(self, place: Degrees) -> float:
        """Return the seconds of every plan of a place that only the bound of a whole plan includes."""
        if place not in self._beside:
            self._beside[place] = self.costs(place.devices).beside(place)
        return self._beside[place]

    def groups(self, place: Degrees) -> list[tuple[float, Whole]]:
        """Return the schedule families of a place that may fit, with lower bounds of their seconds in ascending order.

        All numbers of replicas that give a rank the same grains share them, on devices with equal costs.
        """
        costs, share, cut = self.costs(place.devices), self.space.share(place), place.cut
        key = costs.alike, share, cut
        if key not in self._groups:
            self._groups[key] = list(self._families(costs, share, cut, self.floor(place)))
            self._groups[key].sort(key=itemgetter(0))
        return self._groups[key]

    def _families(self, costs: Costs, share: int, cut: ModelDegrees, floor: float) -> Iterator[tuple[float, Whole]]:
        alone, pipeline, sizes = cut._replace(pipeline=1), cut.pipeline, self.space.sizes(share)
        known, memory = self._whole.setdefault((costs.alike, alone), {}), costs.memory_bytes
        counted = [(grains, -(-share // grains)) for grains in reversed(sizes)]
        each = [(grains, microbatches, even_shares(pipeline, microbatches)) for grains, microbatches in counted]
        for kind in product(self.space.recomputes, self.space.sequences(cut)):
            for grains, microbatches, parts in each:
                one = known.get((grains, *kind))
                if one is None:
                    one = known[(grains, *kind)] = self._of_microbatch(costs, alone, ScheduleFamily(grains, *kind))
                # A microbatch of one grain stays, to report what it lacks. Larger microbatches need more.
                if one.bytes / pipeline > memory and grains > 1:
                    break
                if one.activations / parts > memory and grains > sizes[-1]:
                    continue
                yield max(floor, microbatches * one.seconds_on(pipeline)), one

    def crowding(self, place: Degrees) -> Callable[[Whole], bool]:
        """Return a cheaper test for a family: True means that its `missing_uncut` is positive."""
        pipeline, share = place.cut.pipeline, self.space.share(place)
        if pipeline == 1:
            return lambda _: False
        costs = self.costs(place.devices)
        if place not in self._states:
            self._states[place] = costs.block_states(self._most_divided(place, MicrobatchSchedule(1)))
        states = self._states[place]
        return lambda whole: costs.is_crowded(states, whole.size, pipeline, -(-share // whole.group.grains))

    def _of_microbatch(self, costs: Costs, alone: ModelDegrees, group: ScheduleFamily) -> Whole:
        place, way = Degrees(self._most_replicas(costs, alone, group.grains), alone), MicrobatchSchedule(*group)
        plan, microbatches = self.space.plan(place, way), -(-self.space.share(place) // group.grains)
        num_bytes = min(map(costs.least_bytes, self._most_divided(place, way)), default=0.0)
        return Whole(
            group, costs.least_seconds(plan) / microbatches, num_bytes, costs.blocks(plan), costs.block_size(plan)
        )

    def _most_replicas(self, costs: Costs, alone: ModelDegrees, grains: int) -> int:
        """Return the most replicas that give a rank this many grains at these costs, the finest division.

        A single rank on a CPU host may use all cores, and so have other costs than several ranks.
        """
        most, size = self.space.most_replicas(grains), Degrees(1, alone).devices
        if self.costs(most * size) is costs:
            return most
        return max((n for n in range(1, most + 1) if self.costs(n * size) is costs), default=1)

    def _most_divided(self, place: Degrees, way: MicrobatchSchedule) -> list[Plan]:
        """Return plans of a family, one of which needs no more bytes than any plan of the family.

        A plan with one shared copy counts at any place, since fewer replicas may sum through shared memory.
        """
        levels = self.space.levels(place.cut) if place.replicas > 1 else LEVELS[-1:]
        divided = [self.space.plan(place, way, place.replicas, level) for level in levels]
        if self.space.one_copy and place.replicas > 1 and place.cut.ranks == 1:
            plan = self.space.plan(place, way)
            divided.append(plan.model_copy(update={"memory": plan.memory.model_copy(update={"shared": True})}))
        return divided

    def least_seconds(self, place: Degrees, way: MicrobatchSchedule) -> float:
        """Return a lower bound of the seconds of all plans of a family."""
        costs = self.costs(place.devices)
        share = self.space.share(place)
        key = (costs.alike, share, place.cut, way)
        if key not in self._least:
            microbatches = -(-share // way.grains)
            turns = self._known_turns(costs, place.cut, ScheduleFamily(*way[:3]), microbatches)
            if way.stages not in turns:
                turns[way.stages] = costs.turn(self.space.plan(place, way))
            shape = PipelineShape(way.schedule, place.cut.pipeline, way.stages, microbatches)
            self._least[key] = costs.least_of(turns[way.stages], shape)
        return self._least[key]

    def _known_turns(
        self, costs: Costs, cut: ModelDegrees, group: ScheduleFamily, microbatches: int
    ) -> dict[int, Turn]:
        """Return the cached turns of a family by stages per rank. Shares of several microbatches use one cache."""
        return self._turns.setdefault((costs.alike, cut, group, microbatches > 1), {})

    def least_for_all(self, layouts: LayoutClass, way: MicrobatchSchedule) -> float:
        """Return a lower bound of the seconds of a family at all places of a class, without `beside`."""
        if len(layouts.replicas) == 1 or layouts.cut.pipeline == 1:  # `least_at` is tighter at the same cost
            return self.least_seconds(layouts.first, way)
        key = layouts.first, layouts.divided, way
        if key not in self._least_for_all:
            plans = [self.space.plan(Degrees(replicas, layouts.cut), way) for replicas in layouts.replicas]
            least = self.costs(layouts.first.devices).least_for_all(plans)
            self._least_for_all[key] = max(self.least_seconds(layouts.first, way), least)
        return self._least_for_all[key]

    def least_at(self, place: Degrees, way: MicrobatchSchedule) -> float:
        """Return a lower bound of the seconds of a family at one place."""
        if (place, way) not in self._least_at:
            least = self.costs(place.devices).least_at(self.space.plan(place, way))
            self._least_at[place, way] = max(self.least_seconds(place, way), least) + self.beside(place)
        return self._least_at[place, way]

    def plans(self, place: Degrees, way: MicrobatchSchedule) -> list[BoundedPlan]:
        """Return the plans of a family at one place with their bounds, computed once for all orders."""
        if (place, way) not in self._plans:
            nearly = self.costs(place.devices).nearly
            lacking = ((plan, self.lacks(place, way, plan)) for plan in self.space.plans(place, way))
            self._plans[place, way] = [
                BoundedPlan(plan, missing, nearly(plan) if missing <= 0 else _NEVER) for plan, missing in lacking
            ]
        return self._plans[place, way]

    def bounded(self, layouts: LayoutClass, whole: Whole) -> Iterator[tuple[float, MicrobatchSchedule]]:
        """Yield the schedules of a family with a cheap lower bound: from the family on one rank with all stages.

        If another share has computed the tighter bound already, that bound is used.
        """
        costs, cut, group = self.costs(layouts.first.devices), layouts.cut, whole.group
        microbatches = -(-layouts.share // group.grains)
        turns = self._known_turns(costs, cut, group, microbatches)
        for shape in _shapes(cut.pipeline, microbatches, self.space.orders(cut.pipeline, microbatches)):
            turn = turns.get(shape.stages)
            seconds = costs.filled(whole, shape) if turn is None else costs.least_of(turn, shape)
            yield seconds, MicrobatchSchedule(*group, shape.schedule, shape.stages)

    def schedules(self, layouts: LayoutClass) -> Schedules:
        """Return the schedules of a class. They depend on the memory of the most divided place of the class."""
        key = self.costs(layouts.first.devices).alike, layouts.share, layouts.divided
        if key not in self._schedules:
            self._schedules[key] = Schedules(
                Bounds(
                    iter(self.groups(layouts.first)),
                    self.crowding(layouts.divided),
                    partial(self.bounded, layouts),
                    partial(self.least_seconds, layouts.first),
                )
            )
        return self._schedules[key]

    def missing_bytes(self, place: Degrees, way: MicrobatchSchedule) -> float:
        """Return the bytes that the most divided plan of a family lacks. A plan may fit if this is not positive."""
        # With the same stages per rank, no other schedule keeps fewer microbatches on any rank.
        way = way._replace(schedule="interleaved_1f1b" if way.stages > 1 else "1f1b")
        if (place, way) not in self._missing_of:
            lacking = (self.lacks(place, way, plan) for plan in self._most_divided(place, way))
            self._missing_of[place, way] = min(lacking, default=0.0)
        return self._missing_of[place, way]

    def missing_uncut(self, place: Degrees, group: ScheduleFamily) -> float:
        """Return a lower bound of `missing_bytes` for all schedules of a family, before the model is cut into stages.

        No schedule keeps fewer microbatches on a rank than 1f1b with one stage per rank.
        """
        if place.cut.pipeline == 1:
            return 0.0
        if (place, group) not in self._missing_uncut:
            costs, plans = self.costs(place.devices), self._most_divided(place, MicrobatchSchedule(*group))
            lacking = (costs.uncut_bytes(plan) - costs.memory_bytes for plan in plans)
            self._missing_uncut[place, group] = min(lacking, default=0.0)
        return self._missing_uncut[place, group]

    def missing_at_least(self, place: Degrees) -> float:
        """Return a lower bound of the bytes that every plan of a place lacks. A plan may fit if this is not positive.

        The smallest microbatches come first, since one of them nearly always fits if any plan fits.
        """
        smallest = self.space.sizes(self.space.share(place))[-1]
        kinds = product(self.space.recomputes, self.space.sequences(place.cut))
        least = min(self._missing(place, [ScheduleFamily(smallest, *kind) for kind in kinds]), default=0.0)
        if least > 0:
            groups = [whole.group for _, whole in self.groups(place)]
            least = min([least, *self._missing(place, groups)])
        return least

    def _missing(self, place: Degrees, groups: Sequence[ScheduleFamily]) -> Iterator[float]:
        """Yield the bytes that these families lack, up to the first that may fit, without families that lack more."""
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
        """Return a lower bound of the bytes that a plan lacks. The plan may fit if this is not positive."""
        costs = self.costs(place.devices)
        shared = plan.num_owners if plan.memory.shared else 1
        divided = place.replicas > 1, plan.layout.shard, plan.shard.level, shared
        key = costs.alike, self.space.share(place), place.cut, way, divided
        if key not in self._bytes:
            self._bytes[key] = costs.least_bytes(plan)
        return self._bytes[key] - costs.memory_bytes

    def predict(self, plan: Plan) -> Prediction:
        """Return the prediction of a plan, computed once."""
        key, costs = simplicity(plan) + tuple(plan.layout.__dict__.values()), self.costs(plan.layout.world_size)
        if key not in self._predicted:
            self._predicted[key] = costs.predict(plan)
        return costs.judged(self._predicted[key])
