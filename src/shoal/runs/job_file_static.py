"""Static analysis of a job file, without running it, so that a launcher need not import torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from shoal.job import Job

_DEFAULT: int = next(f.default for f in fields(Job) if f.name == "grains")  # type: ignore[assignment]


def least_grains(path: Path) -> int | None:
    """A number that a job of this file has at least as many grains as; None where only running it tells.

    Read are the file and what it imports from beside it. It says so where it calls Job itself and every `grains` in it
    is a keyword with a number.
    """
    trees = list(_trees(path.resolve(), set()))
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    if not any("Job" in (getattr(call.func, "attr", None), getattr(call.func, "id", None)) for call in calls):
        return None
    found = [_DEFAULT]
    for keyword in (keyword for call in calls for keyword in call.keywords if keyword.arg == "grains"):
        if not (isinstance(keyword.value, ast.Constant) and type(keyword.value.value) is int):
            return None
        found.append(keyword.value.value)
    if any(_mentions(node) for tree in trees for node in ast.walk(tree)):
        return None
    return min(found)


def parameters_of(path: Path, function: str) -> list[str]:
    """The parameters of a function of this file; none of a file, or a function, that is not there."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return []
    found = next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == function), None)
    if found is None:
        return []
    return [argument.arg for argument in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs)]


def _trees(path: Path, seen: set[Path]) -> Iterator[ast.Module]:
    """The file's syntax tree and those of the modules beside it that it imports; none of a file that is no Python."""
    if path in seen:
        return
    seen.add(path)
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    yield tree
    for name in _imported(tree):
        beside = path.parent / name
        for file in [beside.with_suffix(".py"), *(beside.rglob("*.py") if beside.is_dir() else ())]:
            if file.is_file():
                yield from _trees(file, seen)


def _imported(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {(node.module or "").partition(".")[0]} if node.module else {alias.name for alias in node.names}
    return names - {""}


def _mentions(node: ast.AST) -> bool:
    """Whether a node is a variable, an attribute, a parameter or a text of that name."""
    named = {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg", ast.Constant: "value"}.get(type(node))
    return named is not None and getattr(node, named) == "grains"
