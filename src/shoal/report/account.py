"""Account of a run as values: time, rates, predictions beside measurements, samples, incidents.

It is built from the files of a run directory alone. Pages, terminals and diagnoses read only the account.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

from shoal.report.incidents import Incident, error_line, incidents
from shoal.report.wall_clock import WallClock, wall_clock
from shoal.runs.attempts import run_status
from shoal.runs.records import SPANS, StepRecord
from shoal.runs.run_files import RunFiles

# The first steps of a run are slower, because they fill caches and choose kernels.
_WARM_UP = 2
# Causes: parts of the wall clock, and a description.
_CAUSES: dict[str, tuple[tuple[str, ...], str]] = {
    "computing": (("forward", "backward"), "the model's forward and backward"),
    "communication": (("exposed_communication",), "waiting for sums and for other ranks"),
    "data": (("data_wait", "host_to_device"), "waiting for samples"),
    "optimizer": (("optimizer",), "the optimizer's update"),
    "host": (("other", "between_steps"), "what the host does beside the model"),
    "evaluation": (("evaluation",), "evaluation"),
    "checkpoints": (("checkpoint",), "checkpoints"),
    "start-up": (("start_up",), "start-up"),
    "recovery": (("trained_again", "lost"), "steps that were lost and trained again"),
    "shut-down": (("shut_down",), "the end of the run: hashing weights, writing the result"),
}
_STEPS = ("computing", "communication", "data", "optimizer", "host")
# Share of a step from which a wait for the slowest rank is mentioned.
_UNEVEN = 0.05


@dataclass(frozen=True)
class Beside:
    """Prediction and measurement of one quantity, in one unit; None if missing."""

    name: str
    predicted: float | None
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """Measured over predicted, or None if one is missing."""
        return self.measured / self.predicted if self.predicted and self.measured is not None else None


@dataclass(frozen=True)
class StepTimes:
    """Seconds of the recorded steps without the first ones; `spans` are means of rank 0.

    Each step of a block counts with the block's mean, so median and deciles are estimates if there are blocks.
    """

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


@dataclass(frozen=True)
class MemoryCategory:
    """Bytes of a category on the rank that has the most."""

    name: str
    rank: int
    measured: int | None
    predicted: int | None


@dataclass(frozen=True)
class CollectiveTraffic:
    """Messages and bytes of one collective on one axis in a step, on the rank that has the most bytes."""

    group: str
    collective: str
    rank: int
    messages: int
    bytes: int
    predicted_messages: int | None
    predicted_bytes: int | None


@dataclass(frozen=True)
class Rates:
    """Rates in 1/s: `step` over the time of steps, `overall` over the whole wall clock without idle time.

    `tokens`: None if samples have no tokens, or if the plan does not record them.
    `peak_share`: share of the devices' dense peak, 0 to 1, if the plan records it for this kind of device.
    """

    step_samples: float | None = None
    overall_samples: float | None = None
    step_tokens: float | None = None
    overall_tokens: float | None = None
    peak_share: float | None = None
    predicted_peak_share: float | None = None
    overall_peak_share: float | None = None


@dataclass(frozen=True)
class RunCost:
    """Cost of a run in US dollars: the time for which the run had its devices, at the price in the plan."""

    dollars: float
    per_device_hour: float
    devices: int


@dataclass(frozen=True)
class SampleAccount:
    """Samples that the final steps trained on, and samples whose steps were repeated or not applied."""

    trained: int
    dataset: int | None
    passes: float | None
    trained_again: int
    not_applied: int
    evaluated: int
    digest: str | None


@dataclass(frozen=True)
class Evaluation:
    """Metrics of the model after a step."""

    step: int
    metrics: Mapping[str, float]
    at: float | None = None


@dataclass(frozen=True)
class RecordedBlocks:
    """Blocks of steps in the records: the first step in a block, and the steps of the largest one."""

    from_step: int
    most_steps: int

    def __str__(self) -> str:
        return f"from step {self.from_step:,} each record is of a block of up to {self.most_steps:,} steps"


@dataclass(frozen=True)
class Account:
    """A run. `status`: running | completed | preempted | failed | killed (ended without a result)."""

    path: str
    name: str
    status: str
    ending: str
    steps: int
    num_steps: int | None
    world_size: int
    device: str
    wall: WallClock
    step_times: StepTimes
    blocks: RecordedBlocks | None
    ranks: tuple[RankExtremes, ...]
    expert_imbalance: float | None  # rows of the busiest of the ranks that divide experts over the mean
    parts: tuple[Beside, ...]
    predicted_terms: Mapping[str, float]
    step_seconds: Beside
    elsewhere: bool
    memory: tuple[MemoryCategory, ...]
    peak_bytes: Beside
    traffic: tuple[CollectiveTraffic, ...]
    rates: Rates
    cost: RunCost | None
    samples: SampleAccount
    loss: float | None
    evaluations: tuple[Evaluation, ...]
    checkpoints: tuple[int, ...]
    incidents: tuple[Incident, ...]
    start_ups: tuple[Mapping[str, float], ...]
    limit: str
    job: Mapping[str, Any]
    plan: Mapping[str, Any]
    versions: Mapping[str, str]
    result: Mapping[str, Any]

    @property
    def routing(self) -> list[str]:
        """A sentence on the balance of divided experts, if ranks divide them."""
        times = self.expert_imbalance
        words = f"The busiest expert rank got {times or 0.0:.2f} times the mean of rank 0's rows; plans assume 1."
        return [] if times is None else [words]

    def to_json(self) -> dict[str, Any]:
        """Return the account as a JSON value; numbers that are not finite become null."""
        document = asdict(self)
        document["wall"] |= {"busy_seconds": self.wall.busy_seconds, "ettr": self.wall.ettr}
        finite: dict[str, Any] = _finite(document)
        return finite


def account(files: RunFiles, compared: Mapping[str, Any] | None = None) -> Account:
    """Return the account of a run; `compared`: predictions and measurements to use if the result has none yet."""
    wall, result, plan = wall_clock(files), files.result if not _is_open(files) else {}, files.plan
    compared = result.get("prediction") or compared or {}
    status = status_of(files)
    kinds, prediction = compared.get("device_kind") or {}, section(plan, "prediction")
    elsewhere = kinds.get("predicted") not in (None, kinds.get("measured"))
    last_attempt = files.attempts[-1] if files.attempts else None
    last_record = files.records[-1] if files.records else None
    ranks = rank_extremes(files.records)
    routed = [(one.expert_imbalance, one.steps) for one in files.records if one.expert_imbalance is not None]
    world_size = last_attempt.world_size if last_attempt is not None else int(result.get("world_size") or 1)
    # With attempts on different numbers of devices, neither the price nor the share of the peak is a single number.
    resized = len({attempt.world_size for attempt in files.attempts}) > 1
    terms, price = compared.get("terms"), number(prediction.get("price_per_hour"))
    cost = None
    if price is not None and not elsewhere and not resized:
        cost = RunCost(price * world_size * wall.busy_seconds / 3600.0, price, world_size)
    parts = tuple(_beside(name, value) for name, value in section(compared, "parts").items())
    if not terms:  # without a prediction of the run, the parts have measurements only
        parts = tuple(Beside(part.name, None, part.measured) for part in parts)
    checkpoints = {r.step - 1 for r in files.records if r.spans.get("checkpoint", 0.0) > 0.0}
    checkpoints |= {r.step for r in files.records if (r.after or {}).get("checkpoint", 0.0) > 0.0}
    checkpoints |= {a.step for a in files.attempts if a.step is not None and a.after.get("checkpoint", 0.0) > 0.0}
    checkpoints |= {step for step in (files.saved_step, *(a.resumed_from for a in files.attempts)) if step}
    evaluations = [Evaluation(record.step, record.metrics, record.at) for record in files.records if record.metrics]
    last, metrics = int(result.get("steps") or 0), numbers(result.get("metrics"))
    if metrics and (not evaluations or evaluations[-1].step < last):
        evaluations.append(Evaluation(last, metrics, files.attempts[-1].trained_at if files.attempts else None))
    return Account(
        path=files.shown,
        name=files.name,
        status=status,
        ending=_ending(files, status),
        steps=last_record.step if last_record is not None else int(result.get("steps") or 0),
        num_steps=last_attempt.num_steps if last_attempt is not None else None,
        world_size=world_size,
        device=last_attempt.device if last_attempt and last_attempt.device else str(kinds.get("measured") or ""),
        wall=wall,
        step_times=step_times(files.records),
        blocks=recorded_blocks(files.records),
        ranks=ranks,
        expert_imbalance=sum(of * n for of, n in routed) / sum(n for _, n in routed) if routed else None,
        parts=parts,
        predicted_terms=numbers(terms or prediction.get("terms")),
        step_seconds=_beside("step_seconds", compared.get("step_seconds")),
        elsewhere=elsewhere,
        memory=memory(result),
        peak_bytes=_beside("peak_bytes", compared.get("peak_bytes")),
        traffic=traffic(result),
        rates=_rates(files, wall, elsewhere or resized, world_size),
        cost=cost,
        samples=_samples(files, result),
        loss=last_record.loss if last_record is not None else result.get("train_loss"),
        evaluations=tuple(evaluations),
        checkpoints=tuple(sorted(checkpoints)),
        incidents=incidents(files),
        start_ups=tuple(numbers(attempt.phases) for attempt in files.attempts),
        limit=limit(wall, ranks),
        job=files.job,
        plan=plan,
        versions=result.get("versions") or section(files.job, "versions"),
        result=result,
    )


def status_of(files: RunFiles) -> str:
    """Return the status of a run: running, killed, or the status in its result."""
    if _is_open(files) and files.address is not None:
        return "running"  # remote files do not show live processes
    return run_status(is_held=files.is_held, attempts=files.attempts, result=files.result)


def _is_open(files: RunFiles) -> bool:
    """Return True if the last attempt has not ended, which means that a result is from an earlier one."""
    return bool(files.attempts) and files.attempts[-1].ended_at is None


def _ending(files: RunFiles, status: str) -> str:
    if status == "running" and not files.is_held:
        return "no end of it is at the address: it trains, or was killed since it last saved"
    error = files.result.get("error")
    if status == "failed" and isinstance(error, dict):
        return error_line(error)
    return {
        "running": "a process trains it",
        "killed": "it ended without a word: killed, or its host is gone",
        "completed": "all of its length",
        "preempted": "it was asked to stop; --resume goes on",
    }.get(status, status)


def _beside(name: str, value: Any) -> Beside:
    pair = value if isinstance(value, dict) else {}
    return Beside(name, number(pair.get("predicted")), number(pair.get("measured")))


def _rates(files: RunFiles, wall: WallClock, elsewhere: bool, world_size: int) -> Rates:
    samples, steps = sum(record.num_samples for record in files.records), steady(files.records)
    step_seconds = sum(record.seconds for record in steps)
    step = sum(record.num_samples for record in steps) / step_seconds if step_seconds > 0 else None
    overall = samples / wall.busy_seconds if wall.busy_seconds > 0 and files.records else None
    predicted = section(files.plan, "prediction")
    tokens, peak = number(predicted.get("sample_tokens")), number(predicted.get("peak_flops"))
    flops = number(predicted.get("flops_per_sample"))
    share = flops / peak / world_size if flops and peak and not elsewhere and files.records else None

    def times(rate: float | None, factor: float | None) -> float | None:
        return rate * factor if rate is not None and factor is not None else None

    of_tokens, mfu = (times(step, tokens), times(overall, tokens)), number(predicted.get("mfu"))
    return Rates(step, overall, *of_tokens, times(step, share), mfu, times(overall, share))


def _samples(files: RunFiles, result: Mapping[str, Any]) -> SampleAccount:
    last = files.records[-1] if files.records else None
    trained = last.samples if last is not None else int(result.get("samples") or 0)
    dataset = files.job.get("train_samples")
    return SampleAccount(
        trained=trained,
        dataset=dataset if isinstance(dataset, int) else None,
        passes=trained / dataset if isinstance(dataset, int) and dataset else None,
        trained_again=sum(u.samples for attempt in files.attempts for u in attempt.undone),
        not_applied=sum(record.num_samples for record in files.records if record.skipped),
        evaluated=int(result.get("eval_samples") or 0),
        digest=last.digest if last is not None else result.get("sample_digest"),
    )


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, str) or not isinstance(value, Iterable):
        return None if isinstance(value, float) and not math.isfinite(value) else value
    return [_finite(inner) for inner in value]


def steady(records: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """Return the steps without the first ones, if enough others remain."""
    return records[_WARM_UP:] if len(records) > 2 * _WARM_UP else records


def recorded_blocks(records: Sequence[StepRecord]) -> RecordedBlocks | None:
    """Return where blocks of steps begin in records, or None if each record is of one step."""
    first = next((record.first for record in records if record.steps > 1), None)
    return None if first is None else RecordedBlocks(first, max(record.steps for record in records))


def step_times(of: Sequence[StepRecord]) -> StepTimes:
    """Return the median, deciles, mean and mean spans of steps."""
    records = steady(of)
    if not records:
        return StepTimes(0)
    means = sorted((record.seconds / record.steps, record.steps) for record in records)
    ends = list(accumulate(steps for _, steps in means))
    count = ends[-1]

    def quantile(share: float) -> float:
        place = share * (count - 1)
        low, high = (means[bisect_right(ends, at)][0] for at in (int(place), min(int(place) + 1, count - 1)))
        return low + (high - low) * (place - int(place))

    spans = dict.fromkeys(SPANS, 0.0)
    for record in records:
        for name, value in record.spans.items():
            spans[name] = spans.get(name, 0.0) + value
    spans = {name: value / count for name, value in spans.items()}
    mean = sum(record.seconds for record in records) / count
    return StepTimes(count, quantile(0.5), quantile(0.1), quantile(0.9), mean, spans)


def rank_extremes(records: Sequence[StepRecord]) -> tuple[RankExtremes, ...]:
    """Return the extremes over ranks of each span, the step time and the memory."""
    least, most, counts = defaultdict[str, float](float), defaultdict[str, float](float), Counter[str]()
    slowest: dict[str, Counter[int]] = {}
    for record in steady(records):
        for name, spread in record.ranks.items():
            least[name] += spread.min * record.steps
            most[name] += spread.max * record.steps
            counts[name] += record.steps
            ranks = slowest.setdefault(name, Counter())
            if spread.max > spread.min:  # otherwise no rank has the most, as on one process
                ranks[spread.rank_of_max] += record.steps
    extremes = []
    for name, ranks in slowest.items():
        shares = {rank: count / ranks.total() for rank, count in sorted(ranks.items())}
        often = max(shares, key=lambda rank: shares[rank], default=0)
        extremes.append(RankExtremes(name, least[name] / counts[name], most[name] / counts[name], often, shares))
    return tuple(extremes)


def memory(result: Mapping[str, Any]) -> tuple[MemoryCategory, ...]:
    """Return each memory category of a result, on the rank that has the most."""
    fullest: dict[str, MemoryCategory] = {}
    for rank in _ranks_of(result, "memory"):
        predicted = rank.get("predicted") or {}
        for name, value in (rank.get("measured") or {}).items():
            if name not in fullest or (value or 0) > (fullest[name].measured or 0):
                fullest[name] = MemoryCategory(name, int(rank.get("rank", 0)), value, predicted.get(name))
    return tuple(fullest.values())


def traffic(result: Mapping[str, Any]) -> tuple[CollectiveTraffic, ...]:
    """Return each collective of a result, on the rank that has the most bytes."""
    fullest: dict[tuple[str, str], CollectiveTraffic] = {}
    for rank in _ranks_of(result, "traffic"):
        predicted = rank.get("predicted")
        for group, collectives in (rank.get("measured") or {}).items():
            for collective, volume in collectives.items():
                known = fullest.get((group, collective))
                if known is not None and volume["bytes"] <= known.bytes:
                    continue
                own = (int(rank.get("rank", 0)), volume["messages"], volume["bytes"])
                expected = None if predicted is None else predicted.get(group, {}).get(collective, {})
                of_plan = [None if expected is None else expected.get(name, 0) for name in ("messages", "bytes")]
                fullest[group, collective] = CollectiveTraffic(group, collective, *own, *of_plan)
    return tuple(fullest.values())


def _ranks_of(result: Mapping[str, Any], block: str) -> list[dict[str, Any]]:
    ranks = section(result, block).get("ranks")
    return [rank for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else []


def causes(wall: WallClock) -> dict[str, float]:
    """Return shares of the time for which the run had its devices, by cause, the largest first."""
    busy = wall.busy_seconds
    shares = {name: wall.of(*parts) / busy if busy > 0 else 0.0 for name, (parts, _) in _CAUSES.items()}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def limit(wall: WallClock, ranks: Sequence[RankExtremes]) -> str:
    """Return a sentence on the largest part of the time and, for waits, on the slowest rank."""
    shares = causes(wall)
    name, share = next(iter(shares.items()))
    if share <= 0.0:
        return "Nothing is recorded of where the time went."
    sentence = f"{share:.0%} of the time went to {_CAUSES[name][1]}"
    if name not in _STEPS:
        inside = next(other for other in shares if other in _STEPS)
        return f"{sentence}; within steps most went to {_CAUSES[inside][1]} ({shares[inside]:.0%})."
    if name == "communication":
        known = {extremes.name: extremes for extremes in ranks}
        busy, step = known.get("busy_seconds"), known.get("step_seconds")
        wait = (busy.most - busy.least) / step.most if busy is not None and step is not None and step.most else 0.0
        if busy is not None and wait >= _UNEVEN:
            sentence += f", {wait:.0%} of a step for the slowest rank (most often rank {busy.rank_of_most})"
    second = next(other for other in shares if other != name)
    return f"{sentence}; next is {_CAUSES[second][1]} ({shares[second]:.0%})."


def section(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a table of a document, empty if missing."""
    table = document.get(name)
    return table if isinstance(table, dict) else {}


def numbers(value: Any) -> dict[str, float]:
    """Return the finite numbers of a table."""
    table = value if isinstance(value, dict) else {}
    return {str(name): finite for name, v in table.items() if (finite := number(v)) is not None}


def number(value: Any) -> float | None:
    """Return a finite number as float, or None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
