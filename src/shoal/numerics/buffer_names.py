"""Rules of buffers and patterns of their names. This module does not import torch."""

from __future__ import annotations

# How a step combines the values that its microbatches leave in a buffer: docs/model-rules.md.
BUFFER_RULES = ("mean", "sum", "total", "min", "max", "last", "same")


def balance_rate(rule: str) -> float | None:
    """Return the rate of a rule "balance:RATE", a finite number above 0; None for other rules."""
    name, _, rate = rule.partition(":")
    try:
        return float(rate) if name == "balance" and 0 < float(rate) < float("inf") else None
    except ValueError:
        return None


def matches(pattern: str, name: str) -> bool:
    """Return True if a dotted name matches a pattern in which * stands for one part."""
    wanted, parts = pattern.split("."), name.split(".")
    return len(wanted) == len(parts) and all(one in ("*", part) for one, part in zip(wanted, parts, strict=True))
