"""Jobs that are Python objects: digests of their code, and their way to the ranks by name or as a pickle."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import linecache
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Literal

from shoal.installed import is_installed
from shoal.jobs.handed_job import HandedJob, import_path, pickled
from shoal.jobs.job import Job
from shoal.jobs.job_file import FREE, JOB_FILE, LENGTHS, JobModule, code, digest_of
from shoal.plans.grains import FEW_GRAINS

# Fields of a job that earlier runs did not have, with their defaults.
_ADDED = {"loss_by_rows": False, "batch_norm": "grain"}
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MOST_ITEMS = 64  # maximum number of items of a container to visit


def code_of(given: object) -> dict[str, dict[str, str]]:
    """Return digests of an object's code by file and definition, in the form of `job_file.code`.

    Functions and classes that are passed by value count individually, with the plain values that they read. The user's
    own modules count as a whole. If no source is available, for example in an interpreter, the bytecode counts.
    """
    digests = _Found()
    digests.visit(given, "the job", is_job=True)
    return {JOB_FILE: dict(sorted(digests.own.items())), **digests.files}


class _Found:
    """Collected digests. Each object is visited once."""

    def __init__(self) -> None:
        self.own: dict[str, str] = {}
        self.files: dict[str, dict[str, str]] = {}
        self._seen: set[int] = set()
        self._alive: list[object] = []  # keeps visited objects alive, so that no id is reused

    def visit(self, value: object, name: str, *, is_job: bool = False) -> None:
        """Add a value that is called `name`, and the objects that it uses."""
        if isinstance(value, _PLAIN):
            self._add(name, repr(value))
            return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._alive.append(value)
        if isinstance(value, FunctionType):
            self._function(value, name, is_job)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, ModuleType):
            self._origin(value.__name__)
        else:
            for part, inner in _parts(value, name):
                self.visit(inner, part)

    def _function(self, function: FunctionType, name: str, is_job: bool) -> None:
        own = function.__qualname__ if function.__name__.isidentifier() else name
        where = self._origin(function.__module__, own if is_job else "")
        if where == "here":
            self._add(own, _digest(function.__code__, is_job))
            if not is_job:  # the defaults of a job function are settings
                parameters = inspect.signature(function).parameters.values()
                defaults = ((p.name, p.default) for p in parameters if p.default is not p.empty)
                for part, value in defaults:
                    self.visit(value, f"{own}({part})")
        for part, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            self.visit(value, f"{own}: {part}" if isinstance(value, _PLAIN) else part)
        # Globals that the function, or a function inside it, refers to.
        names = dict.fromkeys(name for inner in _codes(function.__code__) for name in inner.co_names)
        known = [(name, function.__globals__[name]) for name in names if name in function.__globals__]
        for part, value in known if where != "installed" else ():
            if not isinstance(value, _PLAIN):
                self.visit(value, part)
            elif where == "here":  # a file's digest includes its values
                self.visit(value, f"{own}: {part}")

    def _class(self, kind: type) -> None:
        where = self._origin(kind.__module__)
        if where == "installed":
            return
        for base in kind.__bases__:
            self.visit(base, base.__qualname__)
        for name, value in vars(kind).items():
            value = getattr(value, "__func__", value)
            plain = where == "here" and isinstance(value, _PLAIN) and not name.startswith("__")
            if plain or isinstance(value, FunctionType):
                self.visit(value, f"{kind.__qualname__}.{name}")

    def _origin(self, name: str | None, job: str = "") -> Literal["here", "file", "installed"]:
        """Classify a module: part of this program ("here"), the user's own file, or an installed package.

        The user's own file is added as a whole. `job`: name of the job function, if it is in that file.
        """
        module = sys.modules.get(name or "")
        file = getattr(module, "__file__", None)
        if name == "__main__" or module is None:
            return "here"
        path = Path(file or "").resolve()
        if file is None or path.suffix != ".py" or is_installed(path):  # modules without a file belong to Python
            return "installed"
        # A package's own file is PACKAGE/__init__.py.
        depth = module.__name__.count(".") + (2 if path.stem == "__init__" else 1)
        label = "/".join(path.parts[-depth:])
        if label not in self.files:
            self.files[label] = {}
            of_file = code(JobModule.of_file(path), job)
            self.files |= {label if n == JOB_FILE else n: digests for n, digests in of_file.items()}
        return "file"

    def _add(self, name: str, text: str) -> None:
        before = self.own.get(name, "")
        self.own[name] = hashlib.sha256(f"{before}{text}".encode()).hexdigest()[:16]


def _parts(value: object, name: str) -> Iterator[tuple[str, object]]:
    """Yield the objects inside another object that may contain code."""
    if isinstance(value, Job):
        separate = (*FREE, *value.describe())  # a resume compares these separately
        given = ((part, getattr(value, part)) for part in value.__dataclass_fields__ if part not in separate)
        yield from ((part, inner) for part, inner in given if inner is not _ADDED.get(part))
        for number, callback in enumerate(value.callbacks):  # not called in this process, so without state
            attributes, free = getattr(callback, "__dict__", {}), LENGTHS.get(type(callback).__name__, ())
            yield from (
                (f"callbacks[{number}].{part}", inner) for part, inner in attributes.items() if part not in free
            )
    elif isinstance(value, functools.partial):
        yield from ((name, value.func), (name, value.args), (name, value.keywords))
    elif isinstance(value, MethodType):
        yield from ((name, value.__func__), (name, value.__self__))
    elif isinstance(value, Mapping):
        yield from ((f"{name}[{key!r}]", inner) for key, inner in list(value.items())[:_MOST_ITEMS])
    elif isinstance(value, list | tuple | set | frozenset):
        items = list(value)
        if isinstance(value, set | frozenset):  # its order differs between processes

            def label(item: object) -> str:
                return (
                    repr(item)
                    if isinstance(item, _PLAIN)
                    else str(getattr(item, "__qualname__", type(item).__qualname__))
                )

            items.sort(key=label)
        yield from ((name, inner) for inner in items[:_MOST_ITEMS] if not isinstance(inner, _PLAIN))
        if len(items) <= _MOST_ITEMS:
            yield name, repr([inner for inner in items if isinstance(inner, _PLAIN)])
    else:
        yield type(value).__qualname__, type(value)
        yield from _state(value, name)


def _state(value: object, name: str) -> Iterator[tuple[str, object]]:
    """Yield the attributes that define an instance's computation: all of a frozen dataclass, else only code.

    Other attributes, such as counters, caches and data, may change while the job stays the same.
    """
    kind: Any = type(value)
    if getattr(getattr(kind, "__dataclass_params__", None), "frozen", False):
        yield from ((f"{name}.{part.name}", getattr(value, part.name)) for part in fields(kind))
    else:
        attributes = getattr(value, "__dict__", {})
        code = (FunctionType, MethodType, functools.partial, type)
        yield from ((f"{name}.{part}", inner) for part, inner in attributes.items() if isinstance(inner, code))


def _codes(outer: CodeType) -> Iterator[CodeType]:
    yield outer
    for constant in outer.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _digest(of: CodeType, is_job: bool) -> str:
    node = _node(of)
    if node is not None:
        return digest_of([node], is_job=is_job)
    texts = [
        repr((inner.co_code, inner.co_names, [c for c in inner.co_consts if not isinstance(c, CodeType)]))
        for inner in _codes(of)
    ]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def _node(of: CodeType) -> ast.AST | None:
    """Return the syntax tree of a code object's definition, or None if its source is not readable or ambiguous."""
    lines = linecache.getlines(of.co_filename)
    if not lines:
        return None
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return None
    kinds = (ast.Lambda,) if of.co_name == "<lambda>" else (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [
        node
        for node in ast.walk(tree)
        if isinstance(node, kinds)
        and min(part.lineno for part in (node, *getattr(node, "decorator_list", []))) == of.co_firstlineno
    ]
    if len(nodes) > 1:
        nodes = [node for node in nodes if _surrounds(node, of)]
    named = [node for node in nodes if getattr(node, "name", of.co_name) == of.co_name]
    return named[0] if len(named) == 1 else None


def _surrounds(node: Any, of: CodeType) -> bool:
    """Check whether an instruction of the code has exactly the source position of the node's body."""
    body = node.body if isinstance(node, ast.Lambda) else node
    return (body.lineno, body.end_lineno, body.col_offset, body.end_col_offset) in of.co_positions()


# Paths for messages if a job is in no file.
NOTEBOOK, INTERPRETER = Path("notebook"), Path("interpreter")


def is_job(given: object) -> bool:
    """Check whether an object may be a job: a Job, or a function that returns one."""
    return isinstance(given, Job) or callable(given)


def function_name(given: object) -> str | None:
    """Return the name of a job function, or None for objects without a proper name, such as a Job or a lambda."""
    name = getattr(given, "__name__", None)
    return name if isinstance(name, str) and name.isidentifier() else None


def place_of(given: object) -> Path:
    """Return the file of an importable job function, or the script or notebook that contains the object."""
    module = importable_module(given)
    if module is not None:
        return Path(str(sys.modules[module].__file__))
    main = vars(sys.modules["__main__"])
    # The second is set by VS Code, the third by Jupyter.
    named = main.get("__file__") or main.get("__vsc_ipynb_file__") or os.environ.get("JPY_SESSION_NAME")
    if named:
        return Path(named)
    return NOTEBOOK if "ipykernel" in sys.modules else INTERPRETER


def importable_module(given: object) -> str | None:
    """Return the module from which other processes can import a job function by name, or None."""
    name, module = function_name(given), getattr(given, "__module__", None)
    imported = sys.modules.get(module) if isinstance(module, str) and module != "__main__" else None
    if name is None or imported is None or not str(getattr(imported, "__file__", None)).endswith(".py"):
        return None
    return module if getattr(imported, name, None) is given else None


def hand_over(given: object, folder: Path) -> HandedJob:
    """Prepare a job object for other processes. `folder`: place for its pickle, which must outlive them.

    Raises: CommandError if cloudpickle is required and missing; JobError if the object cannot be pickled.
    """
    module = importable_module(given)
    if module is not None:
        return HandedJob(module, None, import_path())
    target = pickled(
        given,
        folder / "job.pickle",
        given="shoal.run({!r:.80}, ...)",
        conflict="it cannot be handed to the ranks",
        remedy="make that inside of a function of the job, such as train_data=lambda: ..., which each rank calls; "
        'or write the job into a file, and give its path: shoal.run("file.py:job")',
    )
    known = (given.grains or FEW_GRAINS) if isinstance(given, Job) else None  # the default is never smaller
    return HandedJob(None, target, import_path(), code_of(given), known)
