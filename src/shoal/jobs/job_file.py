"""Job files: Python files with a function of typed, defaulted parameters that returns a Job.

The file is found as a module with its full name, and executed with the same import path in every process. Digests of
its source code and of the files that it reads show whether two jobs are the same.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import copy
import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import io
import json
import os
import re
import sys
import types
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shoal.errors import JobFileError, SettingError, ShoalError, nearest
from shoal.installed import is_installed, own_package
from shoal.jobs.config_file import ConfigFile, read_config
from shoal.jobs.handed_job import HandedJob
from shoal.jobs.job import Job, meant_field
from shoal.jobs.secret_settings import is_hidden, without_hidden, without_secrets
from shoal.jobs.settings import Setting, bind, is_below, layered, settings_from, source_of, written
from shoal.jobs.user_errors import NO_PACKAGE, place_of, remedy, traceback_of
from shoal.plans.grains import FEW_GRAINS

_INIT = "__init__.py"
_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class JobModule:
    """File of a job, and its full module name.

    The name includes all packages (folders with an `__init__.py`) that the file is in. `num_packages`: number of
    package folders above the file, including its own.
    """

    path: Path
    name: str
    num_packages: int = 0

    @classmethod
    def of_file(cls, path: Path) -> JobModule:
        """Return the module of a file."""
        folder = Path(os.path.abspath(path)).parent
        parts = [] if path.name == _INIT else [path.stem]
        while (folder / _INIT).is_file() and folder.name.isidentifier():
            parts.insert(0, folder.name)
            folder = folder.parent
        num_packages = len(parts) - (path.name != _INIT)
        return cls(path, ".".join(parts) or path.stem, num_packages)

    @classmethod
    def of_name(cls, path: Path, name: str) -> JobModule:
        """Return the module of a dotted name that is in the given file."""
        return cls(path, name, name.count(".") + (path.name == _INIT))

    @property
    def root(self) -> Path:
        """The folder from which the full name is imported: above the topmost package, or the file's own folder."""
        if not self.num_packages:
            return self.path.resolve().parent  # Python does the same for a script behind a symbolic link
        return Path(os.path.abspath(self.path)).parents[self.num_packages]

    @property
    def package(self) -> Path | None:
        """The folder of the topmost package, or None if the file is in no package."""
        return self.root / self.name.partition(".")[0] if self.num_packages else None

    @property
    def folders(self) -> tuple[str, ...]:
        """Folders from which the job's own modules are imported, in the order of the import path.

        The own folder of a file in packages is last, so that its modules do not hide installed ones.
        """
        return tuple(dict.fromkeys((*self._first, os.path.dirname(os.path.abspath(self.path)))))

    @property
    def _first(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((str(self.root), os.getcwd())))

    def set_import_path(self) -> None:
        """Set the same `sys.path` in every process: the root, the current folder, the environment, the own folder."""
        own = {"", *self.folders}
        rest = dict.fromkeys(folder for folder in sys.path if folder not in own)
        sys.path[:] = [*self._first, *rest, *self.folders[len(self._first) :]]

    def execute(self) -> Any:
        """Execute the module again, after importing its packages. Raises: JobFileError and errors of the code."""
        self.set_import_path()
        own_package(self.package)
        known = sys.modules.get(self.name)
        package = ".".join(self.name.split(".")[: self.num_packages - (self.path.name == _INIT)])
        if package:  # an imported package of this name is to be from the job's folder
            parent = importlib.import_module(package)
            here = os.path.dirname(os.path.abspath(self.path))
            here = os.path.dirname(here) if self.path.name == _INIT else here
            places = [os.path.abspath(place) for place in getattr(parent, "__path__", ())]
            if not any(place == here or (os.path.isdir(place) and os.path.samefile(place, here)) for place in places):
                raise JobFileError(
                    given=str(self.path),
                    conflict=f"it is the module {self.name}, but the package {parent.__name__} that Python has "
                    f"imported is at {', '.join(places) or parent.__name__}",
                    remedy=f"rename the folder {here}, or remove its {_INIT} if it is no package",
                )
        imported = sys.modules.get(self.name)
        if imported is not known and _file_of(imported) == os.path.abspath(self.path):
            return imported  # its package has just imported it
        loader = _SourceLoader(self.name, os.path.abspath(self.path)) if self.path.suffix == ".py" else None
        inner = [os.path.dirname(os.path.abspath(self.path))] if self.path.name == _INIT else None
        spec = importlib.util.spec_from_file_location(
            self.name, self.path, loader=loader, submodule_search_locations=inner
        )
        if spec is None or spec.loader is None:
            raise JobFileError(
                given=str(self.path),
                conflict="Python does not load files of this kind",
                remedy="give a file that ends in .py",
            )
        module = importlib.util.module_from_spec(spec)
        # Register it under its own name, so that DataLoader workers and dataclasses find it.
        sys.modules.setdefault(self.name, module)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            if sys.modules.get(self.name) is module:
                del sys.modules[self.name]
            raise
        return module

    def refuse_hidden_shoal(self) -> None:
        """Check that no file of the job is imported as `shoal` in the run's processes. Raises: JobFileError."""
        for folder in self._first:
            for place in (Path(folder, "shoal.py"), Path(folder, "shoal", _INIT)):
                if place.is_file() and place.resolve() != _PACKAGE / _INIT:
                    raise JobFileError(
                        given=str(place),
                        conflict="`import shoal` finds this file before the package shoal, in ranks and data workers",
                        remedy=f"rename {place.name if place.name != _INIT else place.parent.name}, say to my_shoal"
                        f"{'.py' if place.name != _INIT else ''}",
                    )


