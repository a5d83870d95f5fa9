"""Costs of a workload's plans on a cluster, as a search asks for them, corrected by what runs have shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from shoal.hardware.values import Cluster, Device
from shoal.planner.calibrate.lessons import Correction
from shoal.planner.predict.lower_bounds import Floors, LowerBounds, PipelineShape, filled
from shoal.planner.predict.step_time import Predictor
from shoal.planner.predict.workload import Prediction, Program, Workload
from shoal.planner.search.bounds import Costs
from shoal.planner.search.space import Degrees, ModelDegrees
from shoal.plans.plan import Plan


@dataclass(frozen=True)
class _Corrected(Costs):
    """Predictions and bounds for ranks that have such a device, as a correction expects them to be."""

    predictor: Predictor
    bounds: LowerBounds
    correction: Correction
    device: Device

    @property
    def memory_bytes(self) -> float:
        return self.device.memory_bytes

    @cached_property
    def _least(self) -> float:
        """The smallest factor: what a bound of the whole step is multiplied by."""
        return min([1.0, *self.correction.factors.values()])

    @cached_property
    def _floors(self) -> Floors:
        return self.bounds.floors(self.device)

    def predict(self, plan: Plan) -> Prediction:
        found = self.predictor.predict(plan)
        if not self.correction:
            return found
        terms = self.correction.terms(found.terms)
        seconds = sum(terms.values())
        ratio = found.step_seconds / seconds if seconds else 1.0
        return replace(
            found,
            step_seconds=seconds,
            terms=terms,
            bubble=terms["bubble"] / seconds if seconds else 0.0,
            mfu=found.mfu * ratio if found.mfu is not None else None,
        )

    def floor(self, samples: float, degrees: ModelDegrees) -> float:
        return self._floors.seconds(samples, *degrees) * self._least

    def beside(self, place: Degrees) -> float:
        return self.bounds.beside(place.devices, place.cut.ranks > 1) * self._least

    def least_seconds(self, plan: Plan) -> float:
        return self.bounds.least_seconds(plan) * self._least

    def filled(self, seconds: float, shape: PipelineShape) -> float:
        return filled(seconds, shape)

    def least_at(self, plan: Plan) -> float:
        return self.bounds.least_at(plan) * self._least

    def nearly(self, plan: Plan) -> float:
        return self.bounds.without_waits(plan) * self._least

    def least_bytes(self, plan: Plan) -> float:
        return self.bounds.least_bytes(plan)


def costs_of(
    work: Workload, cluster: Cluster, program: Program | None = None, correction: Correction | None = None
) -> Callable[[int], Costs]:
    """The costs of plans on each number of devices."""
    predictor = Predictor(work, cluster, program)
    bounds, correction = LowerBounds(predictor), correction or Correction()
    known: dict[int, Costs] = {}
    by_device: dict[int, Costs] = {}

    def on(num_devices: int) -> Costs:
        ranks = min(cluster.devices_per_host, num_devices)
        if ranks not in known:
            device = cluster.device_for(ranks)
            known[ranks] = by_device.setdefault(id(device), _Corrected(predictor, bounds, correction, device))
        return known[ranks]

    return on
