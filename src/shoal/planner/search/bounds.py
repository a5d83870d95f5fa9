"""Lower bounds of the plans of a space, in the order in which a search applies them.

1. `floor`: seconds of a class of layouts, from its degrees alone.
2. `is_crowded`: bytes of a family of schedules, from the blocks alone.
3. `families`, `schedules`: seconds of a family and of its schedules, without a division into stages.
4. `staged`, `plans`: seconds and bytes of a whole plan, without the simulation of its pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from operator import itemgetter
from typing import NamedTuple

from shoal.planner.predict.lower_bounds import BlockSize, BlockStates, PipelineShape, filled, least_peak
from shoal.planner.predict.workload import Prediction
from shoal.planner.search.costs import Costs, MicrobatchSeconds
from shoal.planner.search.space import LEVELS, Degrees, MicrobatchSchedule, ModelDegrees, Recompute, Space, simplicity
from shoal.plans.plan import Plan


class ScheduleFamily(NamedTuple):
    """Microbatch schedules that differ only in the order of passes and the stages per rank."""

    grains: int
    recompute: Recompute
    sequence: bool


class LayoutClass(NamedTuple):
    """Degrees that differ only in replicas and give a rank the same grains, so that their bounds are equal."""

    share: int
    cut: ModelDegrees
    replicas: tuple[int, ...]  # in order, the fewest first
    first: Degrees  # the degrees with the fewest replicas
    divided: Degrees  # the degrees with the most replicas
    beside: float  # seconds of every plan that only the bound of a whole plan includes


class BoundedPlan(NamedTuple):
    """A plan with lower bounds of its memory shortfall (bytes) and its step time (s; infinite if it cannot fit)."""

    plan: Plan
    missing: float
    seconds: float


class Bounds:
    """Bounds of the plans of a space and their predictions, each computed once.

    `costs`: function from a number of devices to costs. Results depend on the devices only through the costs.
    """

    def __init__(self, space: Space, costs: Callable[[int], Costs], grain_size: int) -> None:
        self.space, self.costs, self.grain_size = space, costs, grain_size
        self._microbatches: dict[tuple[Costs, int, int, ScheduleFamily], MicrobatchSeconds] = {}
        self._sizes: dict[tuple[Costs, int, int, ScheduleFamily], BlockSize] = {}
        self._families: dict[tuple[Costs, int, Degrees], list[tuple[float, ScheduleFamily]]] = {}
        self._states: dict[Degrees, tuple[BlockStates, ...]] = {}
        self._staged: dict[tuple[Costs, int, ModelDegrees, MicrobatchSchedule], float] = {}
        self._at: dict[tuple[Degrees, MicrobatchSchedule], float] = {}
        self._missing: dict[tuple[Degrees, MicrobatchSchedule], float] = {}
        self._bytes: dict[tuple[object, ...], float] = {}
        self._plans: dict[tuple[Degrees, MicrobatchSchedule], list[BoundedPlan]] = {}
        self._predicted: dict[tuple[object, ...], Prediction] = {}

    # ------------------------------------------------------------------------------------------------- seconds

    def floor(self, place: Degrees) -> float:
        """Return a lower bound of the seconds of a place from its degrees alone, without `beside`."""
        return self.costs(place.devices).floor(self.space.share(place) * self.grain_size, place.cut)

    def families(self, layouts: LayoutClass) -> list[tuple[float, ScheduleFamily]]:
        """Return the families of a class that may fit, with lower bounds of their seconds in ascending order."""
        costs, share, cut = self.costs(layouts.first.devices), layouts.share, layouts.cut
        key = costs, share, layouts.divided
        if key not in self._families:
            found = []
            for family in self._every_family(layouts.divided):
                if not self.is_crowded(layouts.divided, family):
                    of = self._microbatch(costs, cut, family)
                    busiest = max(of.seconds / cut.pipeline, of.blocks.busiest(cut.pipeline))
                    found.append((-(-share // family.grains) * busiest, family))
            self._families[key] = sorted(found, key=itemgetter(0))
        return self._families[key]

    def _every_family(self, place: Degrees) -> list[ScheduleFamily]:
        """Return the families of a place, the smallest microbatches first."""
        sizes = reversed(self.space.sizes(self.space.share(place)))
        kinds = product(sizes, self.space.recomputes, self.space.sequences(place.cut))
        return [ScheduleFamily(*kind) for kind in kinds]

    def schedules(self, layouts: LayoutClass, family: ScheduleFamily) -> list[tuple[float, MicrobatchSchedule]]:
        """Return the schedules of a family with lower bounds of their seconds, in ascending order."""
        pipeline, microbatches = layouts.cut.pipeline, -(-layouts.share // family.grains)
        of = self._microbatch(self.costs(layouts.first.devices), layouts.cut, family)
        found = []
        for schedule, stages in self.space.orders(pipeline, microbatches):
            shape = PipelineShape(schedule, pipeline, stages, microbatches)
            seconds = filled(of.seconds, shape, of.blocks.last, of.blocks.through)
            found.append((seconds, MicrobatchSchedule(*family, schedule, stages)))
        return sorted(found)

    def _microbatch(self, costs: Costs, cut: ModelDegrees, family: ScheduleFamily) -> MicrobatchSeconds:
        """Return the costs of a family's microbatch on a rank with all stages."""
        key = costs, cut.tensor, cut.context, family
        if key not in self._microbatches:
            self._microbatches[key] = costs.microbatch(self._alone(costs, cut, family))
        return self._microbatches[key]

    def _alone(self, costs: Costs, cut: ModelDegrees, family: ScheduleFamily) -> Plan:
        """Return a plan at these costs without a pipeline, where a microbatch of the family is the only one."""
        alone, replicas = cut._replace(pipeline=1), self.space.most_replicas(family.grains)
        if self.costs(replicas * alone.ranks) is not costs:  # a single rank on a CPU host may use all cores
            replicas = next((n for n in range(replicas, 0, -1) if self.costs(n * alone.ranks) is costs), 1)
        return self.space.plan(Degrees(replicas, alone), MicrobatchSchedule(*family))

    def staged(self, layouts: LayoutClass, way: MicrobatchSchedule) -> float:
        """Return a lower bound of the seconds of a schedule from its stages, without `beside`."""
        costs = self.costs(layouts.first.devices)
        key = costs, layouts.share, layouts.cut, way
        if key not in self._staged:
            self._staged[key] = costs.staged(self.space.plan(layouts.first, way))
        return self._staged[key]

    def at(self, place: Degrees, way: MicrobatchSchedule) -> float:
        """Return a lower bound of the seconds of a schedule at a place."""
        if (place, way) not in self._at:
            costs = self.costs(place.devices)
            self._at[place, way] = costs.at(self.space.plan(place, way)) + costs.beside(place)
        return self._at[place, way]

    # --------------------------------------------------------------------------------------------------- bytes

    def is_crowded(self, place: Degrees, family: ScheduleFamily) -> bool:
        """Check whether the blocks of a family alone do not fit, for any division of the blocks over the ranks.

        No schedule keeps fewer microbatches on a rank than 1f1b with one stage per rank.
        """
        shape = self._size(place, family), place.cut.pipeline, -(-self.space.share(place) // family.grains)
        memory = self.costs(place.devices).memory_bytes
        return all(one.is_crowded(*shape, memory) for one in self._block_states(place))

    def _size(self, place: Degrees, family: ScheduleFamily) -> BlockSize:
        costs, cut = self.costs(place.devices), place.cut
        key = costs, cut.tensor, cut.context, family
        if key not in self._sizes:
            self._sizes[key] = costs.block_size(self._alone(costs, cut, family))
        return self._sizes[key]

    def _block_states(self, place: Degrees) -> tuple[BlockStates, ...]:
        """Return the bytes of blocks of the most divided plans, those that divide most first."""
        if place not in self._states:
            plans = self._most_divided(place, MicrobatchSchedule(1))[::-1]
            self._states[place] = self.costs(place.devices).block_states(plans)
        return self._states[place]

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

    def missing_bytes(self, place: Degrees, way: MicrobatchSchedule) -> float:
        """Return the bytes that the most divided plan of a schedule lacks. A plan may fit if this is not positive."""
        # With the same stages per rank, no other schedule keeps fewer microbatches on any rank.
        way = way._replace(schedule="interleaved_1f1b" if way.stages > 1 else "1f1b")
        if (place, way) not in self._missing:
            lacking = (self.lacks(place, way, plan) for plan in self._most_divided(place, way))
            self._missing[place, way] = min(lacking)
        return self._missing[place, way]

    def missing_at_least(self, place: Degrees, below: float = float("inf")) -> float:
        """Return a lower bound of the bytes that every plan of a place lacks, or `below` if that is less.

        A plan may fit if the bound is not positive. The smallest microbatches come first, since one of them nearly
        always fits if any plan fits.
        """
        families = self._every_family(place)
        smallest = [family for family in families if family.grains == families[0].grains]
        below = self._least_missing(place, smallest, below)
        return below if below <= 0 else self._least_missing(place, families[len(smallest) :], below)

    def crowded_missing(self, place: Degrees, below: float) -> float:
        """Return the least bytes that a crowded family of a place lacks, or `below` if that is less.

        Of families that differ only in the microbatch, the smallest crowded one lacks least.
        """
        smallest: dict[tuple[Recompute, bool], ScheduleFamily] = {}
        for family in self._every_family(place):
            if family[1:] not in smallest and self.is_crowded(place, family):
                smallest[family[1:]] = family
        return self._least_missing(place, list(smallest.values()), below)

    def _least_missing(self, place: Degrees, families: Sequence[ScheduleFamily], below: float) -> float:
        memory, pipeline, share = self.costs(place.devices).memory_bytes, place.cut.pipeline, self.space.share(place)
        bounds = []
        for family in families:
            shape = self._size(place, family), pipeline, -(-share // family.grains), memory
            bounds.append((min(least_peak(one, *shape) for one in self._block_states(place)) - memory, family))
        for bound, family in sorted(bounds):
            if bound >= below or below <= 0:
                break
            for _, stages in dict.fromkeys(self.space.orders(pipeline, -(-share // family.grains))):
                below = min(below, self.missing_bytes(place, MicrobatchSchedule(*family, stages=stages)))
        return below

    def lacks(self, place: Degrees, way: MicrobatchSchedule, plan: Plan) -> float:
        """Return a lower bound of the bytes that a plan lacks. The plan may fit if this is not positive."""
        costs = self.costs(place.devices)
        shared = plan.num_owners if plan.memory.shared else 1
        divided = place.replicas > 1, plan.layout.shard, plan.shard.level, shared
        key = costs, self.space.share(place), place.cut, way, divided
        if key not in self._bytes:
            self._bytes[key] = costs.least_bytes(plan)
        return self._bytes[key] - costs.memory_bytes

    # ------------------------------------------------------------------------------------------------ one plan

    def plans(self, place: Degrees, way: MicrobatchSchedule) -> list[BoundedPlan]:
        """Return the plans of a schedule at a place with their bounds, the least seconds first."""
        if (place, way) not in self._plans:
            nearly = self.costs(place.devices).nearly
            lacking = ((plan, self.lacks(place, way, plan)) for plan in self.space.plans(place, way))
            found = [
                BoundedPlan(plan, missing, nearly(plan) if missing <= 0 else float("inf")) for plan, missing in lacking
            ]
            self._plans[place, way] = sorted(found, key=itemgetter(2))
        return self._plans[place, way]

    def predict(self, plan: Plan) -> Prediction:
        """Return the prediction of a plan."""
        key = simplicity(plan) + tuple(plan.layout.__dict__.values())
        if key not in self._predicted:
            self._predicted[key] = self.costs(plan.layout.world_size).predict(plan)
        return self._predicted[key]
