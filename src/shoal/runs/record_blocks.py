"""Blocks of steps in `records.jsonl`: which steps share a record, and what that record has.

The first 10,000 steps of a run have a record each. Steps 10,001 to 20,000 are in blocks of 16, the next 20,000 steps in
blocks of 32, and so on: each doubling of the number of steps adds 625 blocks. A block depends on the step number alone,
so a resumed run has the same blocks.

A block ends early in three cases:

- before a step with an incident, an evaluation or the time of a checkpoint. That step has a record of its own.
- after a step whose checkpoint is written. A resume from there finds the record of each step up to the checkpoint, and
  no record of steps on both sides of it, so no step is lost or counted twice.
- at the end of a call.

In the last two cases the last step has a record of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from shoal.runs.records import BlockExtremes, OwnSpreads, RankTimes, Spread, StepRecord

WHOLE_STEPS = 10_000  # first steps of a run, with a record each
_FIRST_BLOCK = 16  # steps; each block has about 4 kB
# Numbers of a record besides its spans. The other numbers of a block are the last step's.
_NUMBERS = ("loss", "weight", "grad_norm", "learning_rate", "loss_scale", "expert_imbalance", "seconds")
# Maximum slowest ranks in a record's waits, so that a record has only a few numbers per rank.
MOST_AWAITED = 4
OTHERS = -1
_MEMORY = "memory_bytes"


def block_of(step: int, whole_steps: int = WHOLE_STEPS) -> range:
    """Return the steps of the block that a step is in. The first `whole_steps` steps are blocks of one step."""
    if step <= whole_steps:
        return range(step, step + 1)
    doublings = ((step - 1) // whole_steps).bit_length() - 1
    start, size = whole_steps << doublings, _FIRST_BLOCK << doublings
    first = step - (step - 1 - start) % size
    return range(first, min(first + size, 2 * start + 1))


def has_own_record(record: StepRecord) -> bool:
    """Return True for a step with an incident, an evaluation or a checkpoint."""
    falls_back = any(about and about.get("fell_back") for about in (record.push, record.compression))
    has_checkpoint = record.spans.get("checkpoint", 0.0) > 0.0
    return bool(record.skipped or record.nonfinite or record.metrics or record.after or has_checkpoint or falls_back)


def merged(records: Sequence[StepRecord]) -> StepRecord:
    """Return the record of successive steps. Only the first one may be a block."""
    if len(records) == 1:
        return records[0]
    first, last = records[0], records[-1]
    block = first.block
    singles = records[1:] if block is not None else records
    steps = first.steps + len(records) - 1
    low, high = (dict(block.min), dict(block.max)) if block is not None else ({}, {})
    slowest = max(singles, key=lambda record: record.seconds)
    if block is not None and block.slowest.seconds >= slowest.seconds:
        slowest = block.slowest

    def widen(name: str, values: Sequence[float]) -> None:
        least, most = min(values), max(values)
        low[name] = min(low[name], least) if name in low else least
        high[name] = max(high[name], most) if name in high else most

    numbers: dict[str, float | None] = {}
    for name in _NUMBERS:
        values = [value for record in singles if (value := getattr(record, name)) is not None]
        before = getattr(first, name) if block is not None else None
        if not values:
            numbers[name] = before
            continue
        widen(name, values)
        if name == "seconds":
            numbers[name] = sum(values) + (before or 0.0)
        else:
            weight = first.steps if before is not None else 0
            numbers[name] = (sum(values) + weight * (before or 0.0)) / (len(values) + weight)
    spans: dict[str, float] = {}
    for name in dict.fromkeys(name for record in records for name in record.spans):
        values = [record.spans.get(name, 0.0) for record in singles]
        widen(name, values)
        spans[name] = sum(values) + (first.spans.get(name, 0.0) if block is not None else 0.0)
    if last.push is not None:
        widen("staleness", [record.push["staleness"] for record in singles if record.push is not None])
    began_at = first.began_at
    return StepRecord(
        step=last.step,
        epoch=last.epoch,
        samples=last.samples,
        num_samples=sum(record.num_samples for record in records),
        spans=spans,
        ranks=_mean_spreads(records, steps),
        memory_bytes=max(record.memory_bytes for record in records),
        digest=last.digest,
        push=last.push,
        compression=next((record.compression for record in reversed(records) if record.compression), None),
        at=last.at,
        by_rank=_summed(record.by_rank for record in records if record.by_rank is not None),
        steps=steps,
        block=BlockExtremes(low, high, slowest, began_at),
        **numbers,  # type: ignore[arg-type]
    )


def _mean_spreads(records: Sequence[StepRecord], steps: int) -> Mapping[str, Spread]:
    """Return the means over steps of the least and the most, and the ranks that most often have the most.

    Of the memory, which is a peak so far, the last step's spread is returned.
    """
    counts = [float(record.steps) for record in records]
    last = records[-1].ranks
    own = [record.ranks for record in records if isinstance(record.ranks, OwnSpreads)]
    if len(own) == len(records) and all(one.names == own[0].names for one in own):  # a tenth of the time of the rest
        means = []
        for name, column in zip(own[0].names, zip(*(one.measured for one in own), strict=True), strict=True):
            means.append(column[-1] if name == _MEMORY else sum(map(float.__mul__, column, counts)) / steps)
        return OwnSpreads(own[0].names, tuple(means))
    spreads = {}
    for name in (name for name in last if all(name in record.ranks for record in records)):
        of = [record.ranks[name] for record in records]
        low = sum(spread.min * count for spread, count in zip(of, counts, strict=True)) / steps
        high = sum(spread.max * count for spread, count in zip(of, counts, strict=True)) / steps
        ranks = Counter[int]()
        for spread, count in zip(of, counts, strict=True):
            ranks[spread.rank_of_max] += int(count)
        spreads[name] = last[name] if name == _MEMORY else Spread(low, high, ranks.most_common(1)[0][0])
    return spreads


def _summed(times: Iterable[RankTimes]) -> RankTimes | None:
    """Return the sums of ranks' times, with the waits for the four slowest ranks by name."""
    every = list(times)
    if len(every) < 2:
        return every[0] if every else None
    waits: dict[int, list[float]] = {}
    for one in every:
        for rank, seconds in one.waits.items():
            waits[rank] = [a + b for a, b in zip(waits[rank], seconds, strict=True)] if rank in waits else seconds
    busy = [sum(column) for column in zip(*(one.busy_seconds for one in every), strict=True)]
    ordered = sorted((rank for rank in waits if rank != OTHERS), key=lambda rank: -sum(waits[rank]))
    rest = [*ordered[MOST_AWAITED:], *([OTHERS] if OTHERS in waits else [])]
    shown = {rank: waits[rank] for rank in ordered[:MOST_AWAITED]}
    if rest:
        shown[OTHERS] = [sum(column) for column in zip(*(waits[rank] for rank in rest), strict=True)]
    return RankTimes(sum(one.steps for one in every), busy, shown)
