"""Bounds: what is known of plans before they are predicted, of many at once; and the families that share a bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from shoal.planner.predict.pipeline_bound import PipelineShape
from shoal.planner.predict.workload import Prediction
from shoal.planner.search.space import Degrees, ModelDegrees, Recompute
from shoal.plans.plan import Plan


@dataclass(frozen=True)
class Costs:
    """What plans cost on some numbers of devices. The bounds are of `predict`, and cheap.

    `least_seconds` is the same for all plans of a family, and for all numbers of replicas that leave a rank as many
    grains. Of both bounds, p stages on one rank have at most p times what the busiest of them has. `least_bytes` grows
    with the microbatch, shrinks with the shard axis, and is the same for all degrees of a data axis where there are
    several replicas, by whatever all_reduce they sum. `nearly`: a better bound of one plan's seconds, less cheap.
    `filled`: a bound of a schedule's seconds, from those of a microbatch on all stages. `least_at`: a better bound of
    all plans of a family at one place. `parts`: of a microbatch how many equal units there are, and seconds of each.
    `floor`: (samples a replica, degrees that share them) -> seconds that no plan goes below. `beside`: what any
    plan of a place takes beside all of these but `nearly`; no less for more replicas.
    `memory_bytes`: of a device.
    Equal numbers of devices have one and the same Costs, and others may have too.
    """

    predict: Callable[[Plan], Prediction]
    least_seconds: Callable[[Plan], float]
    least_bytes: Callable[[Plan], float]
    nearly: Callable[[Plan], float]
    memory_bytes: float
    filled: Callable[[float, PipelineShape], float] = lambda seconds, turns: (
        seconds * turns.microbatches / turns.pipeline
    )
    least_at: Callable[[Plan], float] = lambda plan: 0.0
    floor: Callable[[float, ModelDegrees], float] = lambda samples, cut: 0.0
    parts: Callable[[Plan], tuple[tuple[int, float], ...]] = lambda plan: ()
    beside: Callable[[Degrees], float] = lambda place: 0.0


class ScheduleFamily(NamedTuple):
    """Ways that differ only in the order of their microbatches."""

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
    """A group where a rank has all stages: seconds of a microbatch, and least bytes.

    `parts`: how many equal units there are, and the seconds of a microbatch that each takes.
    """

    group: ScheduleFamily
    seconds: float
    bytes: float
    parts: tuple[tuple[int, float], ...]

    def least_seconds(self, pipeline: int) -> float:
        """Of the busiest of so many ranks: it has its part of all, and of equal units a whole number."""
        most = self.seconds / pipeline
        for count, seconds in self.parts:
            most = max(most, -(-count // pipeline) * seconds)
        return most
