"""Module of a job: its file, its full name, and the import path that every process of a run uses for it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import JobFileError, nearest

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
        known = sys.modules.get(self.name)
        package = ".".join(self.name.split(".")[: self.num_packages - (self.path.name == _INIT)])
        if package:
            self._refuse_other(importlib.import_module(package))
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

    def _refuse_other(self, package: types.ModuleType) -> None:
        """Check that an imported package of this name is from the job's folder. Raises: JobFileError."""
        here = os.path.dirname(os.path.abspath(self.path))
        here = os.path.dirname(here) if self.path.name == _INIT else here
        places = [os.path.abspath(place) for place in getattr(package, "__path__", ())]
        if not any(os.path.samefile(place, here) for place in places if os.path.isdir(place)):
            raise JobFileError(
                given=str(self.path),
                conflict=f"it is the module {self.name}, but the package {package.__name__} that Python has imported "
                f"is at {', '.join(places) or package.__name__}",
                remedy=f"rename the folder {here}, or remove its {_INIT} if it is no package",
            )

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

    Dotted names are searched in the current folder, then in the environment. Raises: JobFileError.
    """
    if is_path(text):
        path = Path(text)
        if not path.is_file():
            raise _missing(text, path)
        return JobModule.of_file(path)
    parts = text.split(".")
    if not all(part.isidentifier() for part in parts):
        raise _missing(text, Path(text))
    places: list[str] | None = None
    for number in range(1, len(parts) + 1):
        spec = _spec(parts[:number], places)
        if spec is None or (number < len(parts) and spec.submodule_search_locations is None):
            raise _missing(text, Path(text), parts[:number])
        places = list(spec.submodule_search_locations or ())
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        raise _missing(text, Path(text))
    path = Path(spec.origin)
    here = Path.cwd()
    return JobModule.of_name(path.relative_to(here) if path.is_relative_to(here) else path, text)


def _spec(parts: list[str], places: list[str] | None) -> importlib.machinery.ModuleSpec | None:
    """Find a module's spec without importing its packages. `places`: folders of the packages, None at the top level."""
    folders = places if places is not None else [os.getcwd(), *sys.path]
    # Use the last name only: for a dotted name, a namespace package would need its parent to be imported.
    spec = importlib.machinery.PathFinder.find_spec(parts[-1], folders)
    others = [] if spec is not None else [f for f in sys.meta_path if f is not importlib.machinery.PathFinder]
    for finder in others:  # for example finders of editable installs
        with contextlib.suppress(AttributeError, ImportError):
            spec = spec or finder.find_spec(".".join(parts), places)
    return spec


def _missing(text: str, path: Path, parts: list[str] | None = None) -> JobFileError:
    near = sorted(p.name for p in path.parent.glob("*.py"))
    go_on = f"; to go on with a run: shoal run JOBFILE --resume --out {text}" if path.is_dir() else ""
    dotted = parts is not None and "." in text and not path.is_dir()
    if path.is_dir():
        conflict = "it is a directory, not a job file"
    elif dotted:
        conflict = f"there is no such file, and no module {'.'.join(parts or ())} in {os.getcwd()} or the environment"
    else:
        conflict = "there is no such file"
    near = _modules_beside(parts) if dotted and parts is not None else near
    what = "a module with a job function, as package.module" if dotted else "a Python file that has a job function"
    return JobFileError(
        given=text, conflict=conflict, remedy=f"give {what}{nearest(text if dotted else path.name, near)}{go_on}"
    )


def _modules_beside(parts: list[str]) -> list[str]:
    """Return dotted names of the modules in the folder in which the last of `parts` is missing."""
    folder = Path(*parts[:-1]) if parts[:-1] else Path()
    names = sorted({path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/*.py")})
    return [".".join([*parts[:-1], name]) for name in names if name.isidentifier()]


def imported_from(folders: Iterable[str]) -> list[str]:
    """Return the files of modules that this process has imported from these folders or their subfolders."""
    starts = tuple(os.path.join(folder, "") for folder in folders)
    files = (_file_of(module) for module in list(sys.modules.values()))
    return [file for file in files if file is not None and file.startswith(starts)]


def _file_of(module: object) -> str | None:
    file = getattr(module, "__file__", None)
    return file if isinstance(file, str) and file.endswith(".py") else None
