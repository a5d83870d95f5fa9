"""Sections of the page on one run: facts first, then curves, the step, ranks, time, memory, samples, settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from markupsafe import Markup

from shoal.errors import ShoalError
from shoal.jobs.differences import flat
from shoal.plans.plan import Plan, described, layout_name
from shoal.report.account import Account
from shoal.report.curves import Chart, time_chart, training_charts
from shoal.report.html import Table, beside, cells, falling
from shoal.report.quantities import change, dollars, rate, seconds, share, short, size, step_words
from shoal.report.waits import waits
from shoal.runs.records import StepRecord

_SPANS_MEAN = {
    "compute": "forward and backward",
    "communication": "sums that no computing hides, and waiting for other ranks",
    "optimizer": "the update",
    "data": "waiting for samples and copying them",
    "host": "all else in a step",
}
_MANY = 24  # longest table in rows that is not folded
_FACT_ROW = Markup("<tr><th>{}</th><td>{}</td></tr>")
_WALL_ROW = Markup("<tr><th>{0}</th><td>{1}</td><td>{2}</td><td>{3}</td></tr>")
_WALL_BAR = Markup('<svg width="240" height="12"><rect x="{0:.1f}" width="{1:.1f}" height="12" fill="#0072b2"/></svg>')
_NOTEBOOK = Markup("<p>{0}</p><table>{1}</table><table><caption>Wall clock</caption>{2}</table>")


@dataclass(frozen=True)
class BarTable:
    """Table with a bar for each row, in a separate column after the first."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    bars: Sequence[Markup]
    caption: str = ""


@dataclass(frozen=True)
class Part:
    """Section of a report."""

    key: str
    heading: str
    paragraphs: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    bars: BarTable | None = None
    tables: Sequence[tuple[str, Table]] = ()
    folded: bool = False


@dataclass(frozen=True)
class ReportPage:
    """Report: the facts of the first screen, and the sections."""

    title: str
    summary: str
    facts: Sequence[tuple[str, str]]
    parts: Sequence[Part] = field(default_factory=tuple)

    @property
    def charts(self) -> list[Chart]:
        """All charts, in order."""
        return [chart for part in self.parts for chart in part.charts]


def run_page(account: Account, records: Sequence[StepRecord]) -> ReportPage:
    """Return the page on a run."""
    charts = training_charts(account, records)
    marks = sorted({mark.kind for chart in charts[:1] for mark in chart.marks})
    how = f"Vertical lines: {', '.join(marks)}. Drag across a chart to zoom, double-click to go back."
    parts: list[Part | None] = [Part("training", "Loss and metrics", [how] if marks else [], charts)]
    if not charts:
        parts = [Part("training", "Training", ["No step was recorded."])]
    if account.incidents:
        rows = [[str(i.step) if i.step is not None else "-", i.kind, i.text, instant(i.at)] for i in account.incidents]
        table = Table(["step", "kind", "what", "when"], rows)
        parts.append(Part("incidents", "Incidents", tables=[("", table)], folded=len(rows) > _MANY))
    parts += [_step(account, records), _ranks(account, records), _wall(account), _volumes(account)]
    server = account.result.get("server")
    if isinstance(server, dict):
        pushes = [[name, str(value)] for name, value in flat(server) if name != "incidents"]
        words = "Staleness is the number of updates between a step's pull of the parameters and its own update."
        tables = [("Pushes", Table(["of the pushes", "value"], pushes))]
        parts.append(Part("server", "Parameter server", [words], tables=tables))
    parts += [_samples(account), _settings(account)]
    return ReportPage(account.name, account.limit, facts(account), [part for part in parts if part is not None])


def layout_of(account: Account, *, brief: bool = False) -> str:
    """Return the layout in words or as a brief name, or as in its file if this version cannot read the plan."""
    try:
        return (layout_name if brief else described)(Plan.from_mapping(dict(account.plan), source=account.name))
    except (ShoalError, ValueError, TypeError):
        return str(account.plan.get("layout", "not known"))


