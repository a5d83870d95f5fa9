"""Curves of a run over its steps, thinned to the least and the greatest value in each bucket of steps."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.report.account import Account, recorded_blocks
from shoal.report.html import Table
from shoal.report.quantities import short
from shoal.runs.records import StepRecord

# Half of a chart's largest width in pixels, because a bucket shows two values.
BUCKETS = 600
_ROWS = 40  # rows of the table for a curve
_MOST_METRICS = 12

Reader = Callable[[StepRecord], float | None]


@dataclass(frozen=True)
class PlottedCurve:
    """A name and its values at a chart's x; None for missing ones. `dots`: draw each value, for sparse curves."""

    name: str
    values: Sequence[float | None]
    dots: bool = False


@dataclass(frozen=True)
class Mark:
    """Event at a step: a resume, an incident, a checkpoint."""

    step: float
    kind: str
    text: str


@dataclass(frozen=True)
class Chart:
    """Curves over one axis; `note` describes the thinning, `log` names the logarithmic axes."""

    key: str
    title: str
    x: Sequence[float]
    curves: Sequence[PlottedCurve]
    table: Table
    x_name: str = "step"
    y_name: str = ""
    marks: Sequence[Mark] = ()
    note: str = ""
    log: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the JSON value for the page's script, with five digits of each number."""
        return {
            "key": self.key,
            "title": self.title,
            "x": [_digits(x) for x in self.x],
            "xName": self.x_name,
            "yName": self.y_name,
            "log": self.log,
            "curves": [{"name": c.name, "dots": c.dots, "values": list(map(_digits, c.values))} for c in self.curves],
            "marks": [{"x": mark.step, "kind": mark.kind, "text": mark.text} for mark in self.marks],
        }


def _digits(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.5g}") if abs(value) < 1e5 else round(value)
    return int(rounded) if rounded == int(rounded) else rounded


