"""Predicted plans of a search, and statistics of the places that it did not choose."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.planner.predict.workload import Prediction
from shoal.planner.search.space import Degrees, ModelDegrees, simplicity
from shoal.plans.plan import Plan


@dataclass(frozen=True)
class Candidate:
    """A plan and its prediction."""

    plan: Plan
    prediction: Prediction

    @property
    def devices(self) -> int:
        """Number of ranks."""
        return self.plan.layout.world_size

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.prediction.step_seconds

    @property
    def rank(self) -> tuple[float, tuple[int, ...]]:
        """Sort key among candidates: seconds, then simplicity."""
        return self.seconds, simplicity(self.plan)

    @property
    def place(self) -> Degrees:
        """The degrees of the plan, with data x shard as one number."""
        at = self.plan.layout
        return Degrees(at.data * at.shard, ModelDegrees(at.tensor, at.pipeline, at.context))
