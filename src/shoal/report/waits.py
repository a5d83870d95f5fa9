"""Waits among ranks: share of time that other ranks waited for each rank by bucket of steps, and for rank pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.report.curves import buckets
from shoal.runs.records import RankTimes, StepRecord

COLUMNS = 80
MOST_RANKS = 32
MOST_PAIRED = 16


@dataclass(frozen=True)
class Waits:
    """Shares of the time of steps, by bucket of steps.

    `of_rank`: the mean wait of the other ranks for a rank.
    `pairs`: the wait of one rank (outer key) for another (inner key) over all steps; empty if not recorded.
    """

    of_rank: dict[int, tuple[float, ...]]
    others: int  # number of ranks not shown, with the shortest waits for them
    pairs: dict[int, dict[int, float]]

    def mean(self, rank: int) -> float:
        """Return the mean wait for a rank over buckets."""
        return sum(self.of_rank[rank]) / len(self.of_rank[rank]) if self.of_rank[rank] else 0.0


def waits(records: Sequence[StepRecord], world_size: int) -> Waits | None:
    """Return the waits among all ranks or, if not recorded, for each step's slowest rank; None for a single rank."""
    if world_size < 2:
        return None
    complete: list[tuple[int, RankTimes]] = []  # places of the records that have the sums of all ranks
    for place, record in enumerate(records):
        by_rank = record.by_rank
        # A run may have continued on another number of ranks.
        if by_rank and {len(by_rank.busy_seconds), *map(len, by_rank.waits.values())} == {world_size}:
            complete.append((place, by_rank))
    pieces: list[tuple[float, dict[int, float]]] = []  # seconds of neighbouring steps, and of waits by awaited rank
    for place, times in complete:
        begin, count = place, records[place].steps
        while begin > 0 and count < times.steps:
            begin -= 1
            count += records[begin].steps
        own = records[begin : place + 1]
        step_seconds = sum(one.seconds for one in own) * times.steps / count  # a block may have steps besides the sum's
        mean = {rank: sum(of) / (world_size - 1) for rank, of in times.waits.items() if rank in range(world_size)}
        pieces.append((step_seconds, mean))
    if not complete:  # the slowest rank of each step, with its busy seconds beyond the fastest rank's
        for record in records:
            if (spread := record.ranks.get("busy_seconds")) is not None:
                beyond = {spread.rank_of_max: max(0.0, spread.max - spread.min) * record.steps}
                pieces.append((record.seconds, beyond))
    if not pieces:
        return None
    groups = [[pieces[place] for place in group] for group in buckets(len(pieces), COLUMNS)]
    shares: dict[int, list[float]] = {rank: [0.0] * len(groups) for rank in range(world_size)}
    for column, group in enumerate(groups):
        whole = sum(seconds for seconds, _ in group) or 1.0
        for rank, seconds in (item for _, waited in group for item in waited.items()):
            shares.setdefault(rank, [0.0] * len(groups))[column] += seconds / whole
    shown = sorted(sorted(shares, key=lambda rank: -sum(shares[rank]))[:MOST_RANKS])
    pairs: dict[int, dict[int, float]] = {}
    whole = sum(seconds for seconds, _ in pieces)
    in_table = shown[:MOST_PAIRED]
    for _, times in complete if whole else ():
        for awaited, of in times.waits.items():
            for rank in in_table:
                if awaited in in_table and rank != awaited:
                    row = pairs.setdefault(rank, {})
                    row[awaited] = row.get(awaited, 0.0) + of[rank] / whole
    return Waits({rank: tuple(shares[rank]) for rank in shown}, len(shares) - len(shown), pairs)
