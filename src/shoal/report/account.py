"""Account of a run as values: time, rates, predictions beside measurements, samples, incidents.

It is built from the files of a run directory alone. Pages, terminals and diagnoses read only the account.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shoal.report.incidents import Incident, incidents, told
from shoal.report.json_values import number, numbers, section
from shoal.report.limits import limit
from shoal.report.step_times import RankExtremes, StepTimes, rank_extremes, steady, step_times
from shoal.report.volumes import CollectiveTraffic, MemoryCategory, memory, traffic
from shoal.report.wall_clock import WallClock, wall_clock
from shoal.runs.run_files import RunFiles


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
    ranks: tuple[RankExtremes, ...]
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

    def to_json(self) -> dict[str, Any]:
        """Return the account as a JSON value; numbers that are not finite become null."""
        found = asdict(self)
        found["wall"] |= {"busy_seconds": self.wall.busy_seconds, "ettr": self.wall.ettr}
        plain: dict[str, Any] = _plain(found)
        return plain


def account(files: RunFiles, compared: Mapping[str, Any] | None = None) -> Account:
    """Return the account of a run; `compared`: predictions and measurements to use if the result has none yet."""
    wall, result, plan = wall_clock(files), files.result if not _is_open(files) else {}, files.plan
    compared = result.get("prediction") or compared or {}
    times = step_times(files.records)
    status = status_of(files)
    elsewhere = _is_elsewhere(compared)
    world, ranks = _world_size(files), rank_extremes(files.records)
    # With attempts on different numbers of devices, neither the price nor the share of the peak is a single number.
    resized = len({attempt.world_size for attempt in files.attempts}) > 1
    found = Account(
        path=files.shown,
        name=files.name,
        status=status,
        ending=_ending(files, status),
        steps=files.records[-1].step if files.records else int(result.get("steps") or 0),
        num_steps=files.attempts[-1].num_steps if files.attempts else None,
        world_size=world,
        device=_device(files, compared),
        wall=wall,
        step_times=times,
        ranks=ranks,
        parts=_parts(compared),
        predicted_terms=numbers(compared.get("terms") or section(plan, "prediction").get("terms")),
        step_seconds=_beside("step_seconds", compared.get("step_seconds")),
        elsewhere=elsewhere,
        memory=memory(result),
        peak_bytes=_beside("peak_bytes", compared.get("peak_bytes")),
        traffic=traffic(result),
        rates=_rates(files, wall, elsewhere or resized, world),
        cost=None if elsewhere or resized else _cost(plan, wall, world),
        samples=_samples(files, result),
        loss=files.records[-1].loss if files.records else result.get("train_loss"),
        evaluations=_evaluations(files, result),
        checkpoints=_checkpoints(files),
        incidents=incidents(files),
        start_ups=tuple(numbers(attempt.phases) for attempt in files.attempts),
        limit=limit(wall, ranks),
        job=files.job,
        plan=plan,
        versions=result.get("versions") or section(files.job, "versions"),
        result=result,
    )
    return found


def status_of(files: RunFiles) -> str:
    """Return the status of a run: running, killed, or the status in its result."""
    if files.is_held:
        return "running"
    if _is_open(files):
        return "killed" if files.address is None else "running"  # remote files do not show live processes
    return str(files.result.get("status") or "killed")


def _is_open(files: RunFiles) -> bool:
    """Check whether the last attempt has not ended, which means that a result is from an earlier one."""
    return bool(files.attempts) and files.attempts[-1].ended_at is None


def _ending(files: RunFiles, status: str) -> str:
    if status == "running" and not files.is_held:
        return "no end of it is at the address: it trains, or was killed since it last saved"
    error = files.result.get("error")
    if status == "failed" and isinstance(error, dict):
        return told(error)
    return {
        "running": "a process trains it",
        "killed": "it ended without a word: killed, or its host is gone",
        "completed": "all of its length",
        "preempted": "it was asked to stop; --resume goes on",
    }.get(status, status)


def _world_size(files: RunFiles) -> int:
    if files.attempts:
        return files.attempts[-1].world_size
    return int(files.result.get("world_size") or 1)


def _device(files: RunFiles, compared: Mapping[str, Any]) -> str:
    if files.attempts and files.attempts[-1].device:
        return files.attempts[-1].device
    return str((compared.get("device_kind") or {}).get("measured") or "")


def _parts(compared: Mapping[str, Any]) -> tuple[Beside, ...]:
    parts, has_terms = section(compared, "parts"), bool(compared.get("terms"))
    found = (_beside(name, value) for name, value in parts.items())
    return tuple(one if has_terms else Beside(one.name, None, one.measured) for one in found)


def _beside(name: str, value: Any) -> Beside:
    found = value if isinstance(value, dict) else {}
    return Beside(name, number(found.get("predicted")), number(found.get("measured")))


def _is_elsewhere(compared: Mapping[str, Any]) -> bool:
    kinds = compared.get("device_kind") or {}
    return kinds.get("predicted") not in (None, kinds.get("measured"))


def _rates(files: RunFiles, wall: WallClock, elsewhere: bool, world_size: int) -> Rates:
    samples = sum(record.num_samples for record in files.records)
    stepping = sum(record.seconds for record in steady(files.records))
    step = sum(r.num_samples for r in steady(files.records)) / stepping if stepping > 0 else None
    overall = samples / wall.busy_seconds if wall.busy_seconds > 0 and files.records else None
    predicted = section(files.plan, "prediction")
    tokens, peak = number(predicted.get("sample_tokens")), number(predicted.get("peak_flops"))
    flops = number(predicted.get("flops_per_sample"))
    share = flops / peak / world_size if flops and peak and not elsewhere and files.records else None

    def times(rate: float | None, factor: float | None) -> float | None:
        return rate * factor if rate is not None and factor is not None else None

    return Rates(
        step,
        overall,
        times(step, tokens),
        times(overall, tokens),
        times(step, share),
        number(predicted.get("mfu")),
        times(overall, share),
    )


def _cost(plan: Mapping[str, Any], wall: WallClock, world_size: int) -> RunCost | None:
    price = number(section(plan, "prediction").get("price_per_hour"))
    if price is None:
        return None
    return RunCost(price * world_size * wall.busy_seconds / 3600.0, price, world_size)


def _samples(files: RunFiles, result: Mapping[str, Any]) -> SampleAccount:
    last = files.records[-1] if files.records else None
    trained = last.samples if last is not None else int(result.get("samples") or 0)
    dataset = files.job.get("train_samples")
    undone = sum(u.samples for attempt in files.attempts for u in attempt.undone)
    return SampleAccount(
        trained=trained,
        dataset=dataset if isinstance(dataset, int) else None,
        passes=trained / dataset if isinstance(dataset, int) and dataset else None,
        trained_again=undone,
        not_applied=sum(record.num_samples for record in files.records if record.skipped),
        evaluated=int(result.get("eval_samples") or 0),
        digest=last.digest if last is not None else result.get("sample_digest"),
    )


def _evaluations(files: RunFiles, result: Mapping[str, Any]) -> tuple[Evaluation, ...]:
    found = [Evaluation(record.step, record.metrics, record.at) for record in files.records if record.metrics]
    last, metrics = int(result.get("steps") or 0), numbers(result.get("metrics"))
    if metrics and (not found or found[-1].step < last):
        found.append(Evaluation(last, metrics, files.attempts[-1].trained_at if files.attempts else None))
    return tuple(found)


def _checkpoints(files: RunFiles) -> tuple[int, ...]:
    """Return the steps after which a checkpoint was taken, from the records' spans and from resumes."""
    found = {r.step - 1 for r in files.records if r.spans.get("checkpoint", 0.0) > 0.0}
    found |= {r.step for r in files.records if (r.after or {}).get("checkpoint", 0.0) > 0.0}
    found |= {a.step for a in files.attempts if a.step is not None and a.after.get("checkpoint", 0.0) > 0.0}
    found |= {step for step in (files.saved_step, *(a.resumed_from for a in files.attempts)) if step}
    return tuple(sorted(found))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, str) or not isinstance(value, Iterable):
        return None if isinstance(value, float) and not math.isfinite(value) else value
    return [_plain(inner) for inner in value]
