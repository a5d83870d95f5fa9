"""Predicted plans of a search, and statistics of the places that it did not choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

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


_Lacking = Callable[[float], float]  # returns the least missing bytes of plans, exact if below the argument


@dataclass
class Seen:
    """Statistics of a search on the places that it did not choose."""

    predicted: dict[Degrees, Candidate] = field(default_factory=dict)  # best fitting plan of each place so far
    refused: dict[Degrees, str] = field(default_factory=dict)  # a reason per place with illegal plans
    num_predicted: int = 0
    num_bounded: int = 0
    _missing: dict[Degrees, float] = field(default_factory=dict)
    _unsettled: dict[Degrees, list[_Lacking]] = field(default_factory=dict)

    def bounded(self, number: int) -> None:
        """Count plans that were bounded."""
        self.num_bounded += number

    def predicts(self, place: Degrees, candidate: Candidate) -> None:
        """Record a predicted plan."""
        self.num_predicted += 1
        if not candidate.prediction.fits:
            self.lacks(place, candidate.prediction.missing_bytes)
        elif place not in self.predicted or candidate.rank < self.predicted[place].rank:
            self.predicted[place] = candidate

    def refuses(self, place: Degrees, refusal: str) -> None:
        """Record the reason why a plan is illegal."""
        self.refused[place] = min(refusal, self.refused.get(place, refusal))

    def lacks(self, place: Degrees, missing: float) -> None:
        """Record the bytes that a plan lacks."""
        self._missing[place] = min(missing, self._missing.get(place, missing))

    def lacks_later(self, place: Degrees, least: _Lacking) -> None:
        """Record a function for the bytes that further plans lack. It is called only when needed."""
        self._unsettled.setdefault(place, []).append(least)

    def missing_bytes(self, place: Degrees) -> float | None:
        """Return the least bytes that a plan of a place lacks, or None if none lacks any."""
        for least in self._unsettled.pop(place, ()):
            known = self._missing.get(place, float("inf"))
            if (missing := least(known)) < known:
                self._missing[place] = missing
        return self._missing.get(place)

    @property
    def least_missing_bytes(self) -> float | None:
        """The least bytes that a plan of any place lacks, or None. Deferred functions get the bound to undercut."""
        least = min(self._missing.values(), default=float("inf"))
        for lacking in self._unsettled.values():
            least = min([least, *(later(least) for later in lacking)])
        return least if least < float("inf") else None

    @property
    def all_missing_bytes(self) -> dict[Degrees, float]:
        """The least bytes that a plan lacks, for each place with such a plan."""
        for place in tuple(self._unsettled):
            self.missing_bytes(place)
        return self._missing
