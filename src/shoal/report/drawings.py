"""SVG bars for the cells of tables that contain the same numbers; widths are shares of the page's width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

_RECT = Markup('<rect class="{0}" x="{1:.2f}%" y="{2}" width="{3:.2f}%" height="{4}"/>')
_CELL = Markup('<rect class="c1" x="{0:.2f}%" width="{1:.2f}%" height="18" fill-opacity="{2:.2f}"/>')
_SVG = Markup('<svg class="bar" height="{0}" aria-hidden="true" focusable="false">{1}</svg>')
_LEAST = 0.2  # per cent of the width, so that small values remain visible
NUM_COLOURS = 8


@dataclass(frozen=True)
class Stretch:
    """Part of a bar from `begin` on, as shares of the whole width; `kind` is its class in the style sheet."""

    kind: str
    begin: float
    share: float


def colour(place: int) -> str:
    """Return the colour class of a part by its index."""
    return f"c{place % NUM_COLOURS + 1}"


def bar(*lines: Stretch) -> Markup:
    """Draw parts below each other."""
    parts = (
        _RECT.format(line.kind, 100 * line.begin, 12 * place, max(_LEAST, 100 * line.share), 10)
        for place, line in enumerate(lines)
        if line.share > 0.0
    )
    return _SVG.format(max(10, 12 * len(lines) - 2), Markup("").join(parts))


def cells(values: Sequence[float], most: float) -> Markup:
    """Draw values from 0 to `most` side by side, with stronger colour for larger values."""
    wide = 100.0 / max(1, len(values))
    parts = (
        _CELL.format(place * wide, wide, max(0.05, value / most))
        for place, value in enumerate(values)
        if most > 0.0 and value > 0.01 * most
    )
    return _SVG.format(18, Markup("").join(parts))


def falling(sizes: Sequence[float]) -> list[Markup]:
    """Draw a bar for each part of a whole, each starting at the end of the previous one."""
    whole, done, found = sum(sizes) or 1.0, 0.0, list[Markup]()
    for place, size in enumerate(sizes):
        found.append(bar(Stretch(colour(place), done / whole, size / whole)))
        done += size
    return found


def beside(pairs: Sequence[tuple[float | None, float | None]], *, falls: bool = True) -> list[Markup]:
    """Draw predicted (outlined) and measured bars for each part.

    `falls`: whether each bar starts at the end of the previous one of its kind.
    """
    sums = [sum(pair[number] or 0.0 for pair in pairs) for number in (0, 1)]
    whole = (max(sums) if falls else max((v or 0.0 for pair in pairs for v in pair), default=0.0)) or 1.0
    done, found = [0.0, 0.0], list[Markup]()
    for place, pair in enumerate(pairs):
        lines = []
        for number, kind in enumerate(("predicted", colour(place))):
            value = pair[number] or 0.0
            lines.append(Stretch(kind, done[number] / whole, value / whole))
            done[number] += value if falls else 0.0
        found.append(bar(*lines))
    return found
