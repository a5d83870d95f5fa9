"""HTML page of headings, paragraphs, tables and SVG charts: one self-contained file that prints well."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from math import ceil, floor, log2, log10

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

# A set that is safe for colour-blind readers (Okabe and Ito 2008).
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#F0E442")
_CHOSEN = "#D55E00"
_WIDTH, _ROW, _LABELS, _VALUES = 720, 24, 150, 130
_TOP, _BOTTOM = 36, 270
_RECT = Markup('<rect x="{0:.1f}" y="{1}" width="{2:.1f}" height="{3}" fill="{4}"/>')
_LINE = Markup('<polyline points="{0}" fill="none" stroke="{1}" stroke-width="{2}" stroke-dasharray="{3}"/>')
_SPOT = Markup('<g><title>{0}</title><circle cx="{1:.1f}" cy="{2:.1f}" r="{3}" fill="{4}"/></g>')
_TEXT = Markup('<text x="{0:.1f}" y="{1:.1f}" text-anchor="{2}">{3}</text>')
_TITLE = Markup('<title id="{0}">{1}</title>')
# Bars in the cells of tables; their widths are shares of the page's width.
_BAR_PART = Markup('<rect class="{0}" x="{1:.2f}%" y="{2}" width="{3:.2f}%" height="{4}"/>')
_CELL = Markup('<rect class="c1" x="{0:.2f}%" width="{1:.2f}%" height="18" fill-opacity="{2:.2f}"/>')
_SVG = Markup('<svg class="bar" height="{0}" aria-hidden="true" focusable="false">{1}</svg>')
_LEAST = 0.2  # per cent of the width, so that small values remain visible
_NUM_COLOURS = 8


@dataclass(frozen=True)
class Table:
    """Table of words; the first column names the row."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    """Section of a page under a heading; `drawing` shows the table's numbers. Long tables are `folded`."""

    heading: str
    paragraphs: Sequence[str] = ()
    drawing: Markup | None = None
    table: Table | None = None
    folded: bool = False
    code: str | None = None


@dataclass(frozen=True)
class Page:
    """HTML page with a title, lead paragraphs and sections."""

    title: str
    lead: Sequence[str]
    parts: Sequence[Section] = field(default_factory=tuple)


