"""The documentation's site: each page is in its navigation, and it is built without a warning."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.docs.test_readme import ROOT

import shoal

DOCS = ROOT / "docs"
CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
AT_ROOT = {"CONTRIBUTING.md", "SECURITY.md"}


def navigation(config: str) -> list[str]:
    """Pages that `nav` names, patterns as they stand. Read as text: the generator and its YAML may be missing."""
    (section,) = re.findall(r"^nav:\n((?: .*\n|\n)+)", config, re.MULTILINE)
    return re.findall(r"^ +- (?:.*: )?([\w/.*-]+\.md)\b", section, re.MULTILINE)


def mistakes(entries: list[str], pages: set[str]) -> list[str]:
    """Pages that no entry names, entries without a page, and pages that are named twice."""
    named = [page for entry in entries for page in (expanded(entry, pages) if "*" in entry else [entry])]
    found = [f"{page}: not in the navigation of mkdocs.yml" for page in sorted(pages - set(named))]
    found += [f"{page}: no such page" for page in named if page not in pages]
    return found + [f"{page}: twice" for page in sorted(set(named)) if named.count(page) > 1]


def expanded(pattern: str, pages: set[str]) -> list[str]:
    """The pages of a pattern: those whose names begin with a number."""
    folder = pattern.removesuffix("*.md")
    return [page for page in sorted(pages) if re.fullmatch(re.escape(folder) + r"0[^/]*\.md", page)]


def test_every_page_is_in_the_navigation() -> None:
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} | AT_ROOT
    assert len(navigation(CONFIG)) > 30
    assert mistakes(navigation(CONFIG), pages) == []


def test_mistakes_in_a_navigation_are_found() -> None:
    entries = navigation(
        "nav:\n  - Start: index.md\n  - More:\n      - a/one.md\n      - a/*.md\nnot_in_nav: |\n  x.md\n"
    )
    assert entries == ["index.md", "a/one.md", "a/*.md"]
    assert mistakes(entries, {"index.md", "a/one.md", "a/01.md"}) == []
    assert mistakes(entries, {"index.md", "a/one.md", "b.md"}) == ["b.md: not in the navigation of mkdocs.yml"]
    assert mistakes(entries, {"index.md"}) == ["a/one.md: no such page"]
    assert mistakes(["index.md", "index.md"], {"index.md"}) == ["index.md: twice"]


@pytest.fixture(scope="module")
def site() -> Path:
    """The site as scripts/docs builds it."""
    done = subprocess.run([ROOT / "scripts" / "docs"], capture_output=True, text=True, timeout=500, check=False)
    if "No matching distribution" in done.stderr or "Connection" in done.stderr:
        pytest.skip("the site's generator cannot be installed here: no package index")
    assert done.returncode == 0, done.stdout + done.stderr
    return ROOT / "site"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_site_is_built_without_a_warning(site: Path) -> None:
    assert "shoal.Job" in (site / "reference.html").read_text(encoding="utf-8")
    assert (site / "search" / "search_index.js").is_file()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "text",
    [
        "[no page](nowhere.md)",
        "[no heading](glossary.md#nowhere)",
        "[no file](../benchmarks/nowhere.json)",
        "![x](//a.b/c.svg)",
    ],
)
def test_a_page_with_a_mistake_is_not_built(site: Path, tmp_path: Path, text: str) -> None:
    """A dead link, a dead anchor, a link to a missing file of the repository, a picture from another host."""
    for name in ("docs", "src", "scripts", "benchmarks", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("mkdocs.yml", "CHANGELOG.md", "CITATION.cff", *AT_ROOT):
        shutil.copy(ROOT / name, tmp_path)
    with (tmp_path / "docs" / "index.md").open("a") as file:
        file.write(f"\n{text}\n")
    command = [ROOT / ".venv-docs" / "bin" / "mkdocs", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode != 0, done.stderr
    assert text.split("(")[1].split("#")[0].rstrip(")").removeprefix("../") in done.stderr


def test_the_reference_has_every_public_name() -> None:
    named = re.findall(r"^::: shoal\.(\w+)$", (DOCS / "reference.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(named) == sorted(set(shoal.__all__) - {"__version__"})
