"""Class names and the glossary. The rules on docstrings are in words.py."""

import ast
import json
import re
from collections.abc import Mapping

import pytest
from tests.unit import words
from tests.unit.test_house import PACKAGE, ROOT

GLOSSARY = ROOT / "docs" / "glossary.md"
MAX_TERMS = 20


# -------------------------------------------------------------------------------------------------------- class names


def classes_of_one_name(sources: Mapping[str, str]) -> list[str]:
    """Class names that several definitions have, with the modules of these; classes within others count too."""
    homes: dict[str, list[str]] = {}
    for path, source in sources.items():
        for node in words.nodes(source):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(path)
    return [f"{name}: {', '.join(paths)}" for name, paths in homes.items() if len(paths) > 1]


def test_class_names_are_unique() -> None:
    sources = {str(path.relative_to(PACKAGE)): source for path, source in words.sources(PACKAGE).items()}
    assert classes_of_one_name(sources) == []


def test_a_second_class_of_a_name_is_found() -> None:
    nested = "class A:\n    class Part: ...\ndef f():\n    class _Run: ..."
    assert classes_of_one_name({"a.py": nested, "b.py": "class Part: ..."}) == ["Part: a.py, b.py"]
    assert classes_of_one_name({"a.py": nested, "b.py": "class B: ...\nif x:\n    class _Run: ..."}) == [
        "_Run: a.py, b.py"
    ]
    assert classes_of_one_name({"a.py": nested, "b.py": "class Parts: ..."}) == []


# ----------------------------------------------------------------------------------------------------------- glossary


def glossary(page: str) -> list[list[str]]:
    """Rows of the page's table: term, meaning, nearest term of the field."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    return rows[2:]


def glossary_mistakes(page: str, package: str) -> list[str]:
    """Too many terms, rows that lack something, terms out of order, and terms that the package does not use."""
    rows = glossary(page)
    terms = [row[0].strip("*") for row in rows]
    found = [f"{len(terms)} terms, at most {MAX_TERMS}"] if len(terms) > MAX_TERMS else []
    found += [f"{row[0]}: a cell is missing" for row in rows if len(row) != 3 or not all(row)]
    found += [f"{row[0]}: more than two sentences" for row in rows if len(re.findall(r"\.(?: |$)", row[1])) > 2]
    found += ["not in the order of the alphabet, or twice"] if terms != sorted(set(terms)) else []
    return found + [f"{term}: not a word of the package" for term in terms if term not in package]


def test_glossary() -> None:
    package = "\n".join(words.sources(PACKAGE).values())
    assert glossary(GLOSSARY.read_text("utf-8"))
    assert glossary_mistakes(GLOSSARY.read_text("utf-8"), package) == []
    for page in ("README.md", "CONTRIBUTING.md"):
        assert "](docs/glossary.md)" in (ROOT / page).read_text("utf-8")


def test_glossary_mistakes_are_found() -> None:
    head = "# Words\n\n| a | b | c |\n|---|---|---|\n"
    row = "| **grain** | A group. | microbatch |\n"
    assert glossary_mistakes(head + row, "a grain") == []
    assert len(glossary_mistakes(head + row, "a microbatch")) == 1
    assert len(glossary_mistakes(head + row + row, "a grain")) == 1
    assert len(glossary_mistakes(head + "| **grain** | A group. |\n", "a grain")) == 1
    assert len(glossary_mistakes(head + "| **grain** | A. B. C. | d |\n", "a grain")) == 1
    terms = [f"term {number:02}" for number in range(MAX_TERMS + 1)]
    many = head + "".join(f"| **{term}** | A. | b |\n" for term in terms)
    assert len(glossary_mistakes(many, " ".join(terms))) == 1


# ----------------------------------------------------------------------------------------- rules with offenders left


@pytest.mark.parametrize("rule", words.SHRINKING, ids=lambda rule: rule.__name__)
def test_offenders_only_become_fewer(rule: words.Rule) -> None:
    allowed: int = json.loads(words.LEFT.read_text("utf-8"))[rule.__name__]
    found = words.offenders(rule, PACKAGE)
    assert len(found) <= allowed, found


@pytest.mark.parametrize(
    ("rule", "source", "count"),
    [
        (words.first_lines_not_imperative, 'def f():\n    """The size."""', 1),
        (words.first_lines_not_imperative, 'def f():\n    """Returns a size."""', 1),
        (words.first_lines_not_imperative, 'def f():\n    """Whether it is one."""', 1),
        (words.first_lines_not_imperative, 'def f():\n    """`a` by name."""', 1),
        (words.first_lines_not_imperative, 'def f():\n    """Return a size."""', 0),
        (words.first_lines_not_imperative, 'def f():\n    """Process a batch."""', 0),
        (words.first_lines_not_imperative, '@property\ndef f():\n    """The size."""', 0),
        (words.bare_participles, "found = 1\nself._kept = 2", 2),
        (words.bare_participles, "def told(asked): ...", 2),
        (words.bare_participles, "found_names = held.size", 0),
    ],
)
def test_an_offender_is_found(rule: words.Rule, source: str, count: int) -> None:
    assert len(rule(source)) == count
