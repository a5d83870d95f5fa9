"""Jobs given as Python objects: handed over to ranks by name where they can be imported, else as a pickle.

The pickle is for this call's own processes, in a private folder that is removed at the call's end. Nothing else that
shoal reads is one.
"""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.errors import CommandError, JobError
from shoal.job import Job
from shoal.plans.grains import FEW_GRAINS
from shoal.runs.object_sources import code_of

# Where a job is of no file.
NOTEBOOK, INTERPRETER = Path("notebook"), Path("interpreter")
_PICKLE = "job.pickle"


@dataclass(frozen=True)
class HandedJob:
    """A job object on its way to other processes: the module that it is imported from, or the file that has it.

    `least_grains`: a number that it has at least as many grains as, where that is known.
    `import_path`: sys.path of the process that gave it. `code`: digests of the code of one by value.
    """

    module: str | None
    file: Path | None
    import_path: tuple[str, ...]
    code: dict[str, dict[str, str]] = field(default_factory=dict)
    least_grains: int | None = None

    def fetch(self, function: str | None) -> Any:
        """The job object, in a process that it is handed to. Raises: what its imports raise."""
        own = [folder for folder in sys.path if folder not in self.import_path]
        sys.path[:] = [*self.import_path, *own]
        if self.module is not None:
            return getattr(importlib.import_module(self.module), str(function))
        assert self.file is not None, "a job without a module is in a file"
        with self.file.open("rb") as file:
            return _pickler().load(file)


def is_job(given: object) -> bool:
    """Whether an object may be a job: a Job, or a function that returns one."""
    return isinstance(given, Job) or callable(given)


def function_name(given: object) -> str | None:
    """The name of a job function; None of a Job, a lambda, and what else has none."""
    name = getattr(given, "__name__", None)
    return name if isinstance(name, str) and name.isidentifier() else None


def place_of(given: object) -> Path:
    """The file of a job function that is imported; else the script, or the notebook, that gave the object."""
    module = importable_module(given)
    if module is not None:
        return Path(str(sys.modules[module].__file__))
    main = vars(sys.modules["__main__"])
    # The second is VS Code's, the third Jupyter's.
    named = main.get("__file__") or main.get("__vsc_ipynb_file__") or os.environ.get("JPY_SESSION_NAME")
    if named:
        return Path(named)
    return NOTEBOOK if "ipykernel" in sys.modules else INTERPRETER


def importable_module(given: object) -> str | None:
    """The module in a file whose attribute a job function is, so that other processes can import it by name."""
    name, module = function_name(given), getattr(given, "__module__", None)
    found = sys.modules.get(module) if isinstance(module, str) and module != "__main__" else None
    if name is None or found is None or not str(getattr(found, "__file__", None)).endswith(".py"):
        return None
    return module if getattr(found, name, None) is given else None


def hand_over(given: object, folder: Path) -> HandedJob:
    """The job object as other processes take it; `folder` is for its pickle, and lasts as long as they.

    Raises: CommandError where it needs cloudpickle, which is not installed; JobError where it cannot be pickled.
    """
    path = tuple(str(Path(part).resolve()) if part else os.getcwd() for part in sys.path)
    module = importable_module(given)
    if module is not None:
        return HandedJob(module, None, path)
    pickler, target = _pickler(), folder / _PICKLE
    try:
        with target.open("wb") as file:
            pickler.dump(given, file)
    except Exception as error:
        raise JobError(
            given=f"shoal.run({given!r:.80}, ...)",
            conflict=f"it cannot be handed to the ranks: {type(error).__name__}: {error}",
            remedy="make that inside of a function of the job, such as train_data=lambda: ..., which each rank calls; "
            'or write the job into a file, and give its path: shoal.run("file.py:job")',
        ) from error
    known = (given.grains or FEW_GRAINS) if isinstance(given, Job) else None  # a default has never fewer
    return HandedJob(None, target, path, code_of(given), known)


def hand_over_value(value: object, folder: Path) -> HandedJob:
    """Data as other processes take them, by value. Raises: CommandError, JobError as `hand_over`."""
    target = folder / "data.pickle"
    pickler = _pickler()
    try:
        with target.open("wb") as file:
            pickler.dump(value, file)
    except Exception as error:
        raise JobError(
            given=f"data={value!r:.80}",
            conflict=f"they cannot be handed to another process: {type(error).__name__}: {error}",
            remedy="give a function that opens them, such as data=lambda: ...",
        ) from error
    return HandedJob(None, target, tuple(str(Path(part).resolve()) if part else os.getcwd() for part in sys.path))


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
