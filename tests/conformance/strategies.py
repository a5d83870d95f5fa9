"""Every strategy and collective of shoal, with the plan that uses it: each runs every case that it can."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import shoal


@dataclass(frozen=True)
class Use:
    """A final strategy class by name, the axis that a case's ranks are on, and the sections of a plan for it."""

    kind: str
    axis: str = "data"
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        return bool(self.sections.get("execution", {}).get("exact"))

    def plan(self, ranks: int, further: dict[str, dict[str, Any]]) -> shoal.Plan:
        """The plan on so many ranks; `further` are the case's own sections."""
        return shoal.Plan().with_sections(layout={self.axis: ranks}, **{**self.sections, **further})


EXACT = {"execution": {"exact": True}}
OPTIMIZER = {"shard": {"level": "optimizer"}}

STRATEGIES: dict[str, Use] = {
    "DataParallel": Use("DataParallel"),
    "ExactDataParallel": Use("ExactDataParallel", sections=EXACT),
    "ShardedOptimizer": Use("ShardedOptimizer", "shard", OPTIMIZER),
    "tensor axis": Use("DataParallel", "tensor"),
    "context axis": Use("DataParallel", "context"),
    # In exact mode: tests/ranks/test_sharded.py, one hash under any layout.
}
