"""Job objects and data for other processes, as a module to import or as a pickle.

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


def hand_over_value(value: object, folder: Path) -> HandedJob:
    """Pickle data for other processes. Raises: CommandError, JobError as `hand_over`."""
    target = pickled(
        value,
        folder / "data.pickle",
        given="data={!r:.80}",
        conflict="they cannot be handed to another process",
        remedy="give a function that opens them, such as data=lambda: ...",
    )
    return HandedJob(None, target, import_path())


def import_path() -> tuple[str, ...]:
    """Return sys.path with absolute folders, for a process that may begin in another one."""
    return tuple(str(Path(part).resolve()) if part else os.getcwd() for part in sys.path)


def pickled(value: object, target: Path, *, given: str, conflict: str, remedy: str) -> Path:
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
