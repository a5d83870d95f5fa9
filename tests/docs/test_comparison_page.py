"""What docs/comparison.md says of shoal: each name and each link is there."""

from __future__ import annotations

import re

from tests.docs.test_readme import ROOT, anchors

import shoal

DOCS = ROOT / "docs"
PAGE = (DOCS / "comparison.md").read_text(encoding="utf-8")
HEADINGS = ("| I want to ... |", "| Feature | Instead |")


def answers(page: str) -> list[str]:
    """Return the second cell of each row of the page's tables of features."""
    tables = [table for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE) if table.startswith(HEADINGS)]
    return [row.split("|")[2].strip() for table in tables for row in table.splitlines()[2:]]


def settings() -> dict[str, set[str]]:
    """Section of the page of settings -> names of its rows, which tests of that page hold to the code."""
    sections = re.split(r"^## ", (DOCS / "settings.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {text.splitlines()[0]: set(re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)) for text in sections}


def unknown_names(answer: str) -> list[str]:
    """Commands, options and Python names in an answer that shoal has not."""
    known, missing = settings(), []
    for code in re.findall(r"`([^`]+)`", answer):
        missing += [code for name in re.findall(r"\bshoal\.(\w+)", code) if name not in shoal.__all__]
        if command := re.match(r"shoal (\w+)", code):
            options = known.get(f"shoal {command[1]}", set())
            missing += [code] * (f"shoal {command[1]}" not in known)
            missing += [code for option in re.findall(r"--[\w-]+", code) if option not in options]
    return missing


def broken_links(answer: str) -> list[str]:
    """Links of an answer to a page or a heading that is not there."""
    broken = []
    for page, anchor in re.findall(r"\]\(([^)#]+)#?([^)]*)\)", answer):
        path = DOCS / page
        if not path.is_file() or (anchor and anchor not in anchors(path)):
            broken.append(f"{page}#{anchor}")
    return broken


def mistakes(page: str) -> list[str]:
    """What is wrong in the answers of a page."""
    empty = ["a row without an answer"] * answers(page).count("")
    return empty + [wrong for answer in answers(page) for wrong in unknown_names(answer) + broken_links(answer)]


def test_each_answer_names_what_is_there() -> None:
    assert len(answers(PAGE)) > 25
    assert mistakes(PAGE) == []


def test_mistakes_in_an_answer_are_found() -> None:
    def wrong(answer: str) -> int:
        return len(mistakes(f"| Feature | Instead |\n|---|---|\n| EMA | {answer} |\n"))

    assert wrong("`shoal.EMA` ([callbacks](callbacks.md#hooks))") == 0
    assert wrong("`shoal.SWA` ([callbacks](callbacks.md))") == 1
    assert wrong("`shoal run --ema` ([callbacks](callbacks.md))") == 1
    assert wrong("`shoal train` ([callbacks](callbacks.md))") == 1
    assert wrong("`shoal.EMA` ([callbacks](callback.md), [hooks](callbacks.md#hook))") == 2
    assert wrong("") == 1
