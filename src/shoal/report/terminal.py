"""Terminal lines about a run, of limited width: progress, loss, rates, and the use of time."""

from __future__ import annotations

import itertools
import textwrap
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import partial

from shoal.report.account import Account
from shoal.report.quantities import dollars, rate, seconds, share, short, size
from shoal.runs.records import StepRecord

_RECENT = 50  # steps whose rate is shown
_LEVELS = "▁▂▃▄▅▆▇█"
_MOST_LOSSES = 3000
_LEAST_SHARE = 0.005
_NUM_INCIDENTS = 3


def lines(account: Account, records: Sequence[StepRecord], width: int) -> list[str]:
    """Return all lines; the current progress is from the newest records."""
    wrapped = partial(textwrap.wrap, break_long_words=False, break_on_hyphens=False)
    text = [*_progress(account, records, width), ""]
    idle, busy = account.wall.of("idle"), account.wall.busy_seconds
    text.append(f"wall clock {seconds(busy)}" + (f", and {seconds(idle)} between calls" if idle > 0.0 else ""))
    room = max(4, min(30, width - 32))
    for part in sorted(account.wall.parts, key=lambda part: -part.seconds):
        of_busy = part.seconds / busy if busy > 0.0 and part.name != "idle" else 0.0
        if of_busy >= _LEAST_SHARE:
            full = "█" * max(1, round(min(1.0, of_busy) * room))
            text.append(f"{cut(part.name.replace('_', ' '), 22):<22} {of_busy:4.0%} {full}")
    text.append("")
    slowest = next((one for one in account.ranks if one.name == "busy_seconds"), None)
    if slowest is not None and slowest.share_of_steps:
        often = slowest.share_of_steps[slowest.rank_of_most]
        text.append(f"rank {slowest.rank_of_most} was the slowest in {share(often)} of steps")
    text += [line for words in account.routing for line in wrapped(words, width)]
    if account.incidents and account.wall.ettr is not None:
        text.append(f"{share(account.wall.ettr)} of the training's time was effective")
    for incident in account.incidents[-_NUM_INCIDENTS:]:
        where = f"step {incident.step}: " if incident.step is not None else ""
        text.append(f"! {where}{incident.text}")
    text += wrapped(account.limit, width)
    if account.status != "running":
        text += wrapped(f"{account.status}: {account.ending}", width)
    return [cut(line, width) for line in text]


def cut(text: str, width: int) -> str:
    """Cut a text to `width` columns, without characters that control a terminal."""
    plain = "".join(c if c.isprintable() else " " for c in text)
    return plain if len(plain) <= width else plain[: max(0, width - 1)] + "…"


def head(account: Account, records: Sequence[StepRecord]) -> str:
    """Return one line for logs."""
    step = records[-1].step if records else account.steps
    of = f"/{account.num_steps}" if account.num_steps else ""
    loss = records[-1].loss if records else account.loss
    pace = _pace(records)
    parts = [f"{account.name}: {account.status}", f"step {step}{of}", f"loss {short(loss)}"]
    return "  ".join([*parts, f"{rate(pace)} samples/s"] if pace else parts)


def _pace(records: Sequence[StepRecord]) -> float | None:
    """Return the samples per second of the newest steps."""
    recent = _recent(records)
    step_seconds = sum(record.seconds for record in recent)
    return sum(record.num_samples for record in recent) / step_seconds if step_seconds > 0.0 else None


def _recent(records: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """Return the newest records, of at least 50 steps."""
    begin, steps = len(records), 0
    while begin > 0 and steps < _RECENT:
        begin -= 1
        steps += records[begin].steps
    return records[begin:]


def _progress(account: Account, records: Sequence[StepRecord], width: int) -> Iterator[str]:
    step = records[-1].step if records else account.steps
    recent, rates = _recent(records), account.rates
    recent_steps = sum(record.steps for record in recent)
    of = f" of {account.num_steps:,}" if account.num_steps else ""
    left = ""
    if account.status == "running" and account.num_steps and recent:
        each = sum(record.seconds + sum((record.after or {}).values()) for record in recent) / recent_steps
        left = f", {seconds(each * max(0, account.num_steps - step))} left"
    yield f"{account.name}: {account.status}"
    yield f"step {step:,}{of}{left}"
    if account.blocks is not None:
        yield str(account.blocks)
    if account.num_steps:
        done = min(1.0, step / account.num_steps)
        room = max(5, min(60, width) - 5)
        full = int(done * room)
        yield f"{'━' * full}{'─' * (room - full)} {int(100 * done):3d}%"
    shown = records[:: 1 + len(records) // _MOST_LOSSES]  # a subset of a long run's losses suffices for a line
    if account.blocks is not None:  # at even distances in steps
        at = (
            bisect_left(records, step * place // _MOST_LOSSES, key=lambda record: record.step)
            for place in range(_MOST_LOSSES)
        )
        shown = [records[min(place, len(records) - 1)] for place in at]
    losses = [record.loss for record in shown if record.loss is not None]
    metrics = ""
    if account.evaluations:
        last = account.evaluations[-1]
        values = ", ".join(f"{name} {short(value)}" for name, value in last.metrics.items())
        metrics = f"; step {last.step:,}: {values}"
    yield f"loss {short(records[-1].loss if records else account.loss)}{metrics}"
    if len(losses) > 1:
        yield spark(losses, min(60, width))
    pace = _pace(records)
    if pace is not None:
        each = sum(record.seconds for record in recent) / recent_steps
        tokens = ""
        if rates.step_tokens and rates.step_samples:
            tokens = f", {rate(pace * rates.step_tokens / rates.step_samples)} tokens/s"
        yield f"{rate(pace)} samples/s{tokens}, {seconds(each)} a step"
    parts = []
    if records and "memory_bytes" in records[-1].ranks:
        parts.append(f"peak {size(records[-1].ranks['memory_bytes'].max)}")
    if rates.peak_share is not None:
        parts.append(f"{share(rates.peak_share)} of the device's peak")
    if account.cost is not None:
        parts.append(dollars(account.cost.dollars))
    if parts:
        yield ", ".join(parts)


def spark(values: Sequence[float], width: int) -> str:
    """Return means of neighbouring values as blocks of eight heights."""
    number = min(width, len(values))
    edges = [len(values) * place // number for place in range(number + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    return "".join(_LEVELS[int((mean - low) / (high - low) * 7.999)] if high > low else _LEVELS[0] for mean in means)