class _SourceLoader(importlib.machinery.SourceFileLoader):
    """Loader that ignores cached bytecode, which Python validates only by file size and mtime in seconds."""

    def get_code(self, fullname: str) -> types.CodeType:
        path = self.get_filename(fullname)
        compiled: types.CodeType = self.source_to_code(self.get_data(path), path)
        return compiled

    def get_data(self, path: str) -> bytes:
        return read_source(Path(path))


def read_source(path: Path) -> bytes:
    """Return the content of a file, or of a member of a zip archive. Raises: OSError."""
    archive = next((folder for folder in path.parents if folder.is_file()), None)
    if archive is None:
        return path.read_bytes()
    try:
        with zipfile.ZipFile(archive) as opened:
            return opened.read(path.relative_to(archive).as_posix())
    except (KeyError, zipfile.BadZipFile) as error:
        raise FileNotFoundError(f"{archive} has no member {path.relative_to(archive)}") from error


def split_target(target: str) -> tuple[str, str | None]:
    """Split `FILE_OR_MODULE[:FUNCTION]` at the last colon."""
    text, colon, function = target.rpartition(":")
    if not colon or is_path(target):
        return target, None
    return text, function or None


def is_path(text: str) -> bool:
    """Check whether a target is a file path, not a dotted module name."""
    return text.endswith(".py") or Path(text).is_file()


def located(text: str) -> JobModule:
    """Find the module for a path or a dotted name, without running the job's code.

    Dotted names are searched in the current folder, in its folder `src`, then in the environment. Raises: JobFileError.
    """
    if is_path(text):
        path = Path(text)
        if not path.is_file():
            if path.exists() and not path.is_dir():
                raise JobFileError(
                    given=text, conflict="it is no regular file", remedy="write the job to a file, and give that"
                )
            raise _missing(text, path)
        if zipfile.is_zipfile(path):
            raise JobFileError(
                given=text,
                conflict="it is an archive, which may have many modules",
                remedy=f"write PYTHONPATH={text} shoal run PACKAGE.MODULE:FUNCTION",
            )
        return JobModule.of_file(path)
    parts = text.split(".")
    if not all(part.isidentifier() for part in parts):
        raise _missing(text, Path(text))
    here = Path.cwd()
    in_src = [] if (here / "src" / _INIT).is_file() else [str(here / "src")]
    places = [str(here), *in_src, *sys.path]
    for number in range(1, len(parts) + 1):
        spec = _spec(parts[:number], places)
        if spec is None or (number < len(parts) and spec.submodule_search_locations is None):
            raise _missing(text, Path(text), parts[:number])
        places = list(spec.submodule_search_locations or ())
    place = _place(spec)
    if place is None:
        raise _missing(text, Path(text))
    return JobModule.of_name(place.relative_to(here) if place.is_relative_to(here) else place, text)


