"""Rules on the words of docstrings, for test_house.py, and what each of them finds and passes."""

import ast
import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

# What opens a sentence whose subject is no noun; a label before it ("Loader: what ...") changes nothing in that.
PRONOUNS = r"what|who|whom|whose|it|he|she|they|we|you|this one|these|those|that|everything|something|all that"
QUESTIONS = rf"{PRONOUNS}|how|where|which|whether|why|when|so many"
PARTICIPLES = r"found|told|held|kept|made|given"

Rule = Callable[[str], list[str]]


# ------------------------------------------------------------------------------------------------ rules on one module


@cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """Return a module and all nodes in it; many rules read each module."""
    return tuple(ast.walk(ast.parse(source)))


@cache
def sources(package: Path) -> dict[Path, str]:
    """Return the texts of a package's modules, in the order of their paths."""
    return {path: path.read_text("utf-8") for path in sorted(package.rglob("*.py"))}


def _first_sentence(docstring: str) -> str:
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) (?=[A-Z`])", paragraph)[0]


@cache
def _docstrings(source: str) -> list[tuple[str, str, str, bool]]:
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

    tree = nodes(source)[0]
    assert isinstance(tree, ast.Module)
    text = ast.get_docstring(tree)
    opening = [("module", "module", _first_sentence(text), True)] if text else []
    return [*opening, *within(tree, "", True)]


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


# ------------------------------------------------------------------------------------------------ rules with offenders

# By rule and module how many offenders are left. The numbers only fall, and a module without any has no entry:
# `python -m tests.unit.words` writes those of now where they are smaller.
LEFT = Path(__file__).with_name("words_left.json")
# Openings of a first line that is no request to the function: no sentence, or one about something else.
_OPENINGS = (
    r"(?:The|An?|All|Each|Every|Any|No|None|One|Some|Such|Several|Two|Both|Its?|Th(?:is|ese|ose|at)|Whether|How|What|Who"
    r"|Whose|Which|Where|When|Why|So many|As|Of|By|For|In|On|At|With|Without|From|To|After|Before|True"
    r"|Found|Told|Held|Kept|Made|Given)\b|[(`]"
)
# Imperatives that end with an s, as a third person does.
_IMPERATIVES = {
    "Access",
    "Address",
    "Bypass",
    "Compress",
    "Cross",
    "Discuss",
    "Express",
    "Guess",
    "Pass",
    "Press",
    "Process",
}
_PARTICIPLES = {"found", "told", "held", "kept", "made", "asked", "taken"}


def first_lines_not_imperative(source: str) -> list[str]:
    """Docstrings of functions, but for properties, whose first line does not say what the function is to do."""
    found = []
    for node in nodes(source):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not (text := ast.get_docstring(node)):
            continue
        if any(getattr(one, "id", getattr(one, "attr", "")).endswith("property") for one in node.decorator_list):
            continue
        first = text.split()[0].rstrip(".,:")
        is_third_person = first.endswith("s") and first not in _IMPERATIVES
        if re.match(_OPENINGS, text) or is_third_person or not re.fullmatch(r"[A-Z][a-z-]+", first):
            found.append(f"{node.name}: {text.splitlines()[0]}")
    return found


def bare_participles(source: str) -> list[str]:
    """Names of functions, arguments, variables and attributes that are a participle and say nothing of what it is."""
    found = []
    for node in nodes(source):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.arg):
            names = [node.arg]
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names = [node.id if isinstance(node, ast.Name) else node.attr]
        else:
            names = []
        found += [f"line {node.lineno}: {name}" for name in names if name.strip("_") in _PARTICIPLES]
    return found


SHRINKING: list[Rule] = [first_lines_not_imperative, bare_participles]


def offenders(rule: Rule, package: Path) -> list[str]:
    """Return what a rule finds in a package, each with its module's path."""
    return [
        f"{path.relative_to(package).as_posix()}: {text}"
        for path, source in sources(package).items()
        for text in rule(source)
    ]


def main() -> None:
    """Write the numbers that have fallen."""
    package = Path(__file__).resolve().parents[2] / "src" / "shoal"
    left = json.loads(LEFT.read_text("utf-8"))
    left = {rule.__name__: min(len(offenders(rule, package)), left[rule.__name__]) for rule in SHRINKING}
    LEFT.write_text(json.dumps(left, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