def facts(account: Account) -> list[tuple[str, str]]:
    """Return names and texts of the first screen: job, devices, end, time, rates and cost."""
    job, rates = account.job, account.rates
    parameters, dataset = job.get("parameters"), account.samples.dataset
    data = f"{dataset:,} samples" if dataset else "a stream"
    model = f"; {parameters:,} parameters" if isinstance(parameters, int) else ""
    trained = f"{job.get('file', '?')}:{job.get('function', '?')}{model}, {data}"
    of = f" of {account.num_steps:,}" if account.num_steps else ""
    devices = account.device or "devices not told"
    ranks = f"{account.world_size} process{'es' if account.world_size != 1 else ''} on {devices}"
    losses = [f"{short(account.loss)} in training"] if account.loss is not None else []
    if account.evaluations:
        last = account.evaluations[-1]
        values = ", ".join(f"{name} {short(value)}" for name, value in last.metrics.items())
        losses.append(f"evaluation after step {last.step:,}: {values}")
    idle, ettr, peak, cost = account.wall.of("idle"), account.wall.ettr, "", ""
    between = f", {seconds(idle)} of it between calls" if idle > 0.0 else ""
    if rates.peak_share is not None:
        predicted = f"; {share(rates.predicted_peak_share)} were predicted" if rates.predicted_peak_share else ""
        peak = f"{share(rates.peak_share)} in steps, {share(rates.overall_peak_share)} over the whole time{predicted}"
    if account.cost is not None:
        devices = f"{account.cost.devices} device{'s' if account.cost.devices != 1 else ''}"
        cost = f"{dollars(account.cost.dollars)}: {devices} at {dollars(account.cost.per_device_hour)} an hour"
    effective = f"{share(ettr)} of the training's time brought steps that are in the result" if ettr is not None else ""
    median = "median" if account.blocks is None else "median, an estimate from means of blocks"
    compiled = account.result.get("compile_seconds")
    rows = [
        ("trained", trained),
        ("on", f"{ranks}; {layout_of(account)}"),
        ("step", step_words(account.result)),
        ("ended", f"{account.status} after step {account.steps:,}{of}: {account.ending}"),
        ("loss", "; ".join(losses)),
        ("time", f"{seconds(account.wall.seconds)}{between}; a step {seconds(account.step_times.median)} ({median})"),
        ("compiled", f"{seconds(compiled)} in torch's compiler" if compiled else ""),
        ("records", f"{account.blocks}; times by part, samples and bytes are exact sums" if account.blocks else ""),
        ("rate", _rate(rates.step_samples, rates.overall_samples, "samples")),
        ("tokens", _rate(rates.step_tokens, rates.overall_tokens, "tokens")),
        ("of the peak", peak),
        ("cost", cost),
        ("effective", effective),
    ]
    return [(name, text) for name, text in rows if text]


def _rate(step: float | None, overall: float | None, unit: str) -> str:
    if step is None or overall is None:
        return ""
    return f"{rate(step)} {unit}/s in steps, {rate(overall)} over the whole time"


def instant(at: float | None) -> str:
    """Return an instant in UTC as text."""
    try:
        return "-" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):  # outside the calendar's range
        return "-"


def _step(account: Account, records: Sequence[StepRecord]) -> Part | None:
    if not account.step_times.count:
        return None
    parts, words = account.parts, []
    checkpoint = account.step_times.spans.get("checkpoint", 0.0)
    pairs = [(part.predicted, part.measured) for part in parts]
    rows = [
        [p.name, _ms(p.predicted), _ms(p.measured), change(p.predicted, p.measured), _SPANS_MEAN.get(p.name, "")]
        for p in parts
    ]
    head = ["part", "predicted", "measured", "difference", "what it is"]
    if any(part.predicted is not None for part in parts):
        whole = account.step_seconds
        against = change(whole.predicted, whole.measured)
        words.append(f"A step takes {_ms(whole.measured)}; {_ms(whole.predicted)} were predicted ({against}).")
        words.append("Of each part the outlined bar is predicted, the full one measured: medians of rank 0.")
    else:
        words.append("The plan has no prediction: run a plan of shoal plan to see one beside these medians of rank 0.")
    if account.elsewhere:
        words.append("The plan is for devices of another kind than it ran on.")
    if checkpoint > 0.0:
        words.append(f"Checkpoints add {_ms(checkpoint)} to the mean step.")
    words += account.routing
    terms = [[name, _ms(value)] for name, value in account.predicted_terms.items()]
    tables = [("Terms of the prediction", Table(["term", "predicted"], terms))] if terms else []
    chart = time_chart(account, records)
    bars = BarTable(head, rows, beside(pairs), "One step, part by part") if rows else None
    return Part("step", "Where a step's time goes", words, [chart] if chart else [], bars, tables)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value * 1e3:.4g} ms"


def _ranks(account: Account, records: Sequence[StepRecord]) -> Part | None:
    waited = waits(records, account.world_size)
    if waited is None:
        return None
    most = max((value for row in waited.of_rank.values() for value in row), default=0.0)
    extremes = {one.name: one for one in account.ranks}
    slowest = extremes["busy_seconds"].share_of_steps if "busy_seconds" in extremes else {}
    rows, bars = [], []
    for rank, values in waited.of_rank.items():
        rows.append([f"rank {rank}", share(waited.mean(rank)), share(max(values)), share(slowest.get(rank, 0.0))])
        bars.append(cells(values, most))
    fullest = f"steps from left to right, the fullest colour is {share(most)} of the time."
    tables = []
    if waited.pairs:
        ranks = [rank for rank in waited.of_rank if rank in waited.pairs]
        pairs = [
            [f"rank {rank}", *(share(waited.pairs[rank].get(other, 0.0)) if rank != other else "-" for other in ranks)]
            for rank in ranks
        ]
        tables.append(("Row waited for column", Table(["waited", *(f"for rank {rank}" for rank in ranks)], pairs)))
        words = [f"How long the other ranks waited for each, their mean; {fullest}"]
    else:
        words = [
            f"How long the fastest rank waited for the slowest one, at the slowest one's row; {fullest}",
            "These records have the extremes of each step: two slow ranks in one step show as one.",
        ]
    if waited.others:
        words.append(f"{waited.others} more ranks were waited for less.")
    spans = []
    for one in account.ranks:
        quantity = size if one.name.endswith("_bytes") else _ms
        spans.append([one.name, quantity(one.least), quantity(one.most), f"rank {one.rank_of_most}"])
    head = ["quantity", "least, mean", "most, mean", "most often at the most"]
    tables.append(("Extremes over ranks", Table(head, spans)))
    bar_table = BarTable(["rank", "waited for, mean", "at most", "slowest in"], rows, bars)
    return Part("ranks", "Who waits for whom", words, bars=bar_table, tables=tables)


