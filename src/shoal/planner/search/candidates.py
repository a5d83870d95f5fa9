"""Predicted plans of a search, and statistics of the places that it did not choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter

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
        """Processes in all."""
        return self.plan.layout.world_size

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.prediction.step_seconds

    @property
    def rank(self) -> tuple[float, tuple[int, ...]]:
        """Its place among others: by seconds, equal ones by simplicity."""
        return self.seconds, simplicity(self.plan)

    @property
    def place(self) -> Degrees:
        """Its degrees, with data x shard as one."""
        at = self.plan.layout
        return Degrees(at.data * at.shard, ModelDegrees(at.tensor, at.pipeline, at.context))


_Lacking = tuple[float, Callable[[], float]]  # a lower bound of what plans lack, and exactly what


@dataclass
class Seen:
    """Statistics of a search on the places that it did not choose."""

    predicted: dict[Degrees, Candidate] = field(default_factory=dict)  # a place's best plan so far
    refused: dict[Degrees, str] = field(default_factory=dict)  # why plans are illegal, where some are
    num_predicted: int = 0
    num_bounded: int = 0
    _missing: dict[Degrees, float] = field(default_factory=dict)
    _unsettled: dict[Degrees, list[_Lacking]] = field(default_factory=dict)

    def lacks(self, place: Degrees, missing: float) -> None:
        """Notes a plan that does not fit."""
        self._missing[place] = min(missing, self._missing.get(place, missing))

    def lacks_at_least(self, place: Degrees, bound: float, exactly: Callable[[], float]) -> None:
        """Notes plans that do not fit; what they lack is asked when it matters."""
        self._unsettled.setdefault(place, []).append((bound, exactly))

    def missing_bytes(self, place: Degrees) -> float | None:
        """The least that a plan of a place lacks; None where none does."""
        for bound, exactly in sorted(self._unsettled.pop(place, ()), key=itemgetter(0)):
            if bound >= self._missing.get(place, float("inf")):
                break
            self.lacks(place, exactly())
        return self._missing.get(place)

    @property
    def all_missing_bytes(self) -> dict[Degrees, float]:
        """The least that a plan lacks, of each place where one does."""
        for place in tuple(self._unsettled):
            self.missing_bytes(place)
        return self._missing
