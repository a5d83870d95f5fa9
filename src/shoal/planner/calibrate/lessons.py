"""Calibration: correction factors of the planner's terms, as medians over measured runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from shoal.planner.calibrate.comparison import PARTS

# What is corrected, and by which part of the clock: exchanges inside of a forward or backward are on its spans.
_EXCHANGES = ("tensor", "context", "pipeline", "parameters")
CORRECTED: dict[str, tuple[tuple[str, ...], str]] = {
    "compute": (tuple(term for term in PARTS["compute"][0] if term not in _EXCHANGES), "compute"),
    "exchanges": (_EXCHANGES, "compute"),
    **{part: (terms, part) for part, (terms, _) in PARTS.items() if part != "compute"},
}
# A share of a step below which no ratio is taken: the clock itself takes about as long.
LEAST_SHARE = 0.001
# Steps after the first ones, below which a median says more of the start than of a step.
LEAST_STEPS = 10


@dataclass(frozen=True)
class Correction:
    """Correction factors of terms (by the names of CORRECTED), and constant host seconds of every step."""

    factors: Mapping[str, float] = field(default_factory=dict)
    host_seconds: float = 0.0

    @property
    def of_terms(self) -> dict[str, float]:
        """Factors by term."""
        return {term: factor for name, factor in self.factors.items() for term in CORRECTED[name][0]}

    def terms(self, predicted: Mapping[str, float]) -> dict[str, float]:
        """Terms as they are expected to be."""
        factors = self.of_terms
        found = {term: seconds * factors.get(term, 1.0) for term, seconds in predicted.items()}
        found["host"] = found.get("host", 0.0) + self.host_seconds
        return found

    def __bool__(self) -> bool:
        return bool(self.factors) or self.host_seconds > 0.0


@dataclass(frozen=True)
class Observation:
    """One run: seconds of a step predicted by term without any correction, and measured by part of the clock.

    `told_seconds`: what had been told of a step, with the correction of that time.
    """

    predicted: Mapping[str, float]
    measured: Mapping[str, float]
    step_seconds: float
    told_seconds: float
    num_steps: int

    def of(self, name: str) -> float:
        """Predicted of one of CORRECTED."""
        return sum(self.predicted.get(term, 0.0) for term in CORRECTED[name][0])

    @property
    def least_seconds(self) -> float:
        """Seconds below which a ratio says nothing."""
        return LEAST_SHARE * self.step_seconds


def observation(compared: Mapping[str, Any]) -> Observation:
    """From what a run keeps of its prediction."""
    old = Correction(compared["factors"], compared.get("host_seconds", 0.0))
    factors = old.of_terms
    predicted = {term: float(seconds) / factors.get(term, 1.0) for term, seconds in compared["terms"].items()}
    predicted["host"] = max(0.0, predicted.get("host", 0.0) - old.host_seconds / factors.get("host", 1.0))
    measured = {part: v["measured"] for part, v in compared["parts"].items() if v["measured"] is not None}
    step = compared["step_seconds"]
    return Observation(
        predicted, measured, float(step["measured"]), float(step["predicted"]), int(compared["num_steps"])
    )


@dataclass(frozen=True)
class Lesson:
    """Correction from the runs on one cluster. `num_runs`: number of runs behind each factor.

    `together`: no run was without exchanges, so computing and exchanges have one factor.
    """

    correction: Correction
    num_runs: dict[str, int]
    together: bool


def learn(every: Sequence[Observation]) -> Lesson:
    """The median ratio of measured over predicted of each thing that can be corrected."""
    ratios: dict[str, list[float]] = {name: [] for name in CORRECTED}
    for name in CORRECTED:
        if name not in ("compute", "exchanges"):
            ratios[name] = [_ratio(one, one.measured[name], one.of(name)) for one in every if _is_told(one, name)]
    timed = [one for one in every if "compute" in one.measured]
    alone = [one for one in timed if one.of("exchanges") < one.least_seconds]
    others = [one for one in timed if one.of("exchanges") >= one.least_seconds]
    ratios["compute"] = [one.measured["compute"] / one.of("compute") for one in alone if one.of("compute")]
    together = bool(others) and not ratios["compute"]
    if together:
        whole = [one.measured["compute"] / (one.of("compute") + one.of("exchanges")) for one in others]
        ratios["compute"] = ratios["exchanges"] = whole
    elif others:
        computing = median(ratios["compute"])
        ratios["exchanges"] = [
            _ratio(one, one.measured["compute"] - computing * one.of("compute"), one.of("exchanges")) for one in others
        ]
    hosts = [one.measured["host"] for one in every if "host" in one.measured and not _is_told(one, "host")]
    return Lesson(
        Correction({name: median(found) for name, found in ratios.items() if found}, median(hosts) if hosts else 0.0),
        {name: len(found) for name, found in ratios.items() if found},
        together,
    )


def _is_told(one: Observation, name: str) -> bool:
    """Whether a part was measured, and predicted to take more than nothing."""
    return name in one.measured and one.of(name) >= one.least_seconds


def _ratio(one: Observation, measured: float, predicted: float) -> float:
    """Never 0: that what did not show never will is more than one run says."""
    return max(measured, one.least_seconds) / predicted


def error(one: Observation, correction: Correction | None) -> float:
    """Relative error |predicted / measured - 1| of a step: as it was reported, or with a correction."""
    predicted = one.told_seconds if correction is None else sum(correction.terms(one.predicted).values())
    return abs(predicted / one.step_seconds - 1.0)


def file_name(cluster: str) -> str:
    """The name of the calibration file of a cluster."""
    return re.sub(r"[^A-Za-z0-9.@-]+", "-", cluster).strip("-.") + ".calibration.toml"
