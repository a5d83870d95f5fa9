"""HTML page of headings, paragraphs, tables and drawings, in one file that needs nothing else and prints well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup


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
    """HTML page."""

    title: str
    lead: Sequence[str]
    parts: Sequence[Section] = field(default_factory=tuple)


_TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{{ page.title }}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a;
  background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; font-size: .9rem; width: 100%; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #ccc; vertical-align: top; }
svg { width: 100%; height: auto; } svg text { font: 13px system-ui, sans-serif; fill: #1a1a1a; }
.line { fill: none; stroke: #0072B2; stroke-width: 2; } .ideal { fill: none; stroke: #777; stroke-dasharray: 5 4; }
.spot { fill: #0072B2; } .chosen { fill: #D55E00; }
pre { background: #f4f4f4; padding: .8rem; overflow-x: auto; }
@media print { body { margin: 0; max-width: none; } h2 { break-after: avoid; } svg, tr { break-inside: avoid; } }
</style>
</head>
<body>
<main>
<h1>{{ page.title }}</h1>
{% for text in page.lead %}<p>{{ text }}</p>
{% endfor %}
{%- for part in page.parts %}
<section>
<h2>{{ part.heading }}</h2>
{% for text in part.paragraphs %}<p>{{ text }}</p>
{% endfor %}
{%- if part.drawing %}<figure>{{ part.drawing }}</figure>
{% endif %}
{%- if part.folded %}<details><summary>{{ part.table.rows | length }} rows</summary>
{% endif %}
{%- if part.table %}<table>
<thead><tr>{% for name in part.table.head %}<th scope="col">{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in part.table.rows %}<tr>{% for cell in row %}
{%- if loop.first %}<th scope="row">{{ cell }}</th>{% else %}<td>{{ cell }}</td>{% endif %}
{%- endfor %}</tr>
{% endfor %}</tbody>
</table>
{% endif %}
{%- if part.folded %}</details>
{% endif %}
{%- if part.code %}<pre><code>{{ part.code }}</code></pre>
{% endif %}
</section>
{%- endfor %}
</main>
</body>
</html>
"""


def render(page: Page) -> str:
    """The page as HTML that is also XML; everything but drawings is escaped."""
    loader = DictLoader({"page": _TEMPLATE})
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    return environment.get_template("page").render(page=page)
