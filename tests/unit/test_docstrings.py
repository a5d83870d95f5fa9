"""Every public method says what it does, or overrides one that does; ruff sees the other docstrings."""

import ast
from collections.abc import Iterable, Iterator

import pytest
from tests.unit.test_house import PACKAGE
from tests.unit.words import nodes, sources


def undocumented(texts: Iterable[str]) -> list[str]:
    """Public methods of public classes without a docstring, where no base class in these texts has one for it."""
    classes = {node.name: node for text in texts for node in nodes(text) if isinstance(node, ast.ClassDef)}
    found = []
    for name, node in classes.items():
        for method in node.body if not name.startswith("_") else ():
            if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
                family = [node, *_bases(node, classes)]
                if not any(_documents(base, method.name) for base in family):
                    found.append(f"{name}.{method.name}")
    return found


def _bases(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> Iterator[ast.ClassDef]:
    for base in node.bases:
        name = base.value if isinstance(base, ast.Subscript) else base
        known = classes.get(getattr(name, "id", ""))
        if known is not None:
            yield known
            yield from _bases(known, classes)


def _documents(node: ast.ClassDef, method: str) -> bool:
    return any(isinstance(n, ast.FunctionDef) and n.name == method and ast.get_docstring(n) for n in node.body)


def test_methods_are_documented() -> None:
    assert undocumented(sources(PACKAGE).values()) == []


BASE = 'class Base(Generic[T]):\n    def go(self):\n        """Goes."""\n'


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("class A(Base):\n    def go(self): pass", []),
        ("class A(Base[int]):\n    def go(self): pass", []),
        ("class B(Base): ...\nclass A(B):\n    def go(self): pass", []),
        ("class _A:\n    def go(self): pass", []),
        ("class A(Base):\n    def _go(self): pass", []),
        ("class A:\n    def go(self): pass", ["A.go"]),
        ("class A(Base):\n    def stop(self): pass", ["A.stop"]),
    ],
)
def test_an_undocumented_method_is_found(source: str, wanted: list[str]) -> None:
    assert undocumented([BASE, source]) == wanted
