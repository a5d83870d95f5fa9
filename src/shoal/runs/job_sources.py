"""Source code of a job: its file and what that imports from beside it, and digests of their definitions."""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

JOB_FILE = "the job file"
_REST = "(other lines)"
# Arguments of Job that a resume may change.
FREE = ("length", "on_nonfinite", "predict")
# Arguments of callbacks that say how long, as a length does.
LENGTHS = {"EarlyStopping": ("patience",)}
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def sources(path: Path, seen: set[Path] | None = None) -> Iterator[tuple[Path, ast.Module]]:
    """The file and the modules beside it that it imports, each with its syntax tree; none of what is no Python."""
    seen = set() if seen is None else seen
    if path in seen:
        return
    seen.add(path)
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    names = sorted(_imported(tree))  # whoever takes the tree may change it
    yield path, tree
    for name in names:
        beside = path.parent / name
        for file in [beside.with_suffix(".py"), *(sorted(beside.rglob("*.py")) if beside.is_dir() else ())]:
            if file.is_file():
                yield from sources(file, seen)


def code(path: Path, function: str) -> dict[str, dict[str, str]]:
    """Digests of a job's code: by file, and in it by definition, of what they compute.

    Comments, docstrings, the place of a line, a job's length and what it does at a bad step are left out, and so are
    the defaults of the job `function`'s parameters, which are settings.
    """
    path = path.resolve()
    found = {}
    for file, tree in sources(path):
        name = JOB_FILE if file == path else str(file.relative_to(path.parent))
        found[name] = _digests(tree, function if file == path else None)
    return found


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Differences between two results of `code`: a file each, with the definitions in it."""
    found = []
    for file in sorted({*before, *now}):
        old, new = before.get(file, {}), now.get(file, {})
        if not old or not new:
            found.append(f"{file} ({'new' if new else 'gone'})")
        elif old != new:
            names = ", ".join(sorted(name for name in {*old, *new} if old.get(name) != new.get(name)))
            found.append(f"{file}: {names}")
    return found


def _digests(tree: ast.Module, function: str | None) -> dict[str, str]:
    parts: dict[str, list[ast.stmt]] = {}
    for node in tree.body:
        parts.setdefault(node.name if isinstance(node, _DEFINITIONS) else _REST, []).append(node)
    # The trees are nobody else's: a copy of each would take as long as all the rest, in each rank that starts.
    return {name: _digest(nodes, is_job=name == function) for name, nodes in parts.items()}


def digest_of(nodes: Sequence[ast.AST], *, is_job: bool = False) -> str:
    """Digest of what statements, or expressions, compute; without the defaults of a job function's parameters."""
    return _digest([copy.deepcopy(node) for node in nodes], is_job)


def _digest(nodes: Sequence[ast.AST], is_job: bool) -> str:
    """As digest_of; removes what computes nothing from the nodes."""
    texts = [ast.dump(_bare(node, is_job)) for node in nodes]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def _bare(node: ast.AST, is_job: bool) -> ast.AST:
    """The statement without what computes nothing, which is removed in place."""
    if is_job and isinstance(node, ast.FunctionDef):
        node.args.defaults, node.args.kw_defaults = [], []
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call):
            called = str(getattr(inner.func, "attr", getattr(inner.func, "id", None)))
            free = FREE if called == "Job" else LENGTHS.get(called, ())
            inner.keywords = [keyword for keyword in inner.keywords if keyword.arg not in free]
        body = getattr(inner, "body", None)
        if isinstance(inner, _DEFINITIONS) and isinstance(body, list) and _is_text(body[0]):
            inner.body = body[1:] or [ast.Pass()]
    return ast.Pass() if _is_text(node) else node


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _imported(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {(node.module or "").partition(".")[0]} if node.module else {alias.name for alias in node.names}
    return names - {""}
