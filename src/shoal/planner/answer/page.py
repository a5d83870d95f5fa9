"""HTML page of a `shoal plan` result."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from shoal.planner.answer import words
from shoal.planner.answer.answer import Answer
from shoal.plans.toml import write as plan_text
from shoal.plans.words import described
from shoal.report.html import Page, Section, Table, render
from shoal.report.svg import Bar, Series, Spot, chart, waterfall


def page(answer: Answer) -> str:
    """The page as HTML."""
    case, chosen = answer.question.case, answer.chosen
    lead = [
        f"Chosen: {described(chosen.plan)} on {chosen.devices} of {words.several(case.cluster.num_devices, 'device')}, "
        f"{words.seconds(chosen.seconds)} a step. {words.verdict(answer)}",
        f"{case.work.profile.num_parameters:,} parameters; {case.work.global_batch} samples a step. "
        f"{words.summary(answer)}.",
        *case.cluster.notes,
        *case.work.profile.notes,
    ]
    parts = [
        Section("The best", table=Table(words.BEST_HEAD, words.best_rows(answer))),
        _portions("A step", "Seconds of a step by term", ["term", "time"], words.terms(answer)),
        _portions(
            "Memory of the fullest device",
            "Bytes of the fullest device by category",
            ["category", "bytes"],
            words.memory(answer),
        ),
        Section(
            "By number of devices",
            [words.verdict(answer), *words.hints(answer), "Dashed: throughput growing as the devices."],
            drawing=_curve(answer),
            table=Table(words.CURVE_HEAD, words.curve_rows(answer)),
        ),
        Section("What would change it", table=Table(["change", "step", "effect"], words.change_rows(answer))),
    ]
    failures = words.goodput_lines(answer)
    if failures:
        parts.append(Section("Failures", failures))
    rejected = Table(["layout", "reason"], words.rejected_rows(answer))
    parts += [Section("Why not", table=rejected, folded=True), Section("The plan", code=plan_text(answer.plan))]
    return render(Page(f"Plan of {answer.job} on {case.cluster.name}", lead, parts))


def _portions(title: str, drawn: str, head: list[str], portions: Sequence[words.Portion]) -> Section:
    bars = [Bar(portion.name, portion.share, portion.amount) for portion in portions]
    table = Table([*head, "share", "what it is"], [portion.row for portion in portions])
    return Section(title, drawing=waterfall(drawn, bars), table=table)


def _curve(answer: Answer) -> Markup:
    batch, chosen = answer.question.case.work.global_batch, answer.chosen.devices
    spots = [
        Spot(
            point.devices,
            batch / point.best.seconds,
            f"{words.several(point.devices, 'device')}: {words.seconds(point.best.seconds)} a step, "
            f"{described(point.best.plan)}",
            point.devices == chosen,
        )
        for point in answer.curve.points
        if point.best is not None
    ]
    series = Series("", spots)
    return chart("Samples a second by devices", [series], ("devices", "samples a second"), ideal=True)
