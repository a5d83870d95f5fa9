"""Notebook view of a run: its facts, and the parts of its wall clock as bars; HTML without scripts or styles."""

from __future__ import annotations

from markupsafe import Markup

from shoal.report.account import Account
from shoal.report.quantities import seconds, share
from shoal.report.run_page import facts

_ROW = Markup("<tr><th>{}</th><td>{}</td></tr>")
_PART = Markup("<tr><th>{0}</th><td>{1}</td><td>{2}</td><td>{3}</td></tr>")
_BAR = Markup('<svg width="240" height="12"><rect x="{0:.1f}" width="{1:.1f}" height="12" fill="#0072b2"/></svg>')
_TABLES = Markup("<p>{0}</p><table>{1}</table><table><caption>Wall clock</caption>{2}</table>")


def shown(found: Account) -> Markup:
    """Return the view as HTML, with everything escaped."""
    rows = Markup("").join(_ROW.format(name, text) for name, text in facts(found))
    done, bars = 0.0, list[Markup]()
    for part in found.wall.parts:
        if part.seconds > 0.0:
            bar = _BAR.format(240 * done, max(1.0, 240 * part.share))
            bars.append(_PART.format(part.name.replace("_", " "), bar, seconds(part.seconds), share(part.share)))
        done += part.share
    return _TABLES.format(found.limit, rows, Markup("").join(bars))