def _wall(account: Account) -> Part:
    parts = [part for part in account.wall.parts if part.seconds > 0.0]
    rows = [[part.name.replace("_", " "), seconds(part.seconds), share(part.share), part.meaning] for part in parts]
    total = sum(part.share for part in parts)
    began = f", from {instant(account.wall.began_at)} to {instant(account.wall.until)}" if account.wall.began_at else ""
    words = [f"{seconds(account.wall.seconds)}{began}. The parts sum to {share(total)}; times of steps are rank 0's."]
    bars = BarTable(["part", "seconds", "share", "what it is"], rows, falling([part.seconds for part in parts]))
    phases = [
        [f"{number + 1}", name, seconds(value)]
        for number, start in enumerate(account.start_ups)
        for name, value in start.items()
    ]
    tables = [("Start-up by phase", Table(["start", "phase", "seconds"], phases))] if phases else []
    return Part("wall", "The whole wall clock", words, bars=bars, tables=tables)


def _volumes(account: Account) -> Part | None:
    if not account.memory and not account.traffic and account.peak_bytes.measured is None:
        return None
    words = ["One step of this run, on the rank that has the most; predictions are outlined."]
    if account.peak_bytes.measured is not None:
        predicted = f"; {size(account.peak_bytes.predicted)} were predicted" if account.peak_bytes.predicted else ""
        words.append(f"The fullest rank's peak is {size(account.peak_bytes.measured)}{predicted}.")
    rows = [
        [m.name, size(m.predicted), size(m.measured), change(m.predicted, m.measured), f"rank {m.rank}"]
        for m in account.memory
    ]
    pairs = [(float(m.predicted) if m.predicted is not None else None, float(m.measured or 0)) for m in account.memory]
    head = ["memory", "predicted", "measured", "difference", "on"]
    bars = BarTable(head, rows, beside(pairs, falls=False), "Memory by category") if rows else None
    sent = []
    for t in account.traffic:
        volumes = short(t.predicted_messages), short(t.messages), size(t.predicted_bytes), size(t.bytes)
        sent.append([f"{t.collective} over {t.group}", *volumes, f"rank {t.rank}"])
    names = ["collective", "messages predicted", "measured", "bytes predicted", "measured", "on"]
    tables = [("Traffic by collective", Table(names, sent))] if sent else []
    return Part("volumes", "Memory and traffic", words, bars=bars, tables=tables)


def _samples(account: Account) -> Part:
    samples = account.samples
    rows = [
        ["trained on", f"{samples.trained:,}"],
        ["in the dataset", f"{samples.dataset:,}" if samples.dataset else "a stream"],
        ["passes over it", short(samples.passes)],
        ["of steps that were trained again", f"{samples.trained_again:,}"],
        ["of steps without an update", f"{samples.not_applied:,}"],
        ["in the last evaluation", f"{samples.evaluated:,}"],
        ["digest of all sample ids, in order", str(samples.digest or "-")],
    ]
    words = "The digest is over the ids of all samples in their order: runs with equal digests had the same samples."
    return Part("samples", "Account of samples", [words], tables=[("", Table(["samples", "number"], rows))])


def _settings(account: Account) -> Part:
    job = [[name, str(value)] for name, value in flat(account.job) if not name.startswith(("versions", "code"))]
    plan = [[name, str(value)] for name, value in flat(account.plan) if not name.startswith("prediction")]
    versions = [[name, str(value)] for name, value in account.versions.items()]
    tables = [
        ("Versions", Table(["of", "version"], versions)),
        ("Plan", Table(["setting", "value"], plan)),
        ("Job", Table(["setting", "value"], job)),
    ]
    return Part("settings", "Versions and settings", tables=[t for t in tables if t[1].rows], folded=True)


def notebook_view(account: Account) -> Markup:
    """Return a run's facts, and the parts of its wall clock as bars: escaped HTML without scripts or styles."""
    rows = Markup("").join(_FACT_ROW.format(name, text) for name, text in facts(account))
    done, bars = 0.0, list[Markup]()
    for part in account.wall.parts:
        if part.seconds > 0.0:
            bar = _WALL_BAR.format(240 * done, max(1.0, 240 * part.share))
            bars.append(_WALL_ROW.format(part.name.replace("_", " "), bar, seconds(part.seconds), share(part.share)))
        done += part.share
    return _NOTEBOOK.format(account.limit, rows, Markup("").join(bars))
