"""Comparison of a prediction with the measurements of a run, part by part.

Only this module relates the terms of the planner to the spans of a step's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from shoal.planner.predict.workload import Prediction
from shoal.report.account import Account, account
from shoal.runs.records import StepRecord
from shoal.runs.run_files import RunFiles

# For each part of a step: the planner's terms, and the spans of a rank's clock that measure them. The clock cannot
# separate exchanges and waits within a forward or backward from compute.
PARTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "compute": (
        ("compute", "launch", "recompute", "tensor", "context", "experts", "pipeline", "bubble", "parameters"),
        ("forward", "backward"),
    ),
    "communication": (("gradients",), ("exposed_communication",)),
    "optimizer": (("optimizer",), ("optimizer",)),
    "data": (("data",), ("data_wait", "host_to_device")),
    "host": (("host",), ("other",)),
}
_WARM_UP = 2
_TIMES = 2.0  # ratio from which `against` writes a multiple instead of a percentage


def section(prediction: Prediction, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section `[prediction]` of a plan. `about`: cluster, version of the planner and similar entries."""
    entries: dict[str, Any] = {
        **about,
        "step_seconds": prediction.step_seconds,
        "bubble": prediction.bubble,
        "flops_per_device": prediction.flops_per_device,
        "peak_bytes": int(prediction.peak_bytes),
        "terms": dict(prediction.terms),
        "memory": {name: int(value) for name, value in prediction.memory.items()},
        "kept_bytes": list(prediction.kept_bytes),
    }
    return entries if prediction.mfu is None else {**entries, "mfu": prediction.mfu}


@dataclass(frozen=True)
class MeasuredStep:
    """One measured step: its seconds, and rank 0's spans in seconds by name."""

    seconds: float
    spans: Mapping[str, float]

    @classmethod
    def of(cls, record: StepRecord) -> MeasuredStep:
        """Return the step of a record, or the mean step of a block."""
        mean = record.per_step()
        return cls(mean.seconds, mean.spans)


def beside(
    predicted: Mapping[str, Any], steps: Iterable[MeasuredStep], peak_bytes: int | None, device_kind: str
) -> dict[str, Any]:
    """Compare predicted and measured seconds of steps, as JSON values.

    Measured values are medians without the first steps. `device_kind`: kind of device of the run (cpu or gpu).
    """
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
        "device_kind": {"predicted": predicted.get("device_kind"), "measured": device_kind},
        "factors": dict(predicted.get("factors", {})),
        "host_seconds": float(predicted.get("host_seconds", 0.0)),
        "terms": {name: float(seconds) for name, seconds in terms.items()},
        "num_steps": len(counted),
        "step_seconds": {
            "predicted": predicted.get("step_seconds"),
            "measured": _median(step.seconds for step in counted),
        },
        "parts": parts,
        "peak_bytes": {"predicted": predicted.get("peak_bytes"), "measured": peak_bytes},
    }


def as_line(compared: Mapping[str, Any]) -> str:
    """Format a comparison as a sentence, times in milliseconds."""
    step = compared["step_seconds"]
    whole = f"a step took {step['measured'] * 1e3:.1f} ms, {against(step['measured'], step['predicted'])}"
    whole += f" for {compared['cluster']}, which is not what it ran on" if is_elsewhere(compared) else ""
    parts = [
        f"{part} {values['measured'] * 1e3:.1f} instead of {values['predicted'] * 1e3:.1f}"
        for part, values in compared["parts"].items()
        if values["measured"] is not None
    ]
    return f"{whole}: {', '.join(parts)}" if parts else whole


def is_elsewhere(compared: Mapping[str, Any]) -> bool:
    """Return True if a run used another kind of device than its plan is for."""
    kinds = compared.get("device_kind") or {}
    return kinds.get("predicted") not in (None, kinds.get("measured"))


def against(measured: float, predicted: float) -> str:
    """Describe the difference between measured and predicted seconds, such as "4% longer" or "21 times as long"."""
    prediction = f"the {predicted * 1e3:.1f} predicted"
    ratio = measured / predicted if predicted else float("inf")
    if ratio >= _TIMES:
        return f"{ratio:.3g} times as long as {prediction}"
    if ratio <= 1 / _TIMES:
        return f"{ratio:.1%} of {prediction}"
    return f"{abs(ratio - 1):.0%} {'longer' if ratio > 1 else 'shorter'} than {prediction}"


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return median(known) if known else None


def account_of(files: RunFiles) -> Account:
    """Return the account of a run. Its steps are compared with the plan's prediction, even without a result."""
    given = files.plan.get("prediction")
    predicted = given if isinstance(given, dict) else {}
    device = files.attempts[-1].device if files.attempts else ""
    kind = "cpu" if device == "cpu" else "gpu" if device else predicted.get("device_kind", "")
    last = files.records[-1].ranks.get("memory_bytes") if files.records else None
    steps = [MeasuredStep.of(record) for record in files.records[-1000:]]
    return account(files, beside(predicted, steps, int(last.max) if last is not None else None, str(kind)))
