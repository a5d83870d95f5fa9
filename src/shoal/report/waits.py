"""Waits among ranks: in each bucket of steps, for how long the others waited for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.report.curves import buckets
from shoal.runs.records import StepRecord

COLUMNS = 80
MOST_RANKS = 32


@dataclass(frozen=True)
class Waits:
    """Shares of time that others waited for a rank, by bucket of steps; `steps` has each bucket's first and last."""

    steps: tuple[tuple[int, int], ...]
    of_rank: dict[int, tuple[float, ...]]
    others: int  # ranks that are not shown: the least waited for

    def mean(self, rank: int) -> float:
        """The mean over buckets."""
        return sum(self.of_rank[rank]) / len(self.of_rank[rank]) if self.of_rank[rank] else 0.0


def waits(records: Sequence[StepRecord], world_size: int) -> Waits | None:
    """Waits of a run: at each step's slowest rank its busy seconds beyond those of the fastest one.

    Records have the extremes over ranks and no more, so that of a step only the slowest rank is known.
    """
    told = [record for record in records if "busy_seconds" in record.ranks]
    if not told or world_size < 2:
        return None
    groups = buckets(len(told), COLUMNS)
    found: dict[int, list[float]] = {rank: [0.0] * len(groups) for rank in range(world_size)}
    for column, group in enumerate(groups):
        whole = sum(told[place].seconds for place in group) or 1.0
        for place in group:
            spread = told[place].ranks["busy_seconds"]
            row = found.setdefault(spread.rank_of_max, [0.0] * len(groups))
            row[column] += max(0.0, spread.max - spread.min) / whole
    kept = sorted(sorted(found, key=lambda rank: -sum(found[rank]))[:MOST_RANKS])
    steps = tuple((told[group[0]].step, told[group[-1]].step) for group in groups)
    return Waits(steps, {rank: tuple(found[rank]) for rank in kept}, len(found) - len(kept))
