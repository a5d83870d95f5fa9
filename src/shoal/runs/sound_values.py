"""Checks of values in a run directory's files: values of an unexpected type are dropped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")


@dataclass(frozen=True)
class _Beside:
    predicted: float | None = None
    measured: float | None = None


@dataclass(frozen=True)
class _Prediction:
    parts: dict[str, _Beside] = field(default_factory=dict)
    step_seconds: _Beside = field(default_factory=_Beside)
    peak_bytes: _Beside = field(default_factory=_Beside)
    terms: dict[str, float] = field(default_factory=dict)
    device_kind: dict[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class _Volume:
    messages: int
    bytes: int


@dataclass(frozen=True)
class _RankTraffic:
    rank: int
    measured: dict[str, dict[str, _Volume]]
    predicted: dict[str, dict[str, _Volume]] | None


@dataclass(frozen=True)
class _RankMemory:
    rank: int
    measured: dict[str, int | None]
    predicted: dict[str, int | None] | None


@dataclass(frozen=True)
class _Traffic:
    ranks: list[_RankTraffic]


@dataclass(frozen=True)
class _Memory:
    ranks: list[_RankMemory]


@dataclass(frozen=True)
class _Server:
    incidents: list[dict[str, Any]] = field(default_factory=list)


_Table = dict[str, Any] | None
_RESULT: dict[str, Any] = {
    **dict.fromkeys(("status", "sample_digest", "weights_sha256", "certificate"), str | None),
    **dict.fromkeys(("steps", "samples", "world_size", "eval_samples", "restarts", "skipped_steps"), int),
    **dict.fromkeys(("train_loss", "wall_seconds", "first_step_seconds"), float | None),
    **dict.fromkeys(("look_seconds", "compile_seconds"), float | None),
    **dict.fromkeys(("error", "ended_by", "ended_early", "best", "compression", "computation"), _Table),
    "resumed_from": int | None,
    "compile_cuts": list[str] | None,
    "metrics": dict[str, float | None],
    "versions": dict[str, str],
    "prediction": _Prediction | None,
    "traffic": _Traffic | None,
    "memory": _Memory | None,
    "server": _Server | None,
}
_PREDICTION: dict[str, Any] = {
    **dict.fromkeys(("cluster", "device", "device_kind", "peak_dtype"), str | None),
    **dict.fromkeys(("step_seconds", "mfu", "peak_flops", "flops_per_sample", "price_per_hour"), float | None),
    **dict.fromkeys(("peak_bytes", "sample_tokens", "devices"), float | None),
    **dict.fromkeys(("terms", "memory", "curve"), dict[str, float]),
}
# Keys that are read from a plan without the plan parser, which rejects files of newer versions.
_PLAN: dict[str, dict[str, Any]] = {
    "prediction": _PREDICTION,
    "layout": dict.fromkeys(("data", "shard", "tensor", "pipeline", "context"), int),
    "batch": {"grains_per_microbatch": int},
    "pipeline": {"stages_per_rank": int},
    "data": {"workers": int},
}
_JOB: dict[str, Any] = {
    **dict.fromkeys(("file", "function"), str),
    **dict.fromkeys(("train_samples", "parameters", "global_batch", "grains"), int | None),
    "versions": dict[str, str],
}


def sound_result(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a `result.json` whose values have the expected type."""
    return _sound(document, _RESULT)


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
