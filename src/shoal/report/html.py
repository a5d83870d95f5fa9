"""HTML page of headings, paragraphs, tables and drawings, in one file that needs nothing else and prints well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
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


def render(page: Page) -> str:
    """The page as HTML that is also XML; everything but drawings is escaped."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    template = files("shoal.report").joinpath("page.html").read_text(encoding="utf-8")
    return environment.from_string(template).render(page=page)
