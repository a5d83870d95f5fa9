"""Page on several runs: overlaid curves, the runs' differences, and their scaling with devices."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.jobs.differences import flat
from shoal.report.account import Account, number, numbers, section
from shoal.report.curves import BUCKETS, Chart, PlottedCurve, Reader, at_groups, buckets, metric_reader, thinned
from shoal.report.html import Table
from shoal.report.quantities import dollars, rate, seconds, share, short
from shoal.report.run_page import Part, ReportPage, layout_of
from shoal.runs.records import StepRecord

_BEYOND = 4  # the planner's curve is drawn up to this multiple of the largest run's devices
_LEAST_SHARE = 0.01  # smallest share of lost time that is listed


@dataclass(frozen=True)
class RunCurves:
    """A run, its name among the other runs, and its records."""

    name: str
    account: Account
    records: Sequence[StepRecord]


def named(runs: Sequence[tuple[Account, Sequence[StepRecord]]]) -> list[RunCurves]:
    """Return runs named by their directory, or by its path if two directories have the same name."""
    names = [account.name for account, _ in runs]
    return [
        RunCurves(account.path if names.count(account.name) > 1 else account.name, account, records)
        for account, records in runs
    ]


def several_page(runs: Sequence[RunCurves]) -> ReportPage:
    """Return the page on runs, in the given order."""
    names = list(dict.fromkeys(name for run in runs for record in run.records for name in record.metrics or {}))
    charts = [overlaid("loss", "Training loss", runs, lambda record: record.loss)]
    for place, name in enumerate(names[:8]):
        charts.append(overlaid(f"metric-{place}", f"Evaluation: {name}", runs, metric_reader(name)))
    drawn = [chart for chart in charts if chart is not None]
    why = ["Over samples, so that batches of any size compare."]
    why += [f"{run.name}: {run.account.blocks}, a point its mean." for run in runs if run.account.blocks]
    curves = Part("curves", "Curves", why, drawn) if drawn else None
    parts = [part for part in (_table(runs), curves, _differences(runs), _scaling(runs)) if part is not None]

    rates = {run.name: rate for run in runs if (rate := run.account.rates.step_samples)}
    summary = "Fewer than two of them have records of steps."
    if len(rates) >= 2:
        fast, slow = max(rates, key=lambda name: rates[name]), min(rates, key=lambda name: rates[name])
        ratio = f"{rates[fast] / rates[slow]:.3g}"
        summary = f"{fast} has the most samples a second in its steps: {ratio} times those of {slow}."
    facts = [(run.name, f"{run.account.status}; {run.account.limit}") for run in runs]
    return ReportPage(f"{len(runs)} runs", summary, facts, parts)


def _table(runs: Sequence[RunCurves]) -> Part:
    head = ["run", "layout", "steps", "loss", "evaluation", "time", "a step", "samples/s", "of the peak", "cost"]
    rows = []
    for run in runs:
        account = run.account
        last = account.evaluations[-1].metrics if account.evaluations else {}
        row = [run.name, layout_of(account, brief=True), f"{account.steps:,}", short(account.loss)]
        row.append(", ".join(f"{name} {short(value)}" for name, value in last.items()) or "-")
        row += [seconds(account.wall.seconds), seconds(account.step_times.median)]
        row.append(rate(account.rates.step_samples) if account.rates.step_samples else "-")
        rows.append([*row, share(account.rates.peak_share), dollars(account.cost.dollars) if account.cost else "-"])
    return Part("runs", "Side by side", tables=[("", Table(head, rows))])


def overlaid(key: str, title: str, runs: Sequence[RunCurves], read: Reader) -> Chart | None:
    """Return a chart with one curve per run over its trained samples, or None if no run has a value."""
    columns: list[dict[float, float | None]] = []
    rows: list[list[str]] = []
    sparse = []
    for run in runs:
        records = [record for record in run.records if read(record) is not None]
        groups = buckets(len(records), max(50, BUCKETS // len(runs)))
        values = thinned([read(record) for record in records], groups)
        xs = at_groups([record.samples for record in records], groups)
        columns.append(dict(zip(xs, values, strict=True)))
        sparse.append(len(records) <= len(run.records) // 4 + 1)
        for group in buckets(len(records), 10):
            record = records[group[-1]]
            rows.append([run.name, f"{record.samples:,}", short(read(record))])
    x = sorted({place for column in columns for place in column})
    if not x:
        return None
    curves = [
        PlottedCurve(run.name, [column.get(place) for place in x], dots)
        for run, column, dots in zip(runs, columns, sparse, strict=True)
    ]
    return Chart(key, title, x, curves, Table(["run", "samples", title.lower()], rows), x_name="samples")


def differing(accounts: Sequence[Account]) -> dict[str, list[Any]]:
    """Return what differs between runs: each run's value, or None, by name, of job, code, data, plan and versions."""
    of_runs: list[dict[str, Any]] = []
    for account in accounts:
        no_settings = ("versions", "lengths", "given", "config", "file_sha256", "data", "code")
        values = {name: value for name, value in flat(account.job) if name.partition(".")[0] not in no_settings}
        values |= {f"code.{name}": str(digest)[:8] for name, digest in flat(section(account.job, "code"))}
        for name, digests in section(account.job, "data").items():
            values[f"data.{name}"] = hashlib.sha256(str(digests).encode()).hexdigest()[:8]
        values |= {name: value for name, value in flat(account.plan) if not name.startswith("prediction.")}
        values |= {f"versions.{name}": str(value) for name, value in account.versions.items()}
        of_runs.append(values)
    rows: dict[str, list[Any]] = {}
    for name in dict.fromkeys(name for of_run in of_runs for name in of_run):
        of_name = [of_run.get(name) for of_run in of_runs]
        if any(value != of_name[0] for value in of_name):
            rows[name] = of_name
    return rows


