"""Planner's answer for programs: a search result that displays itself as text or as a page."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

from shoal.planner.answer.answer import SearchResult
from shoal.planner.answer.display import fragment, page, text
from shoal.runs.directory import write_file


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
