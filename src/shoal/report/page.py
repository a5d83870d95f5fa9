"""HTML file of a report: template, style sheet, script and chart library in one self-contained file."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from shoal.report.curves import Chart
from shoal.report.run_page import ReportPage

# Characters that could end a script or start a comment; the escaped text is the same JSON.
_ESCAPED = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def render_report(page: ReportPage) -> str:
    """Return the page as escaped HTML. Its security policy allows only the page's own scripts, and no requests."""
    script = _text("uplot/uPlot.iife.min.js") + "\n" + _text("report.js")
    style = _text("uplot/uPlot.min.css") + "\n" + _text("report.css")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_text("report.html"))
    return template.render(
        page=page,
        script=Markup(script),  # noqa: S704  (files of this package)
        style=Markup(style),  # noqa: S704
        data=embedded([chart.to_json() for chart in page.charts]),
        policy=f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:",
        label=_chart_label,
    )


def embedded(value: Any) -> Markup:
    """Return a value as JSON that is safe inside a script element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character, escaped in _ESCAPED.items():
        text = text.replace(character, escaped)
    return Markup(text)  # noqa: S704  (nothing in it ends the element)


def _text(name: str) -> str:
    return files("shoal.report").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _chart_label(chart: Chart) -> str:
    """Return a sentence that describes a chart to readers who cannot see it."""
    curves = []
    for curve in chart.curves:
        known = [value for value in curve.values if value is not None]
        ends = "without values"
        if known:
            ends = f"from {known[0]:.4g} to {known[-1]:.4g}, between {min(known):.4g} and {max(known):.4g}"
        curves.append(f"{curve.name} {ends}")
    return f"{chart.title}: {'; '.join(curves)}. The table below has the values."