def _spec(parts: Sequence[str], places: list[str]) -> importlib.machinery.ModuleSpec | None:
    """Find a module's spec without importing its packages. `places`: folders of the package, or the import path."""
    # Use the last name only: for a dotted name, a namespace package would need its parent to be imported.
    spec = importlib.machinery.PathFinder.find_spec(parts[-1], places)
    # Finders of editable installs; others may import what they find.
    others = [f for f in sys.meta_path if "editable" in str(getattr(f, "__module__", ""))]
    for finder in others if spec is None else []:
        with contextlib.suppress(AttributeError, ImportError):
            spec = spec or finder.find_spec(".".join(parts), places)
    return spec


def _place(spec: importlib.machinery.ModuleSpec | None) -> Path | None:
    """Return the file of a module, or None for a namespace package or a module of the interpreter."""
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def _missing(text: str, path: Path, parts: list[str] | None = None) -> JobFileError:
    near = sorted(p.name for p in path.parent.glob("*.py"))
    go_on = f"; to go on with a run: shoal run JOBFILE --resume --out {text}" if path.is_dir() else ""
    dotted = parts is not None and "." in text and not path.is_dir()
    if path.is_dir():
        conflict = "it is a directory, not a job file"
    elif dotted:
        name = ".".join(parts or ())
        conflict = f"there is no such file, and no module {name} in {os.getcwd()}, its folder src or the environment"
    else:
        conflict = "there is no such file"
    if dotted and parts is not None:  # modules in the folder in which the last part is missing
        folders = Path(*parts[:-1]), Path("src", *parts[:-1])
        paths = [path for folder in folders for pattern in ("*.py", "*/*.py") for path in folder.glob(pattern)]
        stems = {path.parent.name if path.parent not in folders else path.stem for path in paths}
        near = [".".join([*parts[:-1], name]) for name in sorted(stems) if name.isidentifier()]
    what = (
        "a module, as package.module, whose package is there, installed or on PYTHONPATH"
        if dotted
        else "a Python file that has a job function"
    )
    return JobFileError(
        given=text, conflict=conflict, remedy=f"give {what}{nearest(text if dotted else path.name, near)}{go_on}"
    )


def _file_of(module: object) -> str | None:
    file = getattr(module, "__file__", None)
    return file if isinstance(file, str) and file.endswith(".py") else None


JOB_FILE = "the job file"
_REST = "(other lines)"
# Arguments of Job that a resume may change.
FREE = ("length", "on_nonfinite", "predict")
# Arguments of callbacks that a resume may change, like the length.
LENGTHS = {"EarlyStopping": ("patience",)}
_STATEMENTS = (ast.stmt, ast.ExceptHandler, ast.match_case)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def sources(module: JobModule, also: Iterable[str] = ()) -> Iterator[tuple[Path, ast.Module]]:
    """Yield the job's file and its own modules, imported transitively, with their syntax trees.

    A module is the job's own if it is in the job's package, or is not installed. `also`: additional files to start
    from. Files that are not valid Python are skipped.
    """
    search = _Search(module)
    waiting, seen = [Path(os.path.abspath(module.path)), *map(Path, also)], set[Path]()
    while waiting:
        path = waiting.pop(0)
        if path in seen:
            continue
        seen.add(path)
        try:
            tree = ast.parse(read_source(path))
        except (OSError, SyntaxError, ValueError):
            continue
        imports = search.imported(tree, path)  # before the yield: the caller may change the tree
        yield path, tree
        waiting += imports


def code(module: JobModule, function: str, imported: Iterable[str] = ()) -> dict[str, dict[str, str]]:
    """Return digests of a job's code by file and definition.

    `imported`: files of imported modules; the job's own modules among them are included.
    The digests ignore comments, docstrings, line numbers, the job's length and its policy for bad steps. They also
    ignore the defaults of the job `function`'s parameters, which are settings.
    """
    path, package = Path(os.path.abspath(module.path)), module.package
    digests = {}
    for file, tree in sources(module, (file for file in imported if _is_of_job(file, package))):
        inside = next(
            (folder for folder in (*module.folders, *sys.path) if folder and file.is_relative_to(folder)), None
        )
        name = JOB_FILE if file == path else str(file.relative_to(inside) if inside is not None else file)
        parts: dict[str, list[ast.stmt]] = {}
        for node in tree.body:
            parts.setdefault(node.name if isinstance(node, _DEFINITIONS) else _REST, []).append(node)
        # Change the trees in place: copies would double the time in each rank that starts.
        job = function if file == path else None
        digests[name] = {part: _digest(nodes, is_job=part == job) for part, nodes in parts.items()}
    return digests


