"""A decision is one screen: what led to it, the decision, what follows from it, and what would change it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.docs.test_readme import ROOT

PAGES = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
PARTS = ["Context", "Decision", "Consequences", "What would change our mind"]
MOST_WORDS = 110


def mistakes(name: str, page: str) -> list[str]:
    """Return what a page of a decision lacks or has too much of."""
    number = int(name.split("-")[0])
    found = [] if page.startswith(f"# {number}. ") else [f"the title does not begin with '# {number}. '"]
    found += [] if re.findall(r"^\*\*(.+?)\.\*\* ", page, re.MULTILINE) == PARTS else [f"the parts are not {PARTS}"]
    words = len(page.split())
    return found + ([f"{words} words, at most {MOST_WORDS}"] if words > MOST_WORDS else [])


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_decision_is_one_screen(path: Path) -> None:
    assert mistakes(path.name, path.read_text(encoding="utf-8")) == []


def test_mistakes_are_found() -> None:
    good = "# 7. Title\n\n" + "\n\n".join(f"**{part}.** Text." for part in PARTS) + "\n"
    assert mistakes("0007-title.md", good) == []
    assert mistakes("0008-title.md", good) == ["the title does not begin with '# 8. '"]
    assert mistakes("0007-title.md", good.replace("Context", "Story")) == [f"the parts are not {PARTS}"]
    assert mistakes("0007-title.md", good + "word " * MOST_WORDS) == ["125 words, at most 110"]
