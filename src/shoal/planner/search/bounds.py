"""Bounds: what is known of plans before they are predicted, of many at once; and the families that share a bound."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from shoal.planner.predict.lower_bounds import PipelineShape
from shoal.planner.predict.workload import Prediction
from shoal.planner.search.space import Degrees, ModelDegrees, Recompute
from shoal.plans.plan import Plan


class Costs(Protocol):
    """What plans cost on some numbers of devices: predictions, and lower bounds of them, which are cheap.

    Equal numbers of devices have one and the same Costs, and others may have too.
    """

    @property
    def memory_bytes(self) -> float:
        """Of a device."""

    def predict(self, plan: Plan) -> Prediction:
        """The prediction of a plan."""

    def floor(self, samples: float, degrees: ModelDegrees) -> float:
        """Seconds that no plan goes below whose replicas have so many samples each, on the ranks that share them."""

    def beside(self, place: Degrees) -> float:
        """Seconds of any plan of a place that no bound has but `nearly`; no less for more replicas."""

    def least_seconds(self, plan: Plan) -> float:
        """A bound that is the same for all plans of a family, and for all replicas that leave a rank as many grains.

        Of it and of `least_bytes`, p stages on one rank have at most p times what the busiest of them has.
        """

    def filled(self, seconds: float, shape: PipelineShape) -> float:
        """A bound of a schedule's seconds, from those of a microbatch on all stages."""

    def least_at(self, plan: Plan) -> float:
        """A better bound than `least_seconds`, of all plans of a family at one place."""

    def nearly(self, plan: Plan) -> float:
        """A better bound of one plan's seconds, less cheap."""

    def least_bytes(self, plan: Plan) -> float:
        """A bound of the peak: it grows with the microbatch, and shrinks with the shard axis.

        It is the same for all degrees of a data axis where there are several replicas, by whatever all_reduce they sum.
        """


class ScheduleFamily(NamedTuple):
    """Schedules that differ only in the order of their microbatches."""

    grains: int
    recompute: Recompute
    sequence: bool


class LayoutClass(NamedTuple):
    """Places that differ in replicas alone, and leave a rank as many grains: what bounds their plans is the same.

    `replicas`: in order, the fewest first. `first`: the place with fewest. `fewest`, `most`: devices. `beside`: seconds
    of any plan of all of these places that no other bound has.
    """

    share: int
    cut: ModelDegrees
    replicas: tuple[int, ...]
    first: Degrees
    fewest: int
    most: int
    beside: float


class Whole(NamedTuple):
    """A family where a rank has all stages: seconds of a microbatch, and least bytes."""

    group: ScheduleFamily
    seconds: float
    bytes: float