def render(page: Page) -> str:
    """Return the page as HTML that is also XML; everything but drawings is escaped."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    template = files("shoal.report").joinpath("page.html").read_text(encoding="utf-8")
    return environment.from_string(template).render(page=page)


@dataclass(frozen=True)
class Bar:
    """One bar of a waterfall chart: its name, its share of the whole, and its value in words."""

    name: str
    share: float
    value: str


@dataclass(frozen=True)
class Spot:
    """Point of a curve: x, y and a label; `marked` for the chosen point."""

    x: float
    y: float
    words: str = ""
    marked: bool = False


@dataclass(frozen=True)
class Series:
    """Curve of spots with a name; both coordinates are above zero."""

    name: str
    spots: Sequence[Spot]


def waterfall(title: str, bars: Sequence[Bar]) -> Markup:
    """Draw the parts of a whole, each starting at the end of the previous one."""
    room = _WIDTH - _LABELS - _VALUES
    parts: list[Markup] = []
    done = 0.0
    for place, bar in enumerate(bars):
        top = 4 + place * _ROW
        left, width = _LABELS + done * room, max(1.0, bar.share * room)
        done += bar.share
        middle = top + 15
        parts += [
            _text(_LABELS - 8, middle, bar.name, "end"),
            _RECT.format(left, top + 2, width, _ROW - 6, _COLOURS[place % len(_COLOURS)]),
            _text(_WIDTH - _VALUES + 8, middle, f"{bar.value} ({bar.share:.1%})"),
        ]
    return _picture(title, _ROW * len(bars) + 8, parts)


def chart(
    title: str,
    curves: Sequence[Series],
    axes: tuple[str, str],
    *,
    shown: Callable[[float], str] = "{:g}".format,
    ideal: bool = False,
) -> Markup:
    """Draw curves over logarithmic axes, with a label on each spot.

    `shown`: formats an x. `ideal`: whether to dash a line on which y grows in proportion to x.
    """
    spots = [spot for curve in curves for spot in curve.spots]
    if not spots:
        return Markup("")
    across = sorted({spot.x for spot in spots})
    dashed = [(x, spots[0].y * x / spots[0].x) for x in across] if ideal else []
    ys = [log10(y) for y in (*(spot.y for spot in spots), *(y for _, y in dashed))]
    low, wide, high = log2(across[0]), log2(across[-1] / across[0]) or 1.0, max(ys) - min(ys) or 1.0
    left, right = 60, _WIDTH - (200 if len(curves) > 1 else 60)

    def at(x: float, y: float) -> tuple[float, float]:
        over = (log2(x) - low) / wide * (right - left)
        return left + over, _BOTTOM - (log10(y) - min(ys)) / high * (_BOTTOM - _TOP)

    def line(points: Iterable[tuple[float, float]], colour: str, width: int = 1, dashes: str = "none") -> Markup:
        places = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y in points)
        return _LINE.format(places, colour, width, dashes)

    parts = [_text(left, 16, axes[1]), _text((left + right) / 2, _BOTTOM + 42, axes[0], "middle")]
    for x in across[:: 1 + len(across) // 9]:
        parts.append(_text(at(x, spots[0].y)[0], _BOTTOM + 22, shown(x), "middle"))
    for power in range(ceil(min(ys)), floor(max(ys)) + 1):
        height = at(across[0], 10.0**power)[1]
        parts.append(line([(across[0], 10.0**power), (across[-1], 10.0**power)], "#ddd"))
        parts.append(_text(left - 8, height + 4, f"{10.0**power:g}", "end"))
    if ideal:
        parts.append(line(dashed, "#777", dashes="5 4"))
    for number, curve in enumerate(curves):
        colour = _COLOURS[number % len(_COLOURS)]
        parts.append(line([(spot.x, spot.y) for spot in curve.spots], colour, 2))
        for spot in curve.spots:
            x, y = at(spot.x, spot.y)
            radius, fill = (7, _CHOSEN) if spot.marked else (4, colour)
            parts.append(_SPOT.format(spot.words, x, y, radius, fill))
        if len(curves) > 1:
            top = _TOP + 20 * number
            parts += [_RECT.format(right + 12, top, 22, 3, colour), _text(right + 42, top + 5, curve.name)]
    return _picture(title, _BOTTOM + 50, parts)


def _text(x: float, y: float, words: str, anchor: str = "start") -> Markup:
    return _TEXT.format(x, y, anchor, words)


def _picture(title: str, height: int, parts: Sequence[Markup]) -> Markup:
    key = "".join(c if c.isalnum() else "-" for c in title.lower())
    head = Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0} {1}" role="img" aria-labelledby="{2}"'
        ' font-family="system-ui, sans-serif" font-size="13" fill="#1a1a1a" style="background: #fff">'
    ).format(_WIDTH, height, key)
    return head + _TITLE.format(key, title) + Markup("").join(parts) + Markup("</svg>")


def _colour(place: int) -> str:
    return f"c{place % _NUM_COLOURS + 1}"


def _bar(*lines: tuple[str, float, float]) -> Markup:
    """Draw parts below each other: a class of the style sheet, and begin and length as shares of the whole width."""
    parts = (
        _BAR_PART.format(kind, 100 * begin, 12 * place, max(_LEAST, 100 * share), 10)
        for place, (kind, begin, share) in enumerate(lines)
        if share > 0.0
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
    whole, done, bars = sum(sizes) or 1.0, 0.0, list[Markup]()
    for place, size in enumerate(sizes):
        bars.append(_bar((_colour(place), done / whole, size / whole)))
        done += size
    return bars


def beside(pairs: Sequence[tuple[float | None, float | None]], *, falls: bool = True) -> list[Markup]:
    """Draw predicted (outlined) and measured bars for each part.

    `falls`: whether each bar starts at the end of the previous one of its kind.
    """
    sums = [sum(pair[number] or 0.0 for pair in pairs) for number in (0, 1)]
    whole = (max(sums) if falls else max((v or 0.0 for pair in pairs for v in pair), default=0.0)) or 1.0
    done, bars = [0.0, 0.0], list[Markup]()
    for place, pair in enumerate(pairs):
        lines = []
        for number, kind in enumerate(("predicted", _colour(place))):
            value = pair[number] or 0.0
            lines.append((kind, done[number] / whole, value / whole))
            done[number] += value if falls else 0.0
        bars.append(_bar(*lines))
    return bars