def _is_of_job(path: Path | str, package: Path | None) -> bool:
    """Check whether a file is in the job's topmost package, or is not installed."""
    return not is_installed(path) or (package is not None and Path(path).is_relative_to(package))


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
    for inner in _nodes(node):
        if isinstance(inner, ast.Call):
            called = str(getattr(inner.func, "attr", getattr(inner.func, "id", None)))
            free = FREE if called == "Job" else LENGTHS.get(called, ())
            inner.keywords = [keyword for keyword in inner.keywords if keyword.arg not in free]
        body = getattr(inner, "body", None)
        if isinstance(inner, _DEFINITIONS) and isinstance(body, list) and _is_text(body[0]):
            inner.body = body[1:] or [ast.Pass()]
    return ast.Pass() if _is_text(node) else node


def _nodes(tree: ast.AST, kinds: tuple[type[ast.AST], ...] = (ast.AST,)) -> list[ast.AST]:
    """Return a node and all nodes of these kinds below it, in the order of `ast.walk`, which takes three times longer.

    The nodes below a node of another kind are left out.
    """
    nodes = [tree]
    for node in nodes:
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                nodes += [one for one in value if isinstance(one, kinds)]
            elif isinstance(value, kinds):
                nodes.append(value)
    return nodes


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


class _Search:
    """The files that imports of the job's own modules lead to, without executing them."""

    def __init__(self, module: JobModule) -> None:
        self._package = module.package
        self._folders = [folder for folder in dict.fromkeys((*module.folders, *sys.path)) if folder]
        self._known: dict[tuple[str, tuple[str, ...]], importlib.machinery.ModuleSpec | None] = {}

    def imported(self, tree: ast.Module, path: Path) -> list[Path]:
        """Return the own files that a module imports, including packages on the way."""
        files = [path.parent / _INIT]  # if there is one
        for node in _nodes(tree, _STATEMENTS):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    files += self._files(alias.name.split("."), self._folders)
            elif isinstance(node, ast.ImportFrom) and node.level <= len(path.parents):
                within = self._parts_of(path.parents[node.level - 1]) if node.level else self._folders
                for alias in node.names:
                    files += self._files([*(node.module or "").split("."), alias.name], within)
        return files

    def _parts_of(self, folder: Path) -> list[str]:
        """Return a package's folder, and the other folders of a namespace package."""
        root = next((root for root in self._folders if folder.is_relative_to(root)), None)
        if root is None or (folder / _INIT).is_file():
            return [str(folder)]
        return [str(folder), *(str(Path(other, folder.relative_to(root))) for other in self._folders)]

    def _files(self, parts: Sequence[str], places: list[str]) -> list[Path]:
        """Return the own files of a dotted name."""
        files: list[Path] = []
        for number, part in enumerate(parts):
            if not part:
                continue
            key = part, tuple(places)
            if key not in self._known:
                self._known[key] = _spec(parts[: number + 1], places)
            spec = self._known[key]
            path, places = _place(spec), list((spec and spec.submodule_search_locations) or ())
            if path is not None and _is_of_job(path, self._package):
                files.append(path)
            if not any(_is_of_job(Path(place, part), self._package) for place in places):
                break
        return files


_MOST_FILES = 256
_WHOLE_BYTES = 1 << 20  # of longer files, blocks of this total size are hashed
_BLOCK_BYTES = 1 << 16


