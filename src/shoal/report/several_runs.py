"""Page on several runs: overlaid curves, the runs' differences, and their scaling with devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shoal.report.account import Account
from shoal.report.curves import BUCKETS, Chart, PlottedCurve, buckets, thinned
from shoal.report.html import Table
from shoal.report.json_values import number, numbers, section
from shoal.report.quantities import dollars, rate, seconds, share, short
from shoal.report.run_page import Part, ReportPage, flat, layout_of
from shoal.runs.records import StepRecord

_BEYOND = 4  # the planner's curve is drawn up to this multiple of the largest run's devices
_LEAST_SHARE = 0.01  # smallest share of lost time that is listed


@dataclass(frozen=True)
class RunCurves:
    """A run, its name among the other runs, and its records."""

    name: str
    account: Account
    records: Sequence[StepRecord]


def named(found: Sequence[tuple[Account, Sequence[StepRecord]]]) -> list[RunCurves]:
    """Return runs named by their directory, or by its path if two directories have the same name."""
    names = [account.name for account, _ in found]
    return [
        RunCurves(account.path if names.count(account.name) > 1 else account.name, account, records)
        for account, records in found
    ]


def several_page(runs: Sequence[RunCurves]) -> ReportPage:
    """Return the page on runs, in the given order."""
    parts = [_table(runs), _curves(runs), _differences(runs), _scaling(runs)]
    title = f"{len(runs)} runs"
    return ReportPage(title, _summary(runs), _facts(runs), [part for part in parts if part is not None])


def _summary(runs: Sequence[RunCurves]) -> str:
    rates = {run.name: run.account.rates.step_samples for run in runs}
    known = {name: value for name, value in rates.items() if value}
    if len(known) < 2:
        return "Fewer than two of them have records of steps."
    fast, slow = max(known, key=lambda name: known[name]), min(known, key=lambda name: known[name])
    return f"{fast} has the most samples a second in its steps: {known[fast] / known[slow]:.3g} times those of {slow}."


def _facts(runs: Sequence[RunCurves]) -> list[tuple[str, str]]:
    return [(run.name, f"{run.account.status}; {run.account.limit}") for run in runs]


def _table(runs: Sequence[RunCurves]) -> Part:
    head = ["run", "layout", "steps", "loss", "evaluation", "time", "a step", "samples/s", "of the peak", "cost"]
    rows = []
    for run in runs:
        found = run.account
        last = found.evaluations[-1].metrics if found.evaluations else {}
        rows.append(
            [
                run.name,
                layout_of(found),
                f"{found.steps:,}",
                short(found.loss),
                ", ".join(f"{name} {short(value)}" for name, value in last.items()) or "-",
                seconds(found.wall.seconds),
                seconds(found.step_times.median),
                rate(found.rates.step_samples) if found.rates.step_samples else "-",
                share(found.rates.peak_share),
                dollars(found.cost.dollars) if found.cost else "-",
            ]
        )
    return Part("runs", "Side by side", tables=[("", Table(head, rows))])


def _curves(runs: Sequence[RunCurves]) -> Part | None:
    names = list(dict.fromkeys(n for run in runs for r in run.records for n in r.metrics or {}))
    charts = [overlaid("loss", "Training loss", runs, lambda record: record.loss)]
    for place, name in enumerate(names[:8]):
        charts.append(overlaid(f"metric-{place}", f"Evaluation: {name}", runs, _metric(name)))
    known = [chart for chart in charts if chart is not None]
    return Part("curves", "Curves", ["Over samples, so that batches of any size compare."], known) if known else None


def _metric(name: str) -> Callable[[StepRecord], float | None]:
    return lambda record: (record.metrics or {}).get(name)


def overlaid(
    key: str, title: str, runs: Sequence[RunCurves], read: Callable[[StepRecord], float | None]
) -> Chart | None:
    """Return a chart with one curve per run over its trained samples, or None if no run has a value."""
    columns: list[dict[float, float | None]] = []
    rows: list[list[str]] = []
    sparse = []
    for run in runs:
        told = [record for record in run.records if read(record) is not None]
        groups = buckets(len(told), max(50, BUCKETS // len(runs)))
        values = thinned([read(record) for record in told], groups)
        xs: list[float] = []
        for group in groups:
            first, last = told[group[0]].samples, told[group[-1]].samples
            xs += [first] if len(group) == 1 else [first, (first + last) / 2]
        columns.append(dict(zip(xs, values, strict=True)))
        sparse.append(len(told) <= len(run.records) // 4 + 1)
        for group in buckets(len(told), 10):
            record = told[group[-1]]
            rows.append([run.name, f"{record.samples:,}", short(read(record))])
    x = sorted({place for column in columns for place in column})
    if not x:
        return None
    curves = [
        PlottedCurve(run.name, [column.get(place) for place in x], dots)
        for run, column, dots in zip(runs, columns, sparse, strict=True)
    ]
    return Chart(key, title, x, curves, Table(["run", "samples", title.lower()], rows), x_name="samples")


def _differences(runs: Sequence[RunCurves]) -> Part:
    of = [_settings(run.account) for run in runs]
    names = list(dict.fromkeys(name for settings in of for name in settings))
    rows = []
    for name in names:
        values = [settings.get(name, "-") for settings in of]
        if len(set(values)) > 1:
            rows.append([name, *values])
    told = "Of all settings of job, plan and versions these differ." if rows else "Job, plan and versions are the same."
    tables = [("", Table(["setting", *(run.name for run in runs)], rows))] if rows else []
    return Part("differences", "What differs", [told], tables=tables)


def _settings(found: Account) -> dict[str, str]:
    job = {
        name: text for name, text in flat(found.job) if not name.startswith(("versions", "code", "lengths", "given"))
    }
    plan = {name: text for name, text in flat(found.plan) if not name.startswith("prediction.")}
    return job | plan | {f"versions.{name}": str(value) for name, value in found.versions.items()}


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
    found = run.account
    batch = number(found.job.get("global_batch")) or (run.records[-1].num_samples if run.records else None)
    if not found.rates.step_samples or not batch:
        return None
    told = section(found.plan, "prediction") if not found.elsewhere else {}
    step = number(told.get("step_seconds"))
    predicted = batch / step if step else None
    curve = {int(n): batch / s for n, s in numbers(told.get("curve")).items() if n.isdecimal() and int(n) and s > 0.0}
    parts = {part.name: (part.measured or 0.0) * found.world_size / batch for part in found.parts}
    return _Point(run.name, found.world_size, found.rates.step_samples, predicted, parts, curve)


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
    rows = [_row(point, first) for point in points]
    head = ["run", "devices", "samples/s", "predicted", "efficiency", "what is lost, and to what"]
    table = Table(head, rows)
    kept = [curve for curve in curves if any(value is not None for value in curve.values)]
    chart = Chart("scaling", "Samples a second", x, kept, table, x_name="devices", log="xy")
    told = [f"Efficiency is against {first.name}; what is lost is told in shares of the devices' time."]
    if planned:
        told.append("The planner's curve is what it took the fastest plan on each number of devices to do.")
    return Part("scaling", "Scaling", told, [chart], tables=[("", table), *_planned_table(planned, first)])


def _planned_table(planned: Mapping[int, float], first: _Point) -> list[tuple[str, Table]]:
    """Return the planner's curve, with its expected efficiency relative to the first run's number of devices."""
    base = planned.get(first.devices)
    rows = [
        [str(n), rate(planned[n]), f"{planned[n] / base * first.devices / n:.0%}" if base else "-"]
        for n in sorted(planned)
    ]
    return [("The planner's curve", Table(["devices", "samples/s", "efficiency"], rows))] if rows else []


def _row(point: _Point, first: _Point) -> list[str]:
    efficiency = point.measured / first.measured * first.devices / point.devices
    whole = sum(point.parts.values()) or 1.0
    lost = {name: (value - first.parts.get(name, 0.0)) / whole for name, value in point.parts.items()}
    worst = sorted((item for item in lost.items() if item[1] >= _LEAST_SHARE), key=lambda item: -item[1])
    told = ", ".join(f"{name} {value:.0%}" for name, value in worst) or "-"
    shown = [point.name, str(point.devices), rate(point.measured)]
    return [*shown, rate(point.predicted) if point.predicted else "-", f"{efficiency:.0%}", told]
