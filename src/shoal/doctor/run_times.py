"""Times of a run's training for a diagnosis: of a step, its spans, and events between steps.

Start-up and shut-down are separate, because a longer run also has each of them only once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean, median
from typing import Any

from shoal.report.account import Account, RecordedBlocks, section, steady
from shoal.runs.records import SPANS, StepRecord
from shoal.runs.run_files import RunFiles

# Collectives that sum gradients: small gradients are gathered and summed by each rank.
_SUMS = ("all_reduce", "all_gather")


# The quickest 1/10 of the steps is taken as undisturbed.
_QUICKEST = 10
_MOST_STEPS = 100_000  # newest steps of a long run that count
_HELD_UP = 3.0  # multiple of the median step from which a step counts as held up


@dataclass(frozen=True)
class Periodic:
    """Times of a periodic event between steps: seconds of each, steps between two of them, and seconds per step.

    The steps during and after the event are slower too, because of cold caches or a writing thread. `each` is without
    that time, `per_step` includes it.
    """

    each: float = 0.0
    every: float | None = None
    per_step: float = 0.0


@dataclass(frozen=True)
class RankSpread:
    """A span over the ranks: means over steps of the least and the most, and the rank that most often has the most."""

    least: float
    most: float
    rank_of_most: int = 0
    how_often: float = 1.0


@dataclass(frozen=True)
class RunTimes:
    """Seconds per step of a run. `step` excludes checkpoints; `spans` are rank 0's and sum to `step`.

    `checkpoint`: regular checkpoints. `requested`: checkpoints that a callback requests.
    `best`: checkpoints after evaluations that improve a watched metric.
    `undisturbed`: the first decile of each span on the rank with the least of it.
    `writing`: core seconds of the thread that writes a checkpoint in parallel with steps, if recorded.
    `threads` of each process and `cores` of its host: None if not recorded.
    `reads_compute`: whether reading samples keeps a core busy, None if that is not known.
    `share_of_grains`: the most grains of a rank relative to their mean.
    """

    num_steps: int
    step: float
    spread: tuple[float, float]  # the first and the last decile relative to the median
    spans: Mapping[str, float]
    ranks: Mapping[str, RankSpread]
    evaluation: Periodic
    checkpoint: Periodic
    world_size: int
    requested: Periodic = Periodic()
    best: Periodic = Periodic()
    undisturbed: Mapping[str, float] = field(default_factory=dict)
    writing: float | None = None
    device: str = "cpu"
    host: str = ""
    threads: int | None = None
    cores: int | None = None
    reads_compute: bool | None = None
    grains: int = 1
    share_of_grains: float = 1.0
    microbatches: int = 1
    parameters: int = 0
    samples: float = 0.0
    asks_evaluations: bool = False
    messages: int | None = None
    message_bytes: int = 0
    start_up: float = 0.0
    wall: float = 0.0
    blocks: RecordedBlocks | None = None
    plan: Mapping[str, Any] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Seconds per step, with evaluations and checkpoints."""
        events = (self.evaluation, self.checkpoint, self.requested, self.best)
        return self.step + sum(event.per_step for event in events)

    @property
    def computing(self) -> float:
        """Seconds of forward and backward per step."""
        return self.spans.get("forward", 0.0) + self.spans.get("backward", 0.0)

    def section(self, name: str) -> Mapping[str, Any]:
        """Return a section of the plan, empty if missing."""
        return section(self.plan, name)


