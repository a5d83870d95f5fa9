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
        names = {*self.sections, *further}
        sections = {name: {**self.sections.get(name, {}), **further.get(name, {})} for name in names}
        layout = {**sections.pop("layout", {}), self.axis: ranks}
        return shoal.Plan().with_sections(layout=layout, **sections)


EXACT = {"execution": {"exact": True}}
OPTIMIZER = {"shard": {"level": "optimizer"}}
GRADIENTS = {"shard": {"level": "gradients"}}
SHARED = {"collectives": {"all_reduce": "shared_memory"}}
ONE_COPY = SHARED | {"memory": {"shared": True}}

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


# What a way of dividing a model has to do with: the rest of the cases are about data and sums.
DIVIDED = frozenset({"tied embeddings", "batch normalisation", "accumulation of 3", "clipping that bites", "bf16"})
# Models that repeat blocks over sequences.
RECOMPUTED = "full recomputation of blocks with dropout"
BLOCKS = frozenset({"blocks", "blocks in bf16", "blocks in float8", "blocks computed again", RECOMPUTED})


def sharded_stages(schedule: str, level: str) -> Use:
    """Two pipeline stages a group, and two ranks that divide what each holds."""
    sections: dict[str, dict[str, Any]] = {
        "layout": {"pipeline": 2},
        "pipeline": {"schedule": schedule},
        "shard": {"level": level},
    }
    return Use("FullySharded", "shard", sections, STAGED, 2)


def staged(schedule: str) -> Use:
    """Two pipeline stages, one a rank."""
    return Use("DataParallel", "pipeline", {"pipeline": {"schedule": schedule}}, STAGED, 2)


# What a way to sum gradients has to do with: who has any, of which parameters, in which dtype.
SUMMED = frozenset({"mlp", "empty rank", "frozen, unused, conditional", "bf16", "pure bf16", "accumulation of 3"})


def summed_by(algorithm: str) -> Use:
    """Gradients summed by one of shoal's own all-reduces."""
    return Use("DataParallel", "data", {"collectives": {"all_reduce": algorithm}}, SUMMED)


STRATEGIES: dict[str, Use] = {
    "DataParallel": Use("DataParallel"),
    **{
        f"DataParallel-{name}": summed_by(name)
        for name in ("ring", "tree", "recursive_doubling", "hierarchical", "shared_memory")
    },
    "ExactDataParallel": Use("ExactDataParallel", sections=EXACT),
    "OneCopyUpdate": Use("OneCopyUpdate", "data", ONE_COPY),
    "OneCopyUpdate, exact": Use("OneCopyUpdate", "data", ONE_COPY | EXACT),
    "ShardedOptimizer": Use("ShardedOptimizer", "shard", OPTIMIZER),
    "FullySharded": Use("FullySharded", "shard"),
    "FullySharded gradients": Use("FullySharded", "shard", GRADIENTS),
    "FullySharded, shared memory": Use("FullySharded", "shard", SHARED, SUMMED),
    "tensor axis": Use("DataParallel", "tensor"),
    "tensor axis, by positions": Use("DataParallel", "tensor", {"tensor": {"sequence": True}}, BLOCKS),
    "tensor axis, shared memory": Use("DataParallel", "tensor", SHARED, DIVIDED),
    **{f"Pipeline {schedule}": staged(schedule) for schedule in ("gpipe", "1f1b", "zero_bubble")},
    "Pipeline 1f1b, parameters": sharded_stages("1f1b", "parameters"),
    "Pipeline zero_bubble, parameters": sharded_stages("zero_bubble", "parameters"),
    "Pipeline gpipe, gradients": sharded_stages("gpipe", "gradients"),
    "context axis and pipeline": Use("DataParallel", "context", {"layout": {"pipeline": 2}}, num_ranks=2),
    "context axis": Use("DataParallel", "context"),
    # In exact mode: tests/ranks/test_sharded.py, one hash under any layout.
}
