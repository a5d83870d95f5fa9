"""Times of steps, and their extremes over the ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles

from shoal.runs.records import SPANS, StepRecord

# First steps of a call are slower: caches are filled, kernels chosen.
_WARM_UP = 2


@dataclass(frozen=True)
class StepTimes:
    """Seconds of the steps that were kept, the first of each call left out; `spans` are means of rank 0."""

    count: int
    median: float | None = None
    p10: float | None = None
    p90: float | None = None
    mean: float | None = None
    spans: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RankExtremes:
    """A quantity over the ranks: means over steps of the least and the most, and how often each rank had the most."""

    name: str
    least: float
    most: float
    rank_of_most: int
    share_of_steps: Mapping[int, float]


def steady(records: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """The steps without the first ones, where there are enough others."""
    return records[_WARM_UP:] if len(records) > 2 * _WARM_UP else records


def step_times(of: Sequence[StepRecord]) -> StepTimes:
    """Medians, deciles and mean spans of steps."""
    records = steady(of)
    seconds = [record.seconds for record in records]
    if not seconds:
        return StepTimes(0)
    tenths = quantiles(seconds, n=10, method="inclusive") if len(seconds) > 1 else seconds * 9
    spans = {name: sum(r.spans.get(name, 0.0) for r in records) / len(records) for name in SPANS}
    return StepTimes(len(seconds), median(seconds), tenths[0], tenths[8], sum(seconds) / len(seconds), spans)


def rank_extremes(records: Sequence[StepRecord]) -> tuple[RankExtremes, ...]:
    """Each quantity that the records have of all ranks."""
    names = list(dict.fromkeys(name for record in records[-1:] for name in record.ranks))
    found = []
    for name in names:
        spreads = [record.ranks[name] for record in steady(records) if name in record.ranks]
        if not spreads:
            continue
        counts = Counter(spread.rank_of_max for spread in spreads)
        shares = {rank: count / len(spreads) for rank, count in sorted(counts.items())}
        least, most = (sum(values) / len(spreads) for values in zip(*((s.min, s.max) for s in spreads), strict=True))
        found.append(RankExtremes(name, least, most, max(shares, key=lambda rank: shares[rank]), shares))
    return tuple(found)