def run_times(files: RunFiles, account: Account) -> RunTimes | None:
    """Return the times of a run, or None if it has fewer than 4 steady records."""
    records = _each_step(files.records)
    if len(records) < 4:
        return None
    plain, step = _plain(records), median(_plain(records))
    scale = step / mean(plain)
    # Steps that another program or Python's garbage collection held up do not represent the run.
    usual = [record for record, seconds in zip(records, plain, strict=True) if seconds <= _HELD_UP * step]
    of_usual = step / mean(_plain(usual))
    spans = {name: of_usual * mean(r.spans.get(name, 0.0) for r in usual) for name in SPANS if name != "checkpoint"}
    last = files.attempts[-1] if files.attempts else None
    ordered = sorted(plain)
    layout = section(files.plan, "layout")
    degrees = {axis: int(layout.get(axis) or 1) for axis in ("data", "shard", "tensor", "pipeline", "context")}
    grains = int(files.job.get("grains") or 1)
    apart = degrees["data"] * degrees["shard"]
    most = -(-grains // apart)
    sums = [volume for volume in account.traffic if volume.collective in _SUMS and degrees["shard"] == 1]
    return RunTimes(
        num_steps=len(records),
        step=step,
        spread=(ordered[len(ordered) // 10] / step, ordered[-1 - len(ordered) // 10] / step),
        spans=spans,
        ranks={
            e.name: RankSpread(
                e.least * scale, e.most * scale, e.rank_of_most, e.share_of_steps.get(e.rank_of_most, 0.0)
            )
            for e in account.ranks
        },
        **_events(records),
        undisturbed={name: _quickest(records, name) for name in SPANS if name != "checkpoint"},
        writing=last.checkpoint_cpu if last is not None else None,
        world_size=account.world_size,
        device="cpu" if account.device in ("", "cpu") else "gpu",
        host=last.host if last is not None else "",
        threads=last.threads if last is not None else None,
        cores=last.cores if last is not None else None,
        grains=grains,
        share_of_grains=most / (grains / apart) if grains >= apart else 1.0,
        microbatches=-(-most // max(1, int(section(files.plan, "batch").get("grains_per_microbatch") or 1))),
        parameters=int(files.job.get("parameters") or 0),
        samples=mean(record.num_samples for record in records),
        asks_evaluations=any(
            (r.after or {}).get("evaluation") and following.epoch == r.epoch for r, following in pairwise(records)
        )
        and (last is None or last.evaluate_every is None),
        messages=sum(volume.messages for volume in sums) if sums else None,
        message_bytes=sum(volume.bytes for volume in sums),
        start_up=account.wall.of("start_up"),
        wall=account.wall.busy_seconds,
        blocks=account.blocks,
        plan=files.plan,
    )


def seconds_per_step(of: Sequence[StepRecord]) -> float:
    """Return a training's seconds per step: the median of steps plus the means of periodic events.

    Events after the last step belong to the end of the run and are excluded.
    """
    records = _each_step(of)
    return float(median(_plain(records)) + sum(event.per_step for event in _events(records).values()))


def _each_step(records: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """Return a record for each of the newest steps without the first ones. The steps of a block have their means."""
    every = [one for record in steady(records) for one in [record.per_step()] * record.steps]
    return every[-_MOST_STEPS:]


def _plain(records: Sequence[StepRecord]) -> list[float]:
    return [record.seconds - record.spans.get("checkpoint", 0.0) for record in records]


def _quickest(records: Sequence[StepRecord], span: str) -> float:
    """Return the first decile over steps of a span's seconds. Of each step the quickest rank counts."""
    values = sorted(r.ranks[span].min if span in r.ranks else r.spans.get(span, 0.0) for r in records)
    return values[len(values) // _QUICKEST]


def _events(records: Sequence[StepRecord]) -> dict[str, Any]:
    """Return the periodic events between steps, by their names in `RunTimes`."""
    return {
        "evaluation": _periodic(records, lambda r: (r.after or {}).get("evaluation", 0.0)),
        "checkpoint": _periodic(records, lambda r: r.spans.get("checkpoint", 0.0)),
        "requested": _periodic(records, lambda r: 0.0 if r.metrics else (r.after or {}).get("checkpoint", 0.0)),
        "best": _periodic(records, lambda r: (r.after or {}).get("checkpoint", 0.0) if r.metrics else 0.0),
    }


def _periodic(records: Sequence[StepRecord], seconds: Callable[[StepRecord], float]) -> Periodic:
    """Return the times of a periodic event.

    The last record is excluded, because the end of the run follows it. The first event counts as the others' mean,
    because it also fills caches, once in a run.
    """
    events = [(place, value) for place, record in enumerate(records[:-1]) if (value := seconds(record)) > 0.0]
    if not events:
        return Periodic()
    total = sum(value for _, value in events)
    # Events that only waited a moment for a thread are not events of their own.
    own = [place for place, value in events if value > 0.1 * total / len(events)]
    if len(own) > 1:
        of_own = [seconds(records[place]) for place in own]
        total += mean(of_own[1:]) - of_own[0]
    every = (records[own[-1]].step - records[own[0]].step) / (len(own) - 1) if len(own) > 1 else None
    # An event's step and the next are longer than other steps, unless most steps are such.
    plain = _plain(records)
    both = [place for place in own if place + 1 < len(plain)]
    near = {near for place in both for near in (place, place + 1)}
    others = [value for place, value in enumerate(plain) if place not in near]
    longer = 0.0
    if both and len(others) >= len(plain) / 2:
        usual = median(others)
        longer = sum(max(0.0, median(plain[place + after] for place in both) - usual) for after in (0, 1))
    return Periodic(total / len(own), every, (total + longer * len(own)) / (len(records) - 1))
