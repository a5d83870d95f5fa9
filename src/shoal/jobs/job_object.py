"""Jobs given as Python objects: passed to ranks by name if they can be imported, else as a pickle.

The pickle is only for this call's own processes, in a private folder that is removed at the end of the call. shoal
reads no other pickles.
"""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.errors import CommandError, JobError
from shoal.jobs.job import Job
from shoal.jobs.object_sources import code_of
from shoal.plans.grains import FEW_GRAINS

# Paths for messages if a job is in no file.
NOTEBOOK, INTERPRETER = Path("notebook"), Path("interpreter")
_PICKLE = "job.pickle"


@dataclass(frozen=True)
class HandedJob:
    """A job object for other processes: the module to import it from, or the file with its pickle.

    `least_grains`: lower bound of its number of grains, if known.
    `import_path`: sys.path of the process that passed the job.
    `code`: code digests of a job that is passed by value.
    """

    module: str | None
    file: Path | None
    import_path: tuple[str, ...]
    code: dict[str, dict[str, str]] = field(default_factory=dict)
    least_grains: int | None = None

    def fetch(self, function: str | None) -> Any:
        """Return the job object in a receiving process. Raises: errors of its imports."""
        own = [folder for folder in sys.path if folder not in self.import_path]
        sys.path[:] = [*self.import_path, *own]
        if self.module is not None:
            return getattr(importlib.import_module(self.module), str(function))
        assert self.file is not None, "a job without a module is in a file"
        with self.file.open("rb") as file:
            return _pickler().load(file)


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
        return HandedJob(module, None, _import_path())
    target = _pickled(
        given,
        folder / _PICKLE,
        given="shoal.run({!r:.80}, ...)",
        conflict="it cannot be handed to the ranks",
        remedy="make that inside of a function of the job, such as train_data=lambda: ..., which each rank calls; "
        'or write the job into a file, and give its path: shoal.run("file.py:job")',
    )
    known = (given.grains or FEW_GRAINS) if isinstance(given, Job) else None  # the default is never smaller
    return HandedJob(None, target, _import_path(), code_of(given), known)


def hand_over_value(value: object, folder: Path) -> HandedJob:
    """Pickle data for other processes. Raises: CommandError, JobError as `hand_over`."""
    target = _pickled(
        value,
        folder / "data.pickle",
        given="data={!r:.80}",
        conflict="they cannot be handed to another process",
        remedy="give a function that opens them, such as data=lambda: ...",
    )
    return HandedJob(None, target, _import_path())


def _import_path() -> tuple[str, ...]:
    """Return sys.path with absolute folders, for a process that may begin in another one."""
    return tuple(str(Path(part).resolve()) if part else os.getcwd() for part in sys.path)


def _pickled(value: object, target: Path, *, given: str, conflict: str, remedy: str) -> Path:
    """Pickle a value into a file, and return its path. `given`: format of the value in an error.

    Raises: CommandError; JobError.
    """
    pickler = _pickler()
    try:
        with target.open("wb") as file:
            pickler.dump(value, file)
    except Exception as error:
        why = f"{conflict}: {type(error).__name__}: {error}"
        raise JobError(given=given.format(value), conflict=why, remedy=remedy) from error
    return target


def _pickler() -> Any:
    try:
        import cloudpickle
    except ImportError:
        raise CommandError(
            given="a job that is a lambda, a Job, or a function of this script, notebook or interpreter",
            conflict="to hand it to the ranks takes cloudpickle, which is not installed",
            remedy="pip install 'shoal[notebook]'; or write the job function into a file of its own, and import it or "
            'give its path: shoal.run("file.py:job")',
        ) from None
    return cloudpickle
