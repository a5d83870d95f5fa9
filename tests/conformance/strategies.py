"""Every strategy and collective of shoal, with the sections of a plan that use it: each runs every case that it can."""

from __future__ import annotations

from typing import Any

# The name of each final strategy class -> sections of the plan that assemble it.
STRATEGIES: dict[str, dict[str, dict[str, Any]]] = {
    "DataParallel": {},
    "ExactDataParallel": {"execution": {"exact": True}},
}
