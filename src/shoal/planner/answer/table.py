"""Terminal output of a `shoal plan` result."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from shoal.planner.answer import words
from shoal.planner.answer.answer import Answer

_BAR = 30
_NUM_REJECTED = 8


def show(answer: Answer, console: Console) -> None:
    """Prints everything that there is to say."""
    case = answer.question.case
    console.print(
        f"{answer.job} on {case.cluster.name}: {case.work.profile.num_parameters:,} parameters, "
        f"{case.work.profile.flops(case.work.global_batch):.3g} FLOPs a step of {case.work.global_batch} samples",
        highlight=False,
    )
    for note in (*case.cluster.notes, *case.work.profile.notes):
        console.print(f"note: {note}", highlight=False, markup=False)
    if answer.question.correction:
        console.print(words.correction(answer), highlight=False)
    console.print(words.summary(answer), highlight=False)
    _table(console, "The best", words.BEST_HEAD, words.best_rows(answer), right={0, 3, 4, 5, 6, 7, 8})
    _bars(console, "A step of the first", words.terms(answer))
    _bars(console, "Memory of its fullest device", words.memory(answer))
    _table(console, "By number of devices", words.CURVE_HEAD, words.curve_rows(answer), right={0, 1, 2, 3})
    for line in (words.verdict(answer), *words.hints(answer)):
        console.print(line, highlight=False, markup=False)
    _table(console, "What would change it", ["change", "step", "effect"], words.change_rows(answer), right={1})
    lines = words.goodput_lines(answer)
    if lines:
        console.print("\n[bold]Failures[/bold]")
    for line in lines:
        console.print(line, highlight=False, markup=False)
    _table(console, "Why not", ["layout", "reason"], words.rejected_rows(answer, _NUM_REJECTED), right=set())
    more = len(answer.choice.rejected) - _NUM_REJECTED
    if more > 0:
        console.print(f"... and {more} more: --html FILE has them all", highlight=False, markup=False)


def _table(console: Console, title: str, head: list[str], rows: words.Rows, right: set[int]) -> None:
    if not rows:
        return
    console.print(f"\n[bold]{title}[/bold]")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for place, name in enumerate(head):
        table.add_column(name, justify="right" if place in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table, highlight=False)


def _bars(console: Console, title: str, portions: Sequence[words.Portion]) -> None:
    """A waterfall: each bar begins where the one before it ends."""
    console.print(f"\n[bold]{title}[/bold]")
    table = Table(box=None, pad_edge=False, show_header=False)
    for justify in ("left", "right", "right", "left", "left"):
        table.add_column(justify=justify)
    done = 0.0
    for portion in portions:
        start, end = min(round(done * _BAR), _BAR - 1), round((done + portion.share) * _BAR)
        done += portion.share
        bar = " " * start + "█" * max(1, end - start)
        *told, meaning = portion.row
        table.add_row(*told, bar.ljust(_BAR), f"[dim]{meaning}[/dim]")
    console.print(table, highlight=False)
