"""Times of steps, and their extremes over the ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles

from shoal.runs.records import SPANS, StepRecord

# The first steps of a run are slower, because they fill caches and choose kernels.
_WARM_UP = 2


@dataclass(frozen=True)
class StepTimes:
    """Seconds of the recorded steps without the first ones; `spans` are means of rank 0."""

    count: int
    median: float | None = None
    p10: float | None = None
    p90: float | None = None
    mean: float | None = None
    spans: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RankExtremes:
    """A quantity over the ranks: means over steps of the least and the most, and how often each rank had the most.

    `share_of_steps`: by rank, among the steps in which ranks differ.
    """

    name: str
    least: float
    most: float
    rank_of_most: int
    share_of_steps: Mapping[int, float]


def steady(records: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """Return the steps without the first ones, if enough others remain."""
    return records[_WARM_UP:] if len(records) > 2 * _WARM_UP else records


def step_times(of: Sequence[StepRecord]) -> StepTimes:
    """Return the median, deciles, mean and mean spans of steps."""
    records = steady(of)
    seconds = [record.seconds for record in records]
    if not seconds:
        return StepTimes(0)
    tenths = quantiles(seconds, n=10, method="inclusive") if len(seconds) > 1 else seconds * 9
    spans = dict.fromkeys(SPANS, 0.0)
    for record in records:
        for name, value in record.spans.items():
            spans[name] = spans.get(name, 0.0) + value
    spans = {name: value / len(records) for name, value in spans.items()}
    return StepTimes(len(seconds), median(seconds), tenths[0], tenths[8], sum(seconds) / len(seconds), spans)


def rank_extremes(records: Sequence[StepRecord]) -> tuple[RankExtremes, ...]:
    """Return the extremes of each quantity that the records have for all ranks."""
    sums: dict[str, list[float]] = {}
    counts: dict[str, Counter[int]] = {}
    numbers: dict[str, int] = {}
    for record in steady(records):
        for name, spread in record.ranks.items():
            if name not in sums:
                sums[name], counts[name], numbers[name] = [0.0, 0.0], Counter(), 0
            both = sums[name]
            both[0] += spread.min
            both[1] += spread.max
            numbers[name] += 1
            if spread.max > spread.min:  # otherwise no rank has the most, as on one process
                counts[name][spread.rank_of_max] += 1
    found = []
    for name, (least, most) in sums.items():
        number, told = numbers[name], counts[name].total()
        shares = {rank: count / told for rank, count in sorted(counts[name].items())}
        often = max(shares, key=lambda rank: shares[rank], default=0)
        found.append(RankExtremes(name, least / number, most / number, often, shares))
    return tuple(found)
