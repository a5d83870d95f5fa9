"""SVG charts inside a page: a waterfall and a curve, from numbers and words. Text is escaped here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

from markupsafe import Markup

# A colour-blind safe set (Okabe and Ito 2008).
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#F0E442")
_WIDTH, _ROW, _LABELS, _VALUES = 720, 24, 150, 130


@dataclass(frozen=True)
class Bar:
    """One bar of a waterfall chart: its name, its share of the whole, and its value in words."""

    name: str
    share: float
    value: str


@dataclass(frozen=True)
class Spot:
    """Point of a curve: x, y and a label; `marked` for the chosen one."""

    x: float
    y: float
    words: str
    marked: bool = False


def waterfall(title: str, bars: Sequence[Bar]) -> Markup:
    """Parts of a whole, each beginning where the one before it ends."""
    height = _ROW * len(bars) + 8
    room = _WIDTH - _LABELS - _VALUES
    parts = [Markup('<title id="{0}">{1}</title>').format(_key(title), title)]
    done = 0.0
    for place, bar in enumerate(bars):
        top = 4 + place * _ROW
        left, width = _LABELS + done * room, max(1.0, bar.share * room)
        done += bar.share
        parts.append(
            Markup(
                '<text x="{labels}" y="{middle}" text-anchor="end">{name}</text>'
                '<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{thick}" fill="{colour}"/>'
                '<text x="{values}" y="{middle}">{value} ({share:.1%})</text>'
            ).format(
                labels=_LABELS - 8,
                middle=top + 15,
                name=bar.name,
                left=left,
                top=top + 2,
                width=width,
                thick=_ROW - 6,
                colour=_COLOURS[place % len(_COLOURS)],
                values=_WIDTH - _VALUES + 8,
                value=bar.value,
                share=bar.share,
            )
        )
    return _picture(title, height, parts)


def curve(title: str, spots: Sequence[Spot], axes: tuple[str, str]) -> Markup:
    """Spots joined by a line over logarithmic axes, each with its words; a dashed line shows y growing as x."""
    height, margin = 300, 60
    if not spots:
        return Markup("")
    xs = [log2(spot.x) for spot in spots]
    ideal = [spots[0].y * spot.x / spots[0].x for spot in spots]
    ys = [log2(value) for value in (*(spot.y for spot in spots), *ideal)]

    def at(x: float, y: float) -> tuple[float, float]:
        across, up = max(xs) - min(xs) or 1.0, max(ys) - min(ys) or 1.0
        left = margin + (log2(x) - min(xs)) / across * (_WIDTH - 2 * margin)
        return left, height - margin - (log2(y) - min(ys)) / up * (height - 1.6 * margin)

    def line(values: Sequence[float]) -> str:
        found = (at(spot.x, y) for spot, y in zip(spots, values, strict=True))
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in found)

    parts = [
        Markup('<title id="{0}">{1}</title>').format(_key(title), title),
        Markup('<polyline points="{0}" class="ideal"/>').format(line(ideal)),
        Markup('<polyline points="{0}" class="line"/>').format(line([spot.y for spot in spots])),
        Markup('<text x="{0}" y="{1}" text-anchor="middle">{2}</text>').format(_WIDTH // 2, height - 8, axes[0]),
        Markup('<text x="8" y="16">{0}</text>').format(axes[1]),
    ]
    for spot in spots:
        x, y = at(spot.x, spot.y)
        parts.append(
            Markup(
                '<g><title>{words}</title><circle cx="{x:.1f}" cy="{y:.1f}" r="{r}" class="{kind}"/>'
                '<text x="{x:.1f}" y="{below}" text-anchor="middle">{label}</text></g>'
            ).format(
                words=spot.words,
                x=x,
                y=y,
                r=7 if spot.marked else 4,
                kind="chosen" if spot.marked else "spot",
                below=height - 30,
                label=f"{spot.x:g}",
            )
        )
    return _picture(title, height, parts)


def _key(title: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in title.lower())


def _picture(title: str, height: int, parts: Sequence[Markup]) -> Markup:
    head = Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0} {1}" role="img" aria-labelledby="{2}">'
    ).format(_WIDTH, height, _key(title))
    return head + Markup("").join(parts) + Markup("</svg>")
