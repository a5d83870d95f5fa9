"""Comparison: a prediction beside what a run measured, part by part, and what that corrects.

The only place where the planner's terms meet the spans of a step's clock.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from shoal.planner.workload import Prediction

# By part of a step: the planner's terms, and the spans in which the clock of a rank finds them. Exchanges and waits
# inside of a forward or backward cannot be told from computing there.
PARTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "compute": (
        ("compute", "launch", "recompute", "tensor", "context", "pipeline", "bubble", "parameters"),
        ("forward", "backward"),
    ),
    "communication": (("gradients",), ("exposed_communication",)),
    "optimizer": (("optimizer",), ("optimizer",)),
    "data": (("data",), ("data_wait", "host_to_device")),
    "host": (("host",), ("other",)),
}
# Below this share of a step a part says nothing about its factor.
LEAST_SHARE = 0.01
_WARM_UP = 2


def section(prediction: Prediction, about: Mapping[str, Any]) -> dict[str, Any]:
    """The section `[prediction]` of a plan; `about` names the cluster, the planner's version and the like."""
    found: dict[str, Any] = {
        **about,
        "step_seconds": prediction.step_seconds,
        "bubble": prediction.bubble,
        "flops_per_device": prediction.flops_per_device,
        "peak_bytes": int(prediction.peak_bytes),
        "terms": dict(prediction.terms),
        "memory": {name: int(value) for name, value in prediction.memory.items()},
        "kept_bytes": list(prediction.kept_bytes),
    }
    return found if prediction.mfu is None else {**found, "mfu": prediction.mfu}


@dataclass(frozen=True)
class MeasuredStep:
    """One step of a run: its seconds, and rank 0's spans by name."""

    seconds: float
    spans: Mapping[str, float]


def beside(predicted: Mapping[str, Any], steps: Iterable[MeasuredStep], peak_bytes: int | None) -> dict[str, Any]:
    """What a plan predicted beside what the steps of a run took, as JSON; medians without the first steps."""
    counted = list(steps)
    counted = counted[_WARM_UP:] if len(counted) > 2 * _WARM_UP else counted
    terms = predicted.get("terms", {})
    parts = {
        part: {
            "predicted": sum(float(terms.get(name, 0.0)) for name in names),
            "measured": _median(sum(step.spans.get(span, 0.0) for span in spans) for step in counted if step.spans),
        }
        for part, (names, spans) in PARTS.items()
    }
    return {
        "cluster": predicted.get("cluster"),
        "factors": dict(predicted.get("factors", {})),
        "num_steps": len(counted),
        "step_seconds": {
            "predicted": predicted.get("step_seconds"),
            "measured": _median(step.seconds for step in counted),
        },
        "parts": parts,
        "peak_bytes": {"predicted": predicted.get("peak_bytes"), "measured": peak_bytes},
    }


def told(compared: Mapping[str, Any]) -> str:
    """A comparison in a line."""
    step = compared["step_seconds"]
    parts = ", ".join(
        f"{part} {values['measured'] * 1e3:.1f} ({values['predicted'] * 1e3:.1f})"
        for part, values in compared["parts"].items()
        if values["measured"] is not None
    )
    off = step["predicted"] / step["measured"] - 1.0
    whole = f"a step took {step['measured'] * 1e3:.1f} ms, predicted {step['predicted'] * 1e3:.1f} ({off:+.0%})"
    return f"{whole}: {parts}" if parts else whole


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None


@dataclass(frozen=True)
class Lesson:
    """What runs on one cluster taught: factors by part, of how many runs each, and the errors before and after.

    Errors are the median of |predicted / measured - 1| of a step; those after are of the same runs.
    """

    factors: dict[str, float]
    num_runs: dict[str, int]
    error_before: float
    error_after: float
    unexplained: dict[str, float]  # seconds measured of parts that were predicted to take next to nothing


def learn(runs: Sequence[Mapping[str, Any]]) -> Lesson:
    """The median ratio of each part over runs that have a prediction beside their measurement."""
    ratios: dict[str, list[float]] = {part: [] for part in PARTS}
    rests: dict[str, list[float]] = {part: [] for part in PARTS}
    for run in runs:
        step = float(run["step_seconds"]["measured"])
        for part, values in run["parts"].items():
            predicted, measured = values["predicted"], values["measured"]
            if part not in PARTS or measured is None:
                continue
            if predicted >= LEAST_SHARE * step:
                ratios[part].append(float(run["factors"].get(part, 1.0)) * measured / predicted)
            elif measured >= LEAST_SHARE * step:
                rests[part].append(measured)
    factors = {part: median(found) for part, found in ratios.items() if found}
    before = [_error(run, {}) for run in runs]
    after = [_error(run, factors) for run in runs]
    return Lesson(
        factors=factors,
        num_runs={part: len(found) for part, found in ratios.items() if found},
        error_before=median(before),
        error_after=median(after),
        unexplained={part: median(found) for part, found in rests.items() if found},
    )


def _error(run: Mapping[str, Any], factors: Mapping[str, float]) -> float:
    """|predicted / measured - 1| of a run's step, where its parts had been corrected by `factors`."""
    old = run["factors"]
    predicted = sum(
        float(values["predicted"]) * (factors[part] / float(old.get(part, 1.0)) if part in factors else 1.0)
        for part, values in run["parts"].items()
    )
    return abs(predicted / float(run["step_seconds"]["measured"]) - 1.0)


def of_terms(factors: Mapping[str, float]) -> dict[str, float]:
    """Factors by part as factors by term."""
    return {term: factors[part] for part, (terms, _) in PARTS.items() if part in factors for term in terms}


def file_name(cluster: str) -> str:
    """The name of the calibration file of a cluster."""
    return re.sub(r"[^A-Za-z0-9.@-]+", "-", cluster).strip("-.") + ".calibration.toml"
