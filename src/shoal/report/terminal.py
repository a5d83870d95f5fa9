"""Terminal lines about a run, of limited width: progress, loss, rates, and the use of time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from shoal.report.account import Account
from shoal.report.quantities import dollars, rate, seconds, share, short, size
from shoal.runs.records import StepRecord

_RECENT = 50  # steps whose rate is shown
_LEVELS = "▁▂▃▄▅▆▇█"
_MOST_LOSSES = 3000
_LEAST_SHARE = 0.005
_NUM_INCIDENTS = 3


def lines(found: Account, records: Sequence[StepRecord], width: int) -> list[str]:
    """Return all lines; the current progress is from the newest records."""
    text = [*_progress(found, records, width), "", *_wall_clock(found, width), "", *_ending(found, width)]
    return [cut(line, width) for line in text]


def cut(text: str, width: int) -> str:
    """Cut a text to `width` columns, without characters that control a terminal."""
    plain = "".join(c if c.isprintable() else " " for c in text)
    return plain if len(plain) <= width else plain[: max(0, width - 1)] + "…"


def head(found: Account, records: Sequence[StepRecord]) -> str:
    """Return one line for logs."""
    step = records[-1].step if records else found.steps
    of = f"/{found.num_steps}" if found.num_steps else ""
    loss = records[-1].loss if records else found.loss
    pace = _pace(records)
    parts = [f"{found.name}: {found.status}", f"step {step}{of}", f"loss {short(loss)}"]
    return "  ".join([*parts, f"{rate(pace)} samples/s"] if pace else parts)


def _pace(records: Sequence[StepRecord]) -> float | None:
    """Return the samples per second of the newest steps."""
    recent = records[-_RECENT:]
    step_seconds = sum(record.seconds for record in recent)
    return sum(record.num_samples for record in recent) / step_seconds if step_seconds > 0.0 else None


def _progress(found: Account, records: Sequence[StepRecord], width: int) -> Iterator[str]:
    step = records[-1].step if records else found.steps
    recent, rates = records[-_RECENT:], found.rates
    of = f" of {found.num_steps:,}" if found.num_steps else ""
    left = ""
    if found.status == "running" and found.num_steps and recent:
        each = sum(record.seconds + sum((record.after or {}).values()) for record in recent) / len(recent)
        left = f", {seconds(each * max(0, found.num_steps - step))} left"
    yield f"{found.name}: {found.status}"
    yield f"step {step:,}{of}{left}"
    if found.num_steps:
        done = min(1.0, step / found.num_steps)
        room = max(5, min(60, width) - 5)
        full = int(done * room)
        yield f"{'━' * full}{'─' * (room - full)} {int(100 * done):3d}%"
    apart = 1 + len(records) // _MOST_LOSSES  # a subset of a long run's losses suffices for a line of blocks
    losses = [record.loss for record in records[::apart] if record.loss is not None]
    metrics = ""
    if found.evaluations:
        last = found.evaluations[-1]
        values = ", ".join(f"{name} {short(value)}" for name, value in last.metrics.items())
        metrics = f"; step {last.step:,}: {values}"
    yield f"loss {short(records[-1].loss if records else found.loss)}{metrics}"
    if len(losses) > 1:
        yield spark(losses, min(60, width))
    pace = _pace(records)
    if pace is not None:
        each = sum(record.seconds for record in recent) / len(recent)
        tokens = ""
        if rates.step_tokens and rates.step_samples:
            tokens = f", {rate(pace * rates.step_tokens / rates.step_samples)} tokens/s"
        yield f"{rate(pace)} samples/s{tokens}, {seconds(each)} a step"
    parts = []
    if records and "memory_bytes" in records[-1].ranks:
        parts.append(f"peak {size(records[-1].ranks['memory_bytes'].max)}")
    if rates.peak_share is not None:
        parts.append(f"{share(rates.peak_share)} of the device's peak")
    if found.cost is not None:
        parts.append(dollars(found.cost.dollars))
    if parts:
        yield ", ".join(parts)


def spark(values: Sequence[float], width: int) -> str:
    """Return means of neighbouring values as blocks of eight heights."""
    number = min(width, len(values))
    edges = [len(values) * place // number for place in range(number + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    return "".join(_LEVELS[int((mean - low) / (high - low) * 7.999)] if high > low else _LEVELS[0] for mean in means)


def _wall_clock(found: Account, width: int) -> Iterator[str]:
    idle, busy = found.wall.of("idle"), found.wall.busy_seconds
    yield f"wall clock {seconds(busy)}" + (f", and {seconds(idle)} between calls" if idle > 0.0 else "")
    room = max(4, min(30, width - 32))
    for part in sorted(found.wall.parts, key=lambda part: -part.seconds):
        of_busy = part.seconds / busy if busy > 0.0 and part.name != "idle" else 0.0
        if of_busy >= _LEAST_SHARE:
            full = "█" * max(1, round(min(1.0, of_busy) * room))
            yield f"{cut(part.name.replace('_', ' '), 22):<22} {of_busy:4.0%} {full}"


def _ending(found: Account, width: int) -> Iterator[str]:
    busy = next((one for one in found.ranks if one.name == "busy_seconds"), None)
    if busy is not None and busy.share_of_steps:
        often = busy.share_of_steps[busy.rank_of_most]
        yield f"rank {busy.rank_of_most} was the slowest in {share(often)} of steps"
    if found.incidents and found.wall.ettr is not None:
        yield f"{share(found.wall.ettr)} of the training's time was effective"
    for incident in found.incidents[-_NUM_INCIDENTS:]:
        where = f"step {incident.step}: " if incident.step is not None else ""
        yield f"! {where}{incident.text}"
    yield from _wrapped(found.limit, width)
    if found.status != "running":
        yield from _wrapped(f"{found.status}: {found.ending}", width)


def _wrapped(text: str, width: int) -> Iterator[str]:
    line = ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            yield line
            line = word
        else:
            line = f"{line} {word}" if line else word
    yield line
