"""Rules on the words of docstrings, class names and the glossary. Each rule is itself tried on a violation."""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "shoal"
GLOSSARY = ROOT / "docs" / "glossary.md"

MAX_TERMS = 20
# What opens a sentence whose subject is no noun; a label before it ("Loader: what ...") changes nothing in that.
PRONOUNS = r"what|who|whom|whose|it|he|she|they|we|you|this one|these|those|that|everything|something|all that"
QUESTIONS = rf"{PRONOUNS}|how|where|which|whether|why|when|so many"
PARTICIPLES = r"found|told|held|kept|made|given"

Rule = Callable[[str], list[str]]


# ------------------------------------------------------------------------------------------------ rules on one module


def _first_sentence(docstring: str) -> str:
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) (?=[A-Z`])", paragraph)[0]


def _docstrings(source: str) -> Iterator[tuple[str, str, str, bool]]:
    """(kind, name, first sentence, whether all of the name is public) of each docstring."""

    def within(node: ast.AST, prefix: str, public: bool) -> Iterator[tuple[str, str, str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name, shown = prefix + child.name, public and not child.name.startswith("_")
                kind = "class" if isinstance(child, ast.ClassDef) else "function"
                if text := ast.get_docstring(child):
                    yield kind, name, _first_sentence(text), shown
                yield from within(child, f"{name}.", shown and kind == "class")
            else:
                yield from within(child, prefix, public)

    tree = ast.parse(source)
    if text := ast.get_docstring(tree):
        yield "module", "module", _first_sentence(text), True
    yield from within(tree, "", True)


def openings_without_a_noun(source: str) -> list[str]:
    """First sentences of public docstrings that begin with a pronoun or a question instead of the thing's name."""
    found = []
    for kind, name, sentence, public in _docstrings(source):
        words = PRONOUNS if kind == "function" else QUESTIONS
        label = r"(?:[^:.]{1,40}: )?" if kind == "module" else ""
        if public and re.match(rf"{label}(?:{words})\b", sentence, re.IGNORECASE):
            found.append(f"{name}: {sentence}")
    return found


def participles_as_nouns(source: str) -> list[str]:
    """First sentences whose subject is a participle: the kept, found of one, told by another."""
    subject = rf"(?:(?:the|a|an|all|any|each|every|no) )?(?:{PARTICIPLES})\b"
    verb = r"(?= (?:of|by|in|on|at|to|from|for|with|is|are|was|were|has|have|and|that|which)\b|[,:.]|$)"
    return [
        f"{name}: {sentence}"
        for _, name, sentence, _ in _docstrings(source)
        if re.match(subject + verb, sentence, re.IGNORECASE)
    ]


RULES: list[Rule] = [openings_without_a_noun, participles_as_nouns]

VIOLATIONS = [
    (openings_without_a_noun, '"""Loader: what a rank reads."""'),
    (openings_without_a_noun, '"""Roles: which process is what."""'),
    (openings_without_a_noun, '"""How a model is cut. A list."""'),
    (openings_without_a_noun, '"""It reads a file."""'),
    (openings_without_a_noun, 'class A:\n    """What a rank holds."""'),
    (openings_without_a_noun, 'class A:\n    """So many steps."""'),
    (openings_without_a_noun, 'class A:\n    class B:\n        """Those of a session."""'),
    (openings_without_a_noun, 'class A:\n    def f(self):\n        """What is sent."""'),
    (openings_without_a_noun, 'if x:\n    def f():\n        """This one is told."""'),
    (participles_as_nouns, '"""The kept of a step."""'),
    (participles_as_nouns, 'class A:\n    """Found by a search."""'),
    (participles_as_nouns, 'def _f():\n    """Given."""'),
    (participles_as_nouns, 'def f():\n    """All told are sent."""'),
    (participles_as_nouns, 'def f():\n    """Each held, in order."""'),
]

INNOCENT = [
    (openings_without_a_noun, '"""Loaders: microbatches of a rank. What it reads is theirs.\n\nIt is one."""'),
    (openings_without_a_noun, '"""Whatever: a word. It is one."""\nclass _A:\n    """What is private."""'),
    (openings_without_a_noun, 'def f():\n    """Whether it is one."""\ndef g():\n    """How many there are."""'),
    (openings_without_a_noun, 'def f():\n    """A closure."""\n    def g():\n        """What is inside."""'),
    (participles_as_nouns, '"""The given plan, found by a search. Kept."""\n"""Found by no docstring."""'),
    (participles_as_nouns, 'def f():\n    """Ranks that were found."""\n    return "Found of it."'),
]


def _modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_keeps(rule: Rule) -> None:
    assert _modules()
    found = [f"{path.relative_to(ROOT)}: {text}" for path in _modules() for text in rule(path.read_text("utf-8"))]
    assert found == []


@pytest.mark.parametrize(("rule", "source"), VIOLATIONS)
def test_rule_finds_violation(rule: Rule, source: str) -> None:
    assert len(rule(source)) == 1


@pytest.mark.parametrize(("rule", "source"), INNOCENT)
def test_rule_passes_innocent(rule: Rule, source: str) -> None:
    assert rule(source) == []


# -------------------------------------------------------------------------------------------------------- class names


def classes_of_one_name(sources: Mapping[str, str]) -> list[str]:
    """Class names that several definitions have, with the modules of these; classes within others count too."""
    homes: dict[str, list[str]] = {}
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(path)
    return [f"{name}: {', '.join(paths)}" for name, paths in homes.items() if len(paths) > 1]


def test_class_names_are_unique() -> None:
    sources = {str(path.relative_to(PACKAGE)): path.read_text("utf-8") for path in _modules()}
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
    package = "\n".join(path.read_text("utf-8") for path in _modules())
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
