"""Costs of a workload's plans on a cluster, as a search asks for them, corrected by what runs have shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from shoal.hardware import Cluster
from shoal.plan.plan import Plan
from shoal.planner.search import Costs
from shoal.planner.step_time import Predictor
from shoal.planner.workload import Prediction, Program, Workload


@dataclass(frozen=True)
class Corrected:
    """Predictions whose terms are multiplied by `factors` (by name; 1 for the others)."""

    predictor: Predictor
    factors: Mapping[str, float]

    @property
    def least(self) -> float:
        """The smallest factor: what a bound of the whole step is multiplied by."""
        return min([1.0, *self.factors.values()])

    def predict(self, plan: Plan) -> Prediction:
        """The corrected prediction."""
        found = self.predictor.predict(plan)
        if not self.factors:
            return found
        terms = {name: seconds * self.factors.get(name, 1.0) for name, seconds in found.terms.items()}
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
    work: Workload, cluster: Cluster, program: Program | None = None, factors: Mapping[str, float] | None = None
) -> Callable[[int], Costs]:
    """The costs of plans on each number of devices."""
    corrected = Corrected(Predictor(work, cluster, program), factors or {})
    predictor, least = corrected.predictor, corrected.least
    known: dict[int, Costs] = {}

    def on(num_devices: int) -> Costs:
        device = cluster.device_for(min(cluster.devices_per_host, num_devices))
        if id(device) not in known:
            ideal = predictor.ideal_seconds(num_devices) * least
            known[id(device)] = Costs(
                predict=corrected.predict,
                least_seconds=lambda plan: predictor.least_seconds(plan) * least,
                least_bytes=predictor.least_bytes,
                nearly=lambda plan: predictor.without_waits(plan) * least,
                memory_bytes=device.memory_bytes,
                floor=lambda samples, ranks: ideal * samples / ranks,
            )
        return known[id(device)]

    return on