@contextlib.contextmanager
def files_read() -> Iterator[list[str]]:
    """Collect the paths (at most 256) that the job's own code opens for reading with Python's `open` in a context.

    Files that a library opens during its import, and files that are also opened for writing, do not count.
    """
    read_paths: dict[str, None] = {}
    written: set[str] = set()
    paths: list[str] = []
    plain, is_active = builtins.open, True

    def watched(file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        opened = plain(file, mode, *arguments, **named)
        if is_active and isinstance(file, str | os.PathLike) and len(read_paths) < _MOST_FILES:
            path = os.path.abspath(os.fsdecode(file))
            if any(letter in mode for letter in "wax+"):
                written.add(path)
            elif path not in read_paths and os.path.isfile(path) and _is_read_by_job():
                read_paths[path] = None
        return opened

    builtins.open = io.open = watched
    try:
        yield paths
    finally:
        is_active = False  # a library may still refer to `watched`
        builtins.open = io.open = plain
        paths += (path for path in read_paths if path not in written and not _is_library(path))


def digests_of(paths: Iterable[str], folders: Iterable[str]) -> dict[str, str]:
    """Return digests by path, relative to the first of the folders that contains the file."""
    digests = {}
    for path in paths:
        inside = next((folder for folder in folders if Path(path).is_relative_to(folder)), None)
        with contextlib.suppress(OSError):
            size = os.path.getsize(path)
            digest = hashlib.sha256(str(size).encode())
            with open(path, "rb") as file:
                if size <= _WHOLE_BYTES:
                    digest.update(file.read())
                else:
                    num_blocks = _WHOLE_BYTES // _BLOCK_BYTES
                    for number in range(num_blocks):
                        file.seek((size - _BLOCK_BYTES) * number // (num_blocks - 1))
                        digest.update(file.read(_BLOCK_BYTES))
            digests[os.path.relpath(path, inside) if inside is not None else path] = digest.hexdigest()[:16]
    return digests


def _is_read_by_job() -> bool:
    """Check whether the job's own code called `open`, directly or through a library, outside of an import."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith("<frozen importlib"):
            return False
        if not name.startswith("<frozen") and not _is_library(name):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


@functools.cache
def _is_library(path: str) -> bool:
    return is_installed(path) or path.startswith(("/proc/", "/sys/", "/dev/"))


@dataclass(frozen=True)
class JobRequest:
    """Source of a job: a file, a function in it, its settings and the configuration files that some are from.

    `handed`: how a job object reaches the ranks. `path` is then only for messages and is not loaded.
    `dotted`: the module's name if the target was a dotted name. Otherwise the file's place in packages gives the name.
    """

    path: Path
    function: str | None = None
    settings: tuple[tuple[str, Setting], ...] = ()
    handed: HandedJob | None = None
    dotted: str | None = None
    config: tuple[ConfigFile, ...] = ()

    @property
    def module(self) -> JobModule:
        """The job's file with its full module name."""
        known = self.handed.module if self.handed is not None else self.dotted
        return JobModule.of_file(self.path) if known is None else JobModule.of_name(self.path, known)

    @property
    def target(self) -> str:
        """The file or module in the form that the command takes."""
        return self.dotted or str(self.path)

    @property
    def argument(self) -> str:
        """The word of a command that names the job: the target, and the function if the request has one."""
        return f"{self.target}:{self.function}" if self.function else self.target

    @property
    def name(self) -> str:
        """A short name for the run: the module's, with the function's unless that is `job`."""
        extra = f"-{self.function}" if self.function and self.function != "job" else ""
        return (self.path.stem if self.by_value else self.module.name) + extra

    @property
    def least_grains(self) -> int | None:
        """A lower bound of the job's number of grains; None if only running its code shows it."""
        by_value = self.handed if self.by_value else None
        return by_value.least_grains if by_value is not None else least_grains(self.module)

    @property
    def by_value(self) -> bool:
        """True if the job is an object that cannot be imported from a file, and is passed as a pickle."""
        return self.handed is not None and self.handed.module is None


@dataclass(frozen=True)
class LoadedJob:
    """A Job with the function and the complete settings (JSON values, secrets hidden) that created it."""

    job: Job
    function: str
    settings: dict[str, Any]
    file_sha256: str
    code: dict[str, dict[str, str]] = field(default_factory=dict)  # digests from `code`
    module: str = ""  # full name of the job's module, or "" if the job came by value
    files: tuple[str, ...] = ()  # paths of files that the job's code read while it was loaded
    draws: bool = True  # whether it may have drawn unseeded random values while it was loaded

    def describe(self) -> dict[str, Any]:
        """Return a JSON description of the training problem: names, numbers and code digests."""
        known = {"file_sha256": self.file_sha256, "function": self.function, "settings": self.settings}
        return {**known, "code": self.code, **self.job.describe()}


def parse_target(
    target: str | JobRequest, settings: Sequence[str | tuple[str, Setting]], config: Sequence[str] = ()
) -> JobRequest:
    """Parse `FILE[:FUNCTION]` or `MODULE[:FUNCTION]`, settings (`name=value` texts or pairs) and configuration files.

    Settings replace values of the files, and later files those of earlier ones. A request is returned as it is.

    Raises: JobFileError for a missing file; SettingError for a text that is not name=value; as `read_config`.
    """
    if isinstance(target, JobRequest):
        return target
    text, function = split_target(target)
    if text == "hf" and not Path(text).is_file():
        raise JobFileError(
            given=target,
            conflict="a configuration can be planned, and has no data to train on",
            remedy="write a job file that builds the model, as examples/hugging_face.py",
        )
    module = located(text)
    module.refuse_hidden_shoal()
    pairs = [setting for setting in settings if not isinstance(setting, str)]
    for text in (setting for setting in settings if isinstance(setting, str)):
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise SettingError(
                given=f"--set {text}", conflict="a setting is name=value", remedy=f"write --set {name or 'name'}=VALUE"
            )
        name = name.strip()
        previous = dict(pairs).get(name, value)
        if previous != value:
            both = f"{written(name, previous)} {written(name, value)}"
            raise SettingError(given=both, conflict=f"{name} is set twice", remedy="write one")
        pairs.append((name, value))
    dotted = module.name if module.name != JobModule.of_file(module.path).name else None
    return with_config(JobRequest(module.path, function, tuple(pairs), dotted=dotted), config)


def with_config(request: JobRequest, config: Sequence[str]) -> JobRequest:
    """Return a request with the settings of configuration files below its own. Raises: as `read_config`."""
    files = [read_config(path) for path in config]
    layers = [settings_from(values, file.path).items() for values, file in files]
    return replace(request, settings=layered(*layers, request.settings), config=tuple(file for _, file in files))


def with_settings_of(request: JobRequest, saved: Mapping[str, Any], *, all_known: bool = False) -> JobRequest:
    """Return a request with the settings of a run below its own. Its own configuration files replace the run's.

    Args:
        saved: job.json of the run.
        all_known: refuse secrets of the run, whose values are not recorded, unless the request has them.

    Raises: SettingError.
    """
    own, given = dict(request.settings), saved.get("given") or {}
    unknown = [n for n, setting in given.items() if is_hidden(setting) and not any(is_below(n, one) for one in own)]
    if all_known and unknown:
        raise SettingError(
            given=f"no value of {', '.join(unknown)}",
            conflict="the run was given one, and a run directory has no secrets",
            remedy=f"give it again: {' '.join(f'--set {name}=...' for name in unknown)}, or settings= from Python",
        )
    of_run = ((n, s) for n, s in without_hidden(given).items() if not (request.config and source_of(s)))
    from_files = [(name, setting) for name, setting in own.items() if source_of(setting)]
    others = [(name, setting) for name, setting in own.items() if not source_of(setting)]
    files = request.config or tuple(ConfigFile(**one) for one in saved.get("config") or ())
    return replace(request, settings=layered(from_files, of_run, others), config=files)


# A job must not depend on the number of devices. With these variables, libraries such as Accelerate (in a
# TrainingArguments) would also join the ranks by themselves, at the address that shoal's ranks use.
_OF_DEVICES = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def load(request: JobRequest) -> LoadedJob:
    """Run the job file and its function, with the number of ranks hidden from its environment.

    Raises: JobFileError, SettingError, JobError.
    """
    name, handed = request.function or "job", request.handed
    hidden = {variable: os.environ.pop(variable) for variable in _OF_DEVICES if variable in os.environ}
    try:
        with files_read() as files:
            if handed is None:
                given = _executed(request)
            else:
                try:
                    given = handed.fetch(request.function)
                except ShoalError:
                    raise
                except Exception as error:
                    raise _raised(str(request.path), error) from error
            job, settings = called(given, request)
    finally:
        os.environ.update(hidden)
    if request.by_value:
        assert handed is not None
        digest = hashlib.sha256(json.dumps(handed.code, sort_keys=True).encode()).hexdigest()
        return LoadedJob(job, name, settings, digest, handed.code, files=tuple(files))
    module = request.module
    # Modules from before the job was loaded count too: `sitecustomize` may have imported some.
    starts = tuple(os.path.join(folder, "") for folder in module.folders)
    imported = [file for file in map(_file_of, list(sys.modules.values())) if file and file.startswith(starts)]
    digests = code(module, name, imported)
    return LoadedJob(job, name, settings, file_sha256(request.path), digests, module.name, tuple(files))


def file_sha256(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file. Raises: OSError."""
    return hashlib.sha256(read_source(path)).hexdigest()


def called(given: Any, request: JobRequest) -> tuple[Job, dict[str, Any]]:
    """Return the Job from a job function with its complete settings. A given Job is returned with no settings.

    Raises: JobFileError, SettingError, JobError.
    """
    where = f"{request.target}:{request.function or 'job'}"
    if isinstance(given, Job):
        if request.settings:
            raise SettingError(
                given=", ".join(written(name, setting) for name, setting in request.settings),
                conflict="a Job is complete: settings are the parameters of a function that makes one",
                remedy="write def job(...): return shoal.Job(...), and give the function, without calling it",
            )
        return given, {}
    values, complete = bind(given, dict(request.settings), where)
    try:
        job = given(**values)
    except ShoalError:
        raise
    except Exception as error:
        raise _raised(where, error) from error
    if not isinstance(job, Job):
        raise JobFileError(
            given=f"{where} returned {type(job).__name__}",
            conflict="a job function returns a shoal.Job",
            remedy="end the function with: return shoal.Job(...)",
        )
    return job, without_secrets(complete)


def _executed(request: JobRequest) -> Any:
    """Run the job's module, and return the requested function. Raises: JobFileError."""
    module, name = request.module, request.function or "job"
    try:
        executed = module.execute()
    except ShoalError:
        raise
    except SystemExit as error:
        place = place_of(error)
        failure = JobFileError(
            given=str(module.path),
            conflict=f"it ended the program while it was imported (SystemExit: {error.code}){place}; a file that "
            "parses its own options at import reads those of `shoal`",
            remedy="make the options parameters of the job function, and give them with --set NAME=VALUE; call "
            'parse_args() and exit() below `if __name__ == "__main__":` only',
        )
        failure.traceback_text = traceback_of(error)
        raise failure from error
    except Exception as error:
        raise _raised(str(module.path), error) from error
    function = getattr(executed, name, None)
    if callable(function) or isinstance(function, Job):
        return function
    functions = {n: f for n, f in vars(executed).items() if inspect.isfunction(f) and not n.startswith("_")}
    own = [name for name, function in functions.items() if function.__module__ == executed.__name__]
    raise JobFileError(
        given=f"{request.target}:{name}",
        conflict=f"the file has no function of that name (it has {', '.join(own) or 'none'})",
        remedy=f"write {request.target}:FUNCTION with one of them{nearest(name, own)}",
    )


def _raised(where: str, error: Exception) -> JobFileError:
    place = place_of(error)
    if isinstance(error, SyntaxError):
        place = f" at {error.filename}:{error.lineno}"
    what_to_do = remedy(error, has_line=bool(place))
    if unknown := re.search(r"\bJob\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error)):
        what_to_do += f"; Job has no {unknown[1]}: {meant_field(unknown[1])}"
    failure = JobFileError(
        given=where,
        conflict=f"it raised {type(error).__name__}: {error}{place}",
        remedy=what_to_do if NO_PACKAGE in str(error) else f"{what_to_do}; the file must run by itself under `python`",
    )
    failure.traceback_text = traceback_of(error)
    return failure


def least_grains(module: JobModule) -> int | None:
    """Return a lower bound of the number of grains of the file's job, or None if only running the file shows it.

    The file and the modules that it imports from its own folders are parsed. They show the bound if they call Job and
    every `grains` in them is a keyword with a literal number.
    """
    trees = [tree for _, tree in sources(module)]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    if not any("Job" in (getattr(call.func, "attr", None), getattr(call.func, "id", None)) for call in calls):
        return None
    numbers = [FEW_GRAINS]  # the default number of grains is never smaller
    for keyword in (keyword for call in calls for keyword in call.keywords if keyword.arg == "grains"):
        if not (isinstance(keyword.value, ast.Constant) and type(keyword.value.value) is int):
            return None
        numbers.append(keyword.value.value)
    # A variable, an attribute, a parameter or a string named `grains` may set another number.
    fields = {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg", ast.Constant: "value"}
    nodes = (node for tree in trees for node in ast.walk(tree) if type(node) in fields)
    return None if any(getattr(node, fields[type(node)]) == "grains" for node in nodes) else min(numbers)


def parameters_of(target: str) -> list[str]:
    """Return the parameter names of a target's function, or [] if the file, module or function is missing."""
    text, function = split_target(target)
    function = function or "job"
    try:
        body = ast.parse(read_source(located(text).path)).body
    except (OSError, SyntaxError, ValueError, JobFileError):
        return []
    definition = next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == function), None)
    if definition is None:
        return []
    return [
        argument.arg for argument in (*definition.args.posonlyargs, *definition.args.args, *definition.args.kwonlyargs)
    ]
