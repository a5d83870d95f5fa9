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
    cases: frozenset[str] = frozenset()  # those that it can run; empty for all
    num_ranks: int | None = None  # where the case's own are too many

    @property
    def exact(self) -> bool:
        return bool(self.sections.get("execution", {}).get("exact"))

    def plan(self, ranks: int, further: dict[str, dict[str, Any]]) -> shoal.Plan:
        """The plan on so many ranks; `further` are the case's own sections."""
        return shoal.Plan().with_sections(layout={self.axis: ranks}, **{**self.sections, **further})


EXACT = {"execution": {"exact": True}}
OPTIMIZER = {"shard": {"level": "optimizer"}}
GRADIENTS = {"shard": {"level": "gradients"}}

# Models of two stages or more.
STAGED = frozenset(
    {
        "mlp",
        "uneven last batch",
        "batch normalisation",
        "dropout",
        "accumulation of 3",
        "clipping that bites",
        "pure bf16",
        "fp16 with an overflow",
        "AdamW with groups",
        "a loss over pairs",
        "a first batch without weight",
        "odd sizes",
    }
)


def staged(schedule: str) -> Use:
    """Two pipeline stages, one a rank."""
    return Use("DataParallel", "pipeline", {"pipeline": {"schedule": schedule}}, STAGED, 2)


STRATEGIES: dict[str, Use] = {
    "DataParallel": Use("DataParallel"),
    "ExactDataParallel": Use("ExactDataParallel", sections=EXACT),
    "ShardedOptimizer": Use("ShardedOptimizer", "shard", OPTIMIZER),
    "FullySharded": Use("FullySharded", "shard"),
    "FullySharded gradients": Use("FullySharded", "shard", GRADIENTS),
    "tensor axis": Use("DataParallel", "tensor"),
    **{f"Pipeline {schedule}": staged(schedule) for schedule in ("gpipe", "1f1b", "zero_bubble")},
    "context axis": Use("DataParallel", "context"),
    # In exact mode: tests/ranks/test_sharded.py, one hash under any layout.
}
