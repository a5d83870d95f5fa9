"""SVG plot of curves on logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 860, 480, 70, 40, 220, 50
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999", "#882255")


@dataclass(frozen=True)
class PlottedCurve:
    """Name of a curve and its points; both coordinates are above zero."""

    name: str
    points: Sequence[tuple[float, float]]


def plot(title: str, across: str, up: str, curves: Sequence[PlottedCurve]) -> str:
    """The curves with a legend; a line for each power of ten up, for each fourth power of two across."""
    points = [point for curve in curves for point in curve.points]
    xs, ys = [math.log2(x) for x, _ in points], [math.log10(y) for _, y in points]
    left, right = min(xs), max(max(xs), min(xs) + 1)
    low, high = math.floor(min(ys)), math.ceil(max(ys) + 1e-9)

    def place(x: float, y: float) -> tuple[float, float]:
        over = (x - left) / (right - left) * (_WIDTH - _LEFT - _RIGHT)
        return _LEFT + over, _HEIGHT - _BOTTOM - (y - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [f'<text x="{_LEFT}" y="24" font-size="15">{escape(title)}</text>']
    for power in range(low, high + 1):
        _, y = place(left, power)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    for power in range(math.ceil(left), math.floor(right) + 1):
        if power % 4 == 0:
            x, _ = place(power, low)
            parts.append(f'<path d="M{x:.1f} {_TOP}V{_HEIGHT - _BOTTOM}" stroke="#eee"/>')
            parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">2^{power}</text>')
    for number, curve in enumerate(curves):
        colour = _COLOURS[number % len(_COLOURS)]
        line = "L".join("{:.1f} {:.1f}".format(*place(math.log2(x), math.log10(y))) for x, y in curve.points)
        parts.append(f'<path d="M{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = _TOP + 18 * number + 10
        parts.append(f'<path d="M{_WIDTH - _RIGHT + 12} {y - 4}h22" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{_WIDTH - _RIGHT + 40}" y="{y}">{escape(curve.name)}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) // 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 12}" text-anchor="middle">{escape(across)}</text>')
    parts.append(f'<text transform="translate(18 {_HEIGHT // 2}) rotate(-90)" text-anchor="middle">{escape(up)}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif"'
    return (
        "\n".join([f'{head} font-size="12">', '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>"])
        + "\n"
    )
