"""Checks of values in a run directory's files: values of an unexpected type are dropped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Generic, TypeVar

from annotated_types import Interval
from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")
# Limits of what a run can have, so that no loop over a count, sum or quotient of a damaged file fails or lasts.
Steps = Annotated[int, Interval(ge=0, le=1 << 40)]
Ranks = Annotated[int, Interval(ge=1, le=1 << 20)]
Amount = Annotated[int, Interval(ge=0, le=1 << 60)]
Seconds = Annotated[float, Interval(ge=0.0, le=1e12)]
Quantity = Annotated[float, Interval(ge=0.0, le=1e30)]
SomeSeconds = Annotated[float, Interval(gt=0.0, le=1e12)]


@dataclass(frozen=True)
class _Beside:
    predicted: Quantity | None = None
    measured: Quantity | None = None


@dataclass(frozen=True)
class _Prediction:
    parts: dict[str, _Beside] = field(default_factory=dict)
    step_seconds: _Beside = field(default_factory=_Beside)
    peak_bytes: _Beside = field(default_factory=_Beside)
    terms: dict[str, Quantity] = field(default_factory=dict)
    device_kind: dict[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class _Volume:
    messages: Amount
    bytes: Amount


@dataclass(frozen=True)
class _RankTraffic:
    rank: Amount
    measured: dict[str, dict[str, _Volume]]
    predicted: dict[str, dict[str, _Volume]] | None


@dataclass(frozen=True)
class _RankMemory:
    rank: Amount
    measured: dict[str, Amount | None]
    predicted: dict[str, Amount | None] | None


@dataclass(frozen=True)
class _OfRanks(Generic[T]):
    ranks: list[T]


@dataclass(frozen=True)
class _Server:
    incidents: list[dict[str, Any]] = field(default_factory=list)


_Table = dict[str, Any] | None
# Status in `result.json` from the first step on, if no launcher of shoal watches the process.
RUNNING = "running"
_RESULT: dict[str, Any] = {
    **dict.fromkeys(("status", "sample_digest", "weights_sha256", "certificate"), str | None),
    **dict.fromkeys(("samples", "eval_samples", "restarts", "skipped_steps"), Amount),
    **dict.fromkeys(("first_step_seconds", "look_seconds", "compile_seconds"), Seconds | None),
    "steps": Steps,
    "world_size": Ranks,
    "train_loss": float | None,
    "wall_seconds": float | None,
    **dict.fromkeys(("error", "ended_by", "ended_early", "best", "compression", "computation"), _Table),
    "resumed_from": Steps | None,
    "compile_cuts": list[str] | None,
    "metrics": dict[str, float | None],
    "versions": dict[str, str],
    "prediction": _Prediction | None,
    "traffic": _OfRanks[_RankTraffic] | None,
    "memory": _OfRanks[_RankMemory] | None,
    "server": _Server | None,
}
_PREDICTION: dict[str, Any] = {
    **dict.fromkeys(("cluster", "device", "device_kind", "peak_dtype"), str | None),
    **dict.fromkeys(("step_seconds", "mfu", "peak_flops", "flops_per_sample", "price_per_hour"), Quantity | None),
    **dict.fromkeys(("peak_bytes", "sample_tokens", "devices"), Quantity | None),
    **dict.fromkeys(("terms", "memory", "curve"), dict[str, Quantity]),
}
# Keys that are read from a plan without the plan parser, which rejects files of newer versions.
_PLAN: dict[str, dict[str, Any]] = {
    "prediction": _PREDICTION,
    "layout": dict.fromkeys(("data", "shard", "tensor", "pipeline", "context"), Ranks),
    "batch": {"grains_per_microbatch": Ranks},
    "pipeline": {"stages_per_rank": Ranks},
    "data": {"workers": Amount},
}
_JOB: dict[str, Any] = {
    **dict.fromkeys(("file", "function"), str),
    **dict.fromkeys(("train_samples", "parameters", "global_batch", "grains"), Amount | None),
    "versions": dict[str, str],
}


def sound_result(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a `result.json` whose values have the expected type; none while the run has no result."""
    return _sound(document, _RESULT) if document.get("status") != RUNNING else {}


def sound_job(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a `job.json` whose values have the expected type. Unknown keys stay."""
    return _sound(document, _JOB)


def sound_plan(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a `plan.toml` whose values have the expected type. Unknown keys stay."""
    sound = {name: value for name, value in document.items() if name not in _PLAN or isinstance(value, dict)}
    return {name: _sound(value, _PLAN[name]) if name in _PLAN else value for name, value in sound.items()}


def _sound(document: Mapping[str, Any], kinds: Mapping[str, Any]) -> dict[str, Any]:
    sound = {}
    for name, value in document.items():
        try:
            if name in kinds:
                adapter(kinds[name]).validate_json(json.dumps(value), strict=True)
            sound[name] = value
        except (ValidationError, TypeError):  # for example a date, which exists in TOML but not in JSON
            continue
    return sound


@cache
def adapter(kind: type[T]) -> TypeAdapter[T]:
    """Return a cached parser for a dataclass. Unknown keys are ignored. Raises: ValueError on wrong values."""
    return TypeAdapter(kind)