def buckets(count: int, most: int = BUCKETS) -> list[range]:
    """Divide indices 0 .. count - 1 into at most `most` groups of neighbours; up to 2 `most` indices stay single."""
    number = count if count <= 2 * most else most
    edges = [count * place // number for place in range(number + 1)] if number else []
    return [range(low, high) for low, high in itertools.pairwise(edges)]


def thinned(values: Sequence[float | None], groups: Sequence[range]) -> list[float | None]:
    """Return two values for a group of several, its least and greatest in their order; one value for a single."""
    drawn: list[float | None] = []
    for group in groups:
        present = [(v, place) for place in group if (v := values[place]) is not None and math.isfinite(v)]
        if len(group) == 1:
            drawn.append(present[0][0] if present else None)
            continue
        ends = sorted((min(present), max(present)), key=lambda pair: pair[1]) if present else [(None, 0), (None, 0)]
        drawn += [value for value, _ in ends]
    return drawn


def at_groups(steps: Sequence[float], groups: Sequence[range]) -> list[float]:
    """Return the x of `thinned` values: a group's first step and its middle."""
    xs: list[float] = []
    for group in groups:
        xs.append(steps[group[0]])
        if len(group) > 1:
            xs.append((steps[group[0]] + steps[group[-1]]) / 2)
    return xs


def over_steps(
    key: str,
    title: str,
    records: Sequence[StepRecord],
    readers: Mapping[str, Reader],
    marks: Sequence[Mark] = (),
    **more: Any,
) -> Chart | None:
    """Return a chart with a curve for each reader, by name, of records; None if no curve has a value."""
    columns = {name: [read(record) for record in records] for name, read in readers.items()}
    columns = {name: column for name, column in columns.items() if any(v is not None for v in column)}
    if not columns:
        return None
    groups = buckets(len(records))
    steps = [float(record.step) for record in records]
    curves = []
    for name, column in columns.items():
        sparse = sum(value is not None for value in column) <= len(column) // 4 + 1
        curves.append(PlottedCurve(name, thinned(column, groups), sparse))
    each = -(-len(records) // max(1, len(groups)))
    blocks = recorded_blocks(records)
    note = f"Of each {each} {'records' if blocks else 'steps'} the least and the greatest value are drawn."
    note = " ".join([note] * (each > 1) + [f"{str(blocks).capitalize()}, a point its mean."] * (blocks is not None))
    table = _table(steps, list(columns), list(columns.values()))
    return Chart(key, title, at_groups(steps, groups), curves, table, marks=marks, note=note, **more)


def _table(steps: Sequence[float], names: Sequence[str], columns: Sequence[Sequence[float | None]]) -> Table:
    """Return at most 40 rows: the steps of each, and the least, mean and greatest value of each curve."""
    groups = buckets(len(steps), _ROWS)
    single = all(len(group) == 1 for group in groups)
    parts = ("",) if single else (", least", ", mean", ", greatest")
    rows = []
    for group in groups:
        first, last = steps[group[0]], steps[group[-1]]
        row = [f"{first:.0f}" if first == last else f"{first:.0f} to {last:.0f}"]
        for column in columns:
            present = [v for place in group if (v := column[place]) is not None and math.isfinite(v)]
            cells = (min(present), sum(present) / len(present), max(present)) if present else (None,) * 3
            row += [short(cells[1])] if single else [short(value) for value in cells]
        rows.append(row)
    return Table(["steps", *(f"{name}{part}" for name in names for part in parts)], rows)


def metric_reader(name: str) -> Reader:
    """Return a function that reads an evaluated metric from a record."""
    return lambda record: (record.metrics or {}).get(name)


def training_charts(account: Account, records: Sequence[StepRecord]) -> list[Chart]:
    """Return charts of loss, metrics, gradient norm and learning rate, with marks for the run's events."""
    marks = marks_of(account)
    names = list(dict.fromkeys(name for record in records for name in record.metrics or {}))
    extra: Mapping[str, float] = account.evaluations[-1].metrics if account.evaluations else {}
    names += [name for name in extra if name not in names]
    last = {record.step: record for record in records[-1:]}
    if account.evaluations and account.evaluations[-1].step in last and not records[-1].metrics:
        records = [*records[:-1], records[-1].evaluated(extra)]
    losses: dict[str, Reader] = {"training loss": lambda record: record.loss}
    if "loss" in names:
        losses["evaluation loss"] = metric_reader("loss")
    charts = [over_steps("loss", "Loss", records, losses, marks)]
    counts = Counter(name for record in records for name in record.metrics or {})
    for number, name in enumerate([name for name in names if name != "loss" and counts[name] > 1][:_MOST_METRICS]):
        charts.append(over_steps(f"metric-{number}", f"Metric: {name}", records, {name: metric_reader(name)}, marks))
    norm: dict[str, Reader] = {"gradient norm": lambda record: record.grad_norm}
    charts.append(over_steps("norm", "Gradient norm, before clipping", records, norm, marks))
    rate: dict[str, Reader] = {"learning rate": lambda record: record.learning_rate}
    charts.append(over_steps("rate", "Learning rate", records, rate, marks))
    return [chart for chart in charts if chart is not None]


def time_chart(account: Account, records: Sequence[StepRecord]) -> Chart | None:
    """Return a chart of the milliseconds of a step and of its largest spans."""

    def span(*names: str) -> Reader:
        return lambda record: 1e3 * sum(record.spans.get(name, 0.0) for name in names)

    readers: dict[str, Reader] = {
        "whole step": lambda record: 1e3 * record.seconds,
        "forward and backward": span("forward", "backward"),
        "exposed communication": span("exposed_communication"),
        "waiting for data": span("data_wait", "host_to_device"),
    }
    means = [record.per_step() for record in records]
    return over_steps("step-time", "Time of a step", means, readers, marks_of(account), y_name="ms")


def marks_of(account: Account) -> list[Mark]:
    """Return checkpoints, incidents and resumes at their steps; at most about 60 checkpoints, evenly spaced."""
    saved = account.checkpoints[:: 1 + len(account.checkpoints) // 60]
    marks = [Mark(step, "checkpoint", f"checkpoint after step {step}") for step in saved]
    marks += [Mark(i.step, i.kind, i.text) for i in account.incidents if i.step is not None]
    return marks
