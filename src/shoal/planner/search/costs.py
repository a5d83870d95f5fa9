"""Costs of a workload's plans on a cluster, as a search asks for them, corrected by what runs have shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from shoal.hardware.values import Cluster
from shoal.planner.calibrate.lessons import Correction
from shoal.planner.predict.pipeline_bound import filled
from shoal.planner.predict.step_time import Predictor
from shoal.planner.predict.workload import Prediction, Program, Workload
from shoal.planner.search.bounds import Costs
from shoal.plans.plan import Plan


@dataclass(frozen=True)
class Corrected:
    """Predictions as a correction expects them to be."""

    predictor: Predictor
    correction: Correction

    @property
    def least(self) -> float:
        """The smallest factor: what a bound of the whole step is multiplied by."""
        return min([1.0, *self.correction.factors.values()])

    def predict(self, plan: Plan) -> Prediction:
        """The corrected prediction."""
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


def costs_of(
    work: Workload, cluster: Cluster, program: Program | None = None, correction: Correction | None = None
) -> Callable[[int], Costs]:
    """The costs of plans on each number of devices."""
    corrected = Corrected(Predictor(work, cluster, program), correction or Correction())
    predictor, least = corrected.predictor, corrected.least
    known: dict[int, Costs] = {}
    by_ranks: dict[int, Costs] = {}

    def on(num_devices: int) -> Costs:
        ranks = min(cluster.devices_per_host, num_devices)
        if ranks not in by_ranks:
            by_ranks[ranks] = of(ranks)
        return by_ranks[ranks]

    def of(ranks: int) -> Costs:
        device = cluster.device_for(ranks)
        if id(device) not in known:
            floors = predictor.floors(device)
            known[id(device)] = Costs(
                predict=corrected.predict,
                least_seconds=lambda plan: predictor.least_seconds(plan) * least,
                least_bytes=predictor.least_bytes,
                nearly=lambda plan: predictor.without_waits(plan) * least,
                memory_bytes=device.memory_bytes,
                filled=filled,
                least_at=lambda plan: predictor.least_at(plan) * least,
                floor=lambda samples, cut: floors.seconds(samples, *cut) * least,
                beside=lambda place: predictor.beside(place.devices, place.cut.ranks > 1) * least,
                parts=lambda plan: tuple((count, one * least) for count, one in predictor.parts(plan)),
            )
        return known[id(device)]

    return on
