"""Waits among ranks: share of time that other ranks waited for each rank by bucket of steps, and for rank pairs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shoal.report.curves import buckets
from shoal.runs.records import RankTimes, StepRecord

COLUMNS = 80
MOST_RANKS = 32
MOST_PAIRED = 16


@dataclass(frozen=True)
class Waits:
    """Shares of the time of steps, by bucket of steps; `steps` has each bucket's first and last step.

    `of_rank`: the mean wait of the other ranks for a rank.
    `pairs`: the wait of one rank (outer key) for another (inner key) over all steps; empty if not recorded.
    """

    steps: tuple[tuple[int, int], ...]
    of_rank: dict[int, tuple[float, ...]]
    others: int  # number of ranks not shown, with the shortest waits for them
    pairs: dict[int, dict[int, float]]

    def mean(self, rank: int) -> float:
        """Return the mean wait for a rank over buckets."""
        return sum(self.of_rank[rank]) / len(self.of_rank[rank]) if self.of_rank[rank] else 0.0


@dataclass(frozen=True)
class _StepWaits:
    """Neighbouring steps: the first, the last, their seconds, and seconds of waits by awaited rank."""

    first: int
    last: int
    seconds: float
    waits: dict[int, float]


def waits(records: Sequence[StepRecord], world_size: int) -> Waits | None:
    """Return the waits among all ranks or, if not recorded, for each step's slowest rank; None for a single rank."""
    if world_size < 2:
        return None
    told = [record for record in records if _is_whole(record.by_rank, world_size)]
    pieces = list(_of_all(records, world_size)) if told else list(_of_extremes(records))
    if not pieces:
        return None
    groups = [[pieces[place] for place in group] for group in buckets(len(pieces), COLUMNS)]
    found: dict[int, list[float]] = {rank: [0.0] * len(groups) for rank in range(world_size)}
    for column, group in enumerate(groups):
        whole = sum(piece.seconds for piece in group) or 1.0
        for rank, seconds in (item for piece in group for item in piece.waits.items()):
            found.setdefault(rank, [0.0] * len(groups))[column] += seconds / whole
    kept = sorted(sorted(found, key=lambda rank: -sum(found[rank]))[:MOST_RANKS])
    steps = tuple((group[0].first, group[-1].last) for group in groups)
    whole = sum(piece.seconds for piece in pieces)
    pairs = _pairs((r.by_rank for r in told), whole, kept) if whole else {}
    return Waits(steps, {rank: tuple(found[rank]) for rank in kept}, len(found) - len(kept), pairs)


def _is_whole(by_rank: RankTimes | None, world_size: int) -> bool:
    """Check whether the sums cover this number of ranks: a run may have continued on another number."""
    return by_rank is not None and {len(by_rank.busy_seconds), *map(len, by_rank.waits.values())} == {world_size}


def _of_all(records: Sequence[StepRecord], world_size: int) -> Iterator[_StepWaits]:
    """Yield the recorded sums, each with the seconds of its steps."""
    others = world_size - 1
    for place, record in enumerate(records):
        told = record.by_rank
        if told is None or not _is_whole(told, world_size):
            continue
        own = records[max(0, place + 1 - max(1, told.steps)) : place + 1]
        found = {rank: sum(of) / others for rank, of in told.waits.items() if rank in range(world_size)}
        yield _StepWaits(own[0].step, record.step, sum(one.seconds for one in own), found)


def _of_extremes(records: Sequence[StepRecord]) -> Iterator[_StepWaits]:
    """Yield each step's slowest rank with its busy seconds beyond the fastest rank's."""
    for record in records:
        spread = record.ranks.get("busy_seconds")
        if spread is not None:
            waited = {spread.rank_of_max: max(0.0, spread.max - spread.min)}
            yield _StepWaits(record.step, record.step, record.seconds, waited)


def _pairs(told: Iterable[RankTimes | None], whole: float, shown: Sequence[int]) -> dict[int, dict[int, float]]:
    """Return the shares of time that each rank waited for each other, for as many ranks as fit into a table."""
    found: dict[int, dict[int, float]] = {}
    ranks = shown[:MOST_PAIRED]
    for times in told:
        for awaited, of in (times.waits if times is not None else {}).items():
            for rank in ranks:
                if awaited in ranks and rank != awaited:
                    row = found.setdefault(rank, {})
                    row[awaited] = row.get(awaited, 0.0) + of[rank] / whole
    return found
