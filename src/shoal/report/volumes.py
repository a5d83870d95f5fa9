"""Memory and traffic of one step by category and collective, measured and predicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.report.json_values import section


@dataclass(frozen=True)
class MemoryCategory:
    """Bytes of a category on the rank that has the most."""

    name: str
    rank: int
    measured: int | None
    predicted: int | None


@dataclass(frozen=True)
class CollectiveTraffic:
    """Messages and bytes of one collective on one axis in a step, on the rank that has the most bytes."""

    group: str
    collective: str
    rank: int
    messages: int
    bytes: int
    predicted_messages: int | None
    predicted_bytes: int | None


def memory(result: Mapping[str, Any]) -> tuple[MemoryCategory, ...]:
    """Return each memory category of a result, on the rank that has the most."""
    found: dict[str, MemoryCategory] = {}
    for rank in _ranks_of(result, "memory"):
        predicted = rank.get("predicted") or {}
        for name, value in (rank.get("measured") or {}).items():
            if name not in found or (value or 0) > (found[name].measured or 0):
                found[name] = MemoryCategory(name, int(rank.get("rank", 0)), value, predicted.get(name))
    return tuple(found.values())


def traffic(result: Mapping[str, Any]) -> tuple[CollectiveTraffic, ...]:
    """Return each collective of a result, on the rank that has the most bytes."""
    found: dict[tuple[str, str], CollectiveTraffic] = {}
    for rank in _ranks_of(result, "traffic"):
        predicted = rank.get("predicted")
        for group, collectives in (rank.get("measured") or {}).items():
            for collective, volume in collectives.items():
                known = found.get((group, collective))
                if known is not None and volume["bytes"] <= known.bytes:
                    continue
                said = None if predicted is None else predicted.get(group, {}).get(collective, {})
                found[group, collective] = CollectiveTraffic(
                    group,
                    collective,
                    int(rank.get("rank", 0)),
                    volume["messages"],
                    volume["bytes"],
                    None if said is None else said.get("messages", 0),
                    None if said is None else said.get("bytes", 0),
                )
    return tuple(found.values())


def _ranks_of(result: Mapping[str, Any], block: str) -> list[dict[str, Any]]:
    ranks = section(result, block).get("ranks")
    return [rank for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else []
