"""Run directory: names of its files, and the test whether a run may use it. Values only."""

from __future__ import annotations

import json
import os
from collections.abc import Container
from pathlib import Path
from typing import Any

from shoal.errors import RunDirectoryError, ShoalError


class RunDirectory:
    """The files of one run under one directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # File, function, settings and numbers of the job. Its presence makes the directory a run's.
        self.job = path / "job.json"
        self.plan = path / "plan.toml"  # complete
        self.records = path / "records.jsonl"  # a step a line
        self.result = path / "result.json"  # how the run ended
        self.checkpoints = path / "checkpoints"  # a directory each
        self.errors = path / "errors"  # tracebacks, a text file a rank

    def holds_run(self) -> bool:
        """Whether a run has trained here; one that failed before its first step has not."""
        if not self.job.exists():
            return False
        result = read_json(self.result)
        return not (result and result.get("status") == "failed" and result.get("steps") == 0)

    def keep_traceback(self, who: str, error: ShoalError) -> None:
        """Writes the traceback of an error, where it has one, under the name of the process that raised."""
        if error.traceback_text:
            self.errors.mkdir(exist_ok=True, parents=True)
            write_file(self.errors / f"{who}.txt", error.traceback_text)

    def check(self, resume: bool) -> None:
        """Raises: RunDirectoryError where a new run would write over one, or a resume has nothing to resume."""
        if self.path.exists() and not self.path.is_dir():
            raise RunDirectoryError(
                given=f"--out {self.path}", conflict="that is a file", remedy="give a directory that is new or empty"
            )
        if resume and not self.job.exists():
            raise RunDirectoryError(
                given=f"--resume --out {self.path}",
                conflict="no run began there (it has no job.json)",
                remedy="give the directory of the run to resume, or leave --resume out",
            )
        if not resume and self.holds_run():
            raise RunDirectoryError(
                given=f"--out {self.path}",
                conflict="it holds a run, and nothing is overwritten",
                remedy="add --resume to go on with that run, or give another --out",
            )
        parent = next(p for p in (self.path, *self.path.absolute().parents) if p.exists())
        if not parent.is_dir():
            raise RunDirectoryError(
                given=f"--out {self.path}", conflict=f"{parent} is a file", remedy="give another --out"
            )
        if not os.access(parent, os.W_OK):
            raise RunDirectoryError(
                given=f"--out {self.path}", conflict=f"{parent} is not writable", remedy="give another --out"
            )


def default_directory(name: str, resume: bool, in_use: Container[Path] = ()) -> Path:
    """runs/NAME, or the first of runs/NAME-2, runs/NAME-3 ... that holds no run; for a resume the last that does.

    Those `in_use` are passed over.
    """
    number, path, newest = 1, Path("runs") / name, Path("runs") / name
    while RunDirectory(path).holds_run() or path in in_use:
        newest = path
        number += 1
        path = Path("runs") / f"{name}-{number}"
    return newest if resume else path


def write_file(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object from a file; None where it is missing or damaged."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None