def in_cells(rows: Mapping[str, Sequence[Any]]) -> list[list[str]]:
    """Return the rows of a table from values by name."""
    return [[name, *("-" if value is None else str(value) for value in values)] for name, values in rows.items()]


def _differences(runs: Sequence[RunCurves]) -> Part:
    rows = in_cells(differing([run.account for run in runs]))
    words = "Of all settings, code, data, plan and versions these differ."
    words = words if rows else "Job, code, data, plan and versions are the same."
    tables = [("", Table(["setting", *(run.name for run in runs)], rows))] if rows else []
    return Part("differences", "What differs", [words], tables=tables)


@dataclass(frozen=True)
class _Point:
    """A run as a point of the scaling chart: rates in samples per second, parts in device-seconds per sample.

    `curve`: the planner's rate of the fastest plan for the same batch, by number of devices.
    """

    name: str
    devices: int
    measured: float
    predicted: float | None
    parts: Mapping[str, float]
    curve: Mapping[int, float]


def _point(run: RunCurves) -> _Point | None:
    account = run.account
    batch = number(account.job.get("global_batch")) or (run.records[-1].num_samples if run.records else None)
    if not account.rates.step_samples or not batch:
        return None
    prediction = section(account.plan, "prediction") if not account.elsewhere else {}
    step, seconds_at = number(prediction.get("step_seconds")), numbers(prediction.get("curve"))
    predicted = batch / step if step else None
    curve = {int(n): batch / s for n, s in seconds_at.items() if n.isdecimal() and int(n) and s > 0.0}
    parts = {part.name: (part.measured or 0.0) * account.world_size / batch for part in account.parts}
    return _Point(run.name, account.world_size, account.rates.step_samples, predicted, parts, curve)


def _scaling(runs: Sequence[RunCurves]) -> Part | None:
    points = sorted((p for run in runs if (p := _point(run)) is not None), key=lambda point: point.devices)
    if len({point.devices for point in points}) < 2:
        return None
    first = points[0]
    planned = max((point.curve for point in points), key=len)
    near = {float(devices) for devices in planned if devices <= _BEYOND * points[-1].devices}
    x = sorted({float(point.devices) for point in points} | near)
    measured = {float(point.devices): point.measured for point in points}
    predicted = {float(point.devices): point.predicted for point in points}
    curves = [
        PlottedCurve("measured", [measured.get(place) for place in x], True),
        PlottedCurve("predicted for these plans", [predicted.get(place) for place in x], True),
        PlottedCurve("the planner's curve", [planned.get(int(place)) for place in x]),
        PlottedCurve("as many times as devices", [first.measured * place / first.devices for place in x]),
    ]
    head = ["run", "devices", "samples/s", "predicted", "efficiency", "what is lost, and to what"]
    table = Table(head, [_row(point, first) for point in points])
    drawn = [curve for curve in curves if any(value is not None for value in curve.values)]
    chart = Chart("scaling", "Samples a second", x, drawn, table, x_name="devices", log="xy")
    words = [f"Efficiency is against {first.name}; what is lost is told in shares of the devices' time."]
    tables = [("", table)]
    if planned:
        words.append("The planner's curve is what it took the fastest plan on each number of devices to do.")
        base = planned.get(first.devices)
        rows = [
            [str(n), rate(planned[n]), f"{planned[n] / base * first.devices / n:.0%}" if base else "-"]
            for n in sorted(planned)
        ]
        tables.append(("The planner's curve", Table(["devices", "samples/s", "efficiency"], rows)))
    return Part("scaling", "Scaling", words, [chart], tables=tables)


def _row(point: _Point, first: _Point) -> list[str]:
    efficiency = point.measured / first.measured * first.devices / point.devices
    whole = sum(point.parts.values()) or 1.0
    lost = {name: (value - first.parts.get(name, 0.0)) / whole for name, value in point.parts.items()}
    worst = sorted((item for item in lost.items() if item[1] >= _LEAST_SHARE), key=lambda item: -item[1])
    losses = ", ".join(f"{name} {value:.0%}" for name, value in worst) or "-"
    predicted = rate(point.predicted) if point.predicted else "-"
    return [point.name, str(point.devices), rate(point.measured), predicted, f"{efficiency:.0%}", losses]
