"""The page of features: every feature has a page or an answer, and what they name and link to exists."""

from __future__ import annotations

import re

from tests.docs.test_readme import ROOT, anchors

import shoal

DOCS = ROOT / "docs"
PAGE = (DOCS / "features.md").read_text(encoding="utf-8")
HEADING = "| Feature | Here | Instead |"


def rows(page: str) -> list[list[str]]:
    """The cells of each row of each table."""
    lines = [line for line in page.splitlines() if line.startswith("|") and line != HEADING and "|---" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def settings() -> dict[str, set[str]]:
    """Section of the page of settings -> names of its rows, which tests of that page hold to the code."""
    sections = re.split(r"^## ", (DOCS / "settings.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {text.splitlines()[0]: set(re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)) for text in sections}


def exists(name: str) -> bool:
    """Whether a dotted name below `shoal` is public."""
    first, *rest = name.split(".")
    if first not in shoal.__all__:
        return False
    found = getattr(shoal, first)
    for part in rest:
        if not (hasattr(found, part) or part in getattr(found, "__annotations__", {})):
            return False
        found = getattr(found, part, None)
    return True


def unknown_names(answer: str) -> list[str]:
    """Commands, options, fields, plan keys and Python names in an answer that shoal has not."""
    known, missing = settings(), []
    for code in re.findall(r"`([^`]+)`", answer):
        missing += [code for name in re.findall(r"\bshoal\.([\w.]+)", code) if not exists(name)]
        missing += [code for field in re.findall(r"\bJob\((\w+)=", code) if field not in known["Job"]]
        if command := re.match(r"shoal (\w+)", code):
            options = known.get(f"shoal {command[1]}")
            missing += [code] * (options is None and command[1] not in {"run", "plan", "verify"})
            missing += [code for option in re.findall(r"--[\w-]+", code) if option not in (options or ())]
        elif code.startswith("--") and code not in known["shoal run"]:
            missing.append(code)
        elif re.fullmatch(r"[a-z]+\.[a-z_]+", code) and code.split(".")[0] not in {"shoal", "torch", "parameters"}:
            missing += [code] * (code not in known["Plan"] and code != "records.jsonl")
    return missing


def broken_links(answer: str) -> list[str]:
    """Links of an answer to a page or a heading that is not there."""
    broken = []
    for page, anchor in re.findall(r"\]\(([^)#]+)#?([^)]*)\)", answer):
        path = DOCS / page
        if not path.is_file() or (anchor and anchor not in anchors(path)):
            broken.append(f"{page}#{anchor}")
    return broken


def present(page: str) -> list[tuple[str, str]]:
    """Features that shoal has, with their links."""
    lines = [line for line in page.splitlines() if line.startswith("- **")]
    return [found for line in lines for found in re.findall(r"\[([^\]]+)\]\(([^)]+)\)", line)]


def mistakes(page: str) -> list[str]:
    """What is wrong in the lists and rows of a page."""
    found = [f"{name}: {link}" for name, link in present(page) if broken_links(f"]({link})")]
    for row in rows(page):
        if len(row) != 3 or not all(row):
            found.append(f"{row}: not three cells")
            continue
        feature, has, answer = row
        if has not in {"part", "no"}:
            found.append(f"{feature}: {has}")
        found += [f"{feature}: {name}" for name in unknown_names(answer) + broken_links(answer)]
    return found


def test_sixty_features_have_an_answer() -> None:
    names = [name for name, _ in present(PAGE)] + [row[0] for row in rows(PAGE)]
    assert len(names) >= 80
    assert len(set(names)) == len(names)
    assert mistakes(PAGE) == []


def test_mistakes_in_a_row_are_found() -> None:
    def wrong(cells: str) -> int:
        return len(mistakes(f"| {cells} |"))

    assert wrong("EMA | part | `shoal.EMA` ([callbacks](callbacks.md#hooks))") == 0
    assert wrong("EMA | no | `shoal.SWA` ([callbacks](callbacks.md))") == 1
    assert wrong("EMA | no | `shoal.Run.models` ([callbacks](callbacks.md))") == 1
    assert wrong("EMA | no | `shoal run --ema` ([callbacks](callbacks.md))") == 1
    assert wrong("EMA | no | `Job(ema=...)`, `layout.ema` ([callbacks](callbacks.md))") == 2
    assert wrong("EMA | no | `shoal.EMA` ([callbacks](callback.md), [hooks](callbacks.md#hook))") == 2
    assert wrong("EMA | maybe | `shoal.EMA` ([callbacks](callbacks.md))") == 1
    assert wrong("EMA | no | ") == 1


def test_a_mistake_in_a_list_is_found() -> None:
    assert mistakes("- **Hooks**: [callbacks](callbacks.md#hooks), [averages](callbacks.md#ready-made).") == []
    assert len(mistakes("- **Hooks**: [callbacks](callback.md), [averages](callbacks.md#average).")) == 2
