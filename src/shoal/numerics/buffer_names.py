"""Rules of buffers and patterns of their names. This module does not import torch."""

from __future__ import annotations

# How a step combines the values that its microbatches leave in a buffer: docs/model-rules.md.
BUFFER_RULES = ("mean", "sum", "total", "min", "max", "last", "same")


def matches(pattern: str, name: str) -> bool:
    """Return True if a dotted name matches a pattern in which * stands for one part."""
    wanted, parts = pattern.split("."), name.split(".")
    return len(wanted) == len(parts) and all(one in ("*", part) for one, part in zip(wanted, parts, strict=True))
