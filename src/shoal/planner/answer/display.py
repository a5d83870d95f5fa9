"""Terminal output and HTML page of a `shoal plan` result, and the result as programs get it."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

import rich.table
from markupsafe import Markup
from rich.console import Console
from rich.text import Text

from shoal.planner.answer import words
from shoal.planner.answer.answer import SearchResult
from shoal.plans.plan import described, plan_text
from shoal.report.html import Bar, Page, Section, Series, Spot, Table, chart, render, waterfall
from shoal.report.quantities import seconds
from shoal.runs.directory import write_file

_BAR, _SHORT_BAR, _WIDE = 30, 16, 110  # the longer bar from `_WIDE` columns on
_NUM_REJECTED = 8
WIDTH = 80  # columns of output that does not go to a terminal


def console_of_width() -> Console:
    """Return a console of the terminal's width, or of 80 columns without a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def show(answer: SearchResult, console: Console) -> None:
    """Print the whole result in the console's width, the chosen plan first."""
    case = answer.question.case
    console.print(
        f"{answer.job} on {case.cluster.name}: {case.work.profile.num_parameters:,} parameters, "
        f"{case.work.profile.flops(case.work.global_batch):.3g} FLOPs a step of {case.work.global_batch} samples",
        highlight=False,
        markup=False,
    )
    _lines(console, words.grains(answer))
    console.print()
    table = rich.table.Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in words.key_rows(answer):
        table.add_row(name, Text(value))
    console.print(table, highlight=False)
    _table(console, _best(answer), words.BEST_HEAD, words.best_rows(answer), right=set(range(2, 7)))
    corrected = [words.correction(answer)] if case.correction else []
    notes = [f"note: {note}" for note in (*case.cluster.notes, *case.work.profile.notes)]
    _lines(console, [words.summary(answer), *corrected, *notes])
    _bars(console, "A step of the first", words.terms(answer))
    _bars(console, "Memory of its fullest device", words.memory(answer))
    _table(console, "By number of devices", words.CURVE_HEAD, words.curve_rows(answer), right={0, 1, 2, 3})
    _lines(console, [words.verdict(answer)])
    _table(console, "What would change it", ["change", "step", "effect"], words.change_rows(answer), right={1})
    lines = words.goodput_lines(answer)
    if lines:
        console.print("\n[bold]Failures[/bold]")
    _lines(console, lines)
    _table(console, "Why not", ["layout", "reason"], words.rejected_rows(answer, _NUM_REJECTED), right=set())
    more = len(answer.choice.rejected) - _NUM_REJECTED
    if more > 0:
        _lines(console, [f"... and {more} more: --html FILE has them all"])


def _best(answer: SearchResult) -> str:
    return f"The best on {words.several(answer.chosen.devices, 'device')}"


def _lines(console: Console, lines: Sequence[str]) -> None:
    for line in lines:
        console.print(line, highlight=False, markup=False)


def _table(console: Console, title: str, head: list[str], rows: words.Rows, right: set[int]) -> None:
    if not rows:
        return
    console.print(f"\n[bold]{title}[/bold]")
    table = rich.table.Table(box=None, pad_edge=False, header_style="dim")
    for place, name in enumerate(head):
        # Columns of numbers do not wrap if they fit; columns of words do.
        least = max(len(row[place]) for row in rows) if place in right else None
        table.add_column(name, justify="right" if place in right else "left", overflow="fold", min_width=least)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table, highlight=False)


def _bars(console: Console, title: str, portions: Sequence[words.Portion]) -> None:
    """Print a waterfall: each bar starts at the end of the previous one."""
    console.print(f"\n[bold]{title}[/bold]")
    table = rich.table.Table(box=None, pad_edge=False, show_header=False)
    for justify in ("left", "right", "right", "left", "left"):
        table.add_column(justify=justify)
    done, length = 0.0, _BAR if console.width >= _WIDE else _SHORT_BAR
    for portion in portions:
        start, end = min(round(done * length), length - 1), round((done + portion.share) * length)
        done += portion.share
        bar = " " * start + "█" * max(1, end - start)
        *figures, meaning = portion.row
        table.add_row(*figures, bar.ljust(length), f"[dim]{meaning}[/dim]")
    console.print(table, highlight=False)


def text(answer: SearchResult, width: int = WIDTH) -> str:
    """Return the text that `show` prints, without colours."""
    file = io.StringIO()
    console = Console(width=width, file=file, color_system=None, force_terminal=False, force_jupyter=False)
    show(answer, console)
    return file.getvalue()


def fragment(answer: SearchResult) -> str:
    """Return an HTML summary for a notebook cell: the key figures, the best plans, and the verdict."""
    rows = [Markup("<tr><th>{}</th><td>{}</td></tr>").format(*row) for row in words.key_rows(answer)]
    head = Markup("").join(Markup("<th>{}</th>").format(name) for name in words.BEST_HEAD)
    best = [
        Markup("<tr>{}</tr>").format(Markup("").join(Markup("<td>{}</td>").format(cell) for cell in row))
        for row in words.best_rows(answer)
    ]
    title = f"{answer.job} on {answer.question.case.cluster.name}"
    return str(
        Markup("<div><p><b>{}</b></p><table>{}</table><p>{}</p><table><tr>{}</tr>{}</table><p>{}</p></div>").format(
            title, Markup("").join(rows), _best(answer), head, Markup("").join(best), words.verdict(answer)
        )
    )


def page(answer: SearchResult) -> str:
    """Return the result as an HTML page."""
    case, chosen = answer.question.case, answer.chosen
    lead = [
        *words.grains(answer),
        f"Chosen: {described(chosen.plan)} on {chosen.devices} of {words.several(case.cluster.num_devices, 'device')}, "
        f"{seconds(chosen.seconds)} a step. {words.verdict(answer)}",
        f"{case.work.profile.num_parameters:,} parameters; {case.work.global_batch} samples a step. "
        f"{words.summary(answer)}.",
        *case.cluster.notes,
        *case.work.profile.notes,
    ]
    spots = [
        Spot(
            point.devices,
            case.work.global_batch / point.best.seconds,
            f"{words.several(point.devices, 'device')}: {seconds(point.best.seconds)} a step, "
            f"{described(point.best.plan)}",
            point.devices == chosen.devices,
        )
        for point in answer.curve.points
        if point.best is not None
    ]
    series = Series("", spots)
    parts = [
        Section("In short", table=Table(["", ""], words.key_rows(answer))),
        Section(_best(answer), table=Table(words.BEST_HEAD, words.best_rows(answer))),
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
            drawing=chart("Samples a second by devices", [series], ("devices", "samples a second"), ideal=True),
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


@dataclass(frozen=True, repr=False)
class Answer(SearchResult):
    """Result of a search with its outlook; prints like `shoal plan`, and shows tables in a notebook."""

    @classmethod
    def of(cls, found: SearchResult) -> Self:
        """Return the same result as an `Answer`."""
        return cls(**{field.name: getattr(found, field.name) for field in fields(found)})

    def write_html(self, path: str | os.PathLike[str]) -> Path:
        """Write a page with the curve, the waterfalls and every reason, and return the file's path."""
        write_file(Path(path), page(self))
        return Path(path)

    def __str__(self) -> str:
        return text(self)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return fragment(self)
