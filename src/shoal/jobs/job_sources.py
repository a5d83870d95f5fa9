"""Source code of a job: its file, its own modules that the file imports, and digests of their definitions."""

from __future__ import annotations

import ast
import copy
import functools
import hashlib
import os
import site
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from shoal.jobs.job_module import JobModule

JOB_FILE = "the job file"
_REST = "(other lines)"
_INIT = "__init__.py"
_PACKAGE = Path(__file__).resolve().parents[1]
# Arguments of Job that a resume may change.
FREE = ("length", "on_nonfinite", "predict")
# Arguments of callbacks that a resume may change, like the length.
LENGTHS = {"EarlyStopping": ("patience",)}
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def sources(module: JobModule, also: Iterable[str] = ()) -> Iterator[tuple[Path, ast.Module]]:
    """Yield the job's file and its own modules, imported transitively, with their syntax trees.

    A module is the job's own if it is in the job's package, the folder above it or the current folder, and is not
    installed. `also`: additional files to start from. Files that are not valid Python are skipped.
    """
    roots, package = [*map(Path, module.folders)], module.package
    waiting, seen = [Path(os.path.abspath(module.path)), *map(Path, also)], set[Path]()
    while waiting:
        path = waiting.pop(0)
        if path in seen:
            continue
        seen.add(path)
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue
        imports = list(_imported(tree, path, roots))  # before the yield: the caller may change the tree
        yield path, tree
        waiting += (file for file in imports if _is_of_job(file, package))


def code(module: JobModule, function: str, imported: Iterable[str] = ()) -> dict[str, dict[str, str]]:
    """Return digests of a job's code by file and definition.

    `imported`: files of imported modules; the job's own modules among them are included.
    The digests ignore comments, docstrings, line numbers, the job's length and its policy for bad steps. They also
    ignore the defaults of the job `function`'s parameters, which are settings.
    """
    path, package = Path(os.path.abspath(module.path)), module.package
    digests = {}
    for file, tree in sources(module, (file for file in imported if _is_of_job(file, package))):
        inside = next((folder for folder in module.folders if file.is_relative_to(folder)), None)
        name = JOB_FILE if file == path else str(file.relative_to(inside) if inside is not None else file)
        digests[name] = _digests(tree, function if file == path else None)
    return digests


def is_installed(path: str | Path) -> bool:
    """Check whether a file belongs to Python, shoal or an installed package."""
    return str(path).startswith(_installed())


@functools.cache
def _installed() -> tuple[str, ...]:
    """Return folder prefixes with a trailing slash, since comparing strings is fast for thousands of modules."""
    known = [*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages()]
    folders = [_PACKAGE, *(path for folder in known for path in (Path(folder), Path(folder).resolve()))]
    return tuple({f"{folder}{os.sep}": None for folder in folders})


def _is_of_job(path: Path | str, package: Path | None) -> bool:
    """Check whether a file is in the job's topmost package, or is not installed."""
    return not is_installed(path) or (package is not None and Path(path).is_relative_to(package))


def _digests(tree: ast.Module, function: str | None) -> dict[str, str]:
    parts: dict[str, list[ast.stmt]] = {}
    for node in tree.body:
        parts.setdefault(node.name if isinstance(node, _DEFINITIONS) else _REST, []).append(node)
    # Change the trees in place: copies would double the time in each rank that starts.
    return {name: _digest(nodes, is_job=name == function) for name, nodes in parts.items()}


def digest_of(nodes: Sequence[ast.AST], *, is_job: bool = False) -> str:
    """Return the digest of statements or expressions. `is_job`: ignore the defaults of the function's parameters."""
    return _digest([copy.deepcopy(node) for node in nodes], is_job)


def _digest(nodes: Sequence[ast.AST], is_job: bool) -> str:
    """Return the digest as `digest_of`, modifying the nodes."""
    texts = [ast.dump(_bare(node, is_job)) for node in nodes]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def _bare(node: ast.AST, is_job: bool) -> ast.AST:
    """Remove the parts of a statement that do not affect the computation, in place."""
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


def _imported(tree: ast.Module, path: Path, roots: Sequence[Path]) -> Iterator[Path]:
    """Yield the files that a module imports from the roots, including packages on the way."""
    if (path.parent / _INIT).is_file():
        yield path.parent / _INIT
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _first_of(roots, alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            within = [path.parents[node.level - 1]] if 0 < node.level <= len(path.parents) else roots
            parts = (node.module or "").split(".") if node.module else []
            for alias in node.names:
                yield from _first_of(within, [*parts, alias.name])


def _first_of(roots: Sequence[Path], parts: Sequence[str]) -> list[Path]:
    """Return the files of a dotted name in the first folder that has its first part."""
    return next((files for files in (_files(root, parts) for root in roots) if files), [])


def _files(folder: Path, parts: Sequence[str]) -> list[Path]:
    files: list[Path] = []
    for part in parts:
        file, folder = folder / f"{part}.py", folder / part
        if (folder / _INIT).is_file():
            files.append(folder / _INIT)
        elif file.is_file():
            return [*files, file]
        elif not folder.is_dir():
            break
    return files
