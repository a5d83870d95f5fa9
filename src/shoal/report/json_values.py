"""Values of JSON and TOML documents that may lack keys or have values of other types."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def section(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a table of a document, empty if missing."""
    found = document.get(name)
    return found if isinstance(found, dict) else {}


def numbers(value: Any) -> dict[str, float]:
    """Return the finite numbers of a table."""
    found = value if isinstance(value, dict) else {}
    return {str(name): found_number for name, v in found.items() if (found_number := number(v)) is not None}


def number(value: Any) -> float | None:
    """Return a finite number as float, or None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
