"""Values of JSON and TOML documents that may lack anything or have it in another form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def section(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A table of a document; empty where there is none."""
    found = document.get(name)
    return found if isinstance(found, dict) else {}


def numbers(value: Any) -> dict[str, float]:
    """The finite numbers of a table."""
    found = value if isinstance(value, dict) else {}
    return {str(name): found_number for name, v in found.items() if (found_number := number(v)) is not None}


def number(value: Any) -> float | None:
    """A finite number; None for all else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
