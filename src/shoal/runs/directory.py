"""Run directory: names of its files, and the check whether a run may use it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

from shoal.errors import IntegrityError, RunDirectoryError, ShoalError

# What job.json of a training in a user's own loop names as its function.
SESSION = "shoal.Session"


class RunDirectory:
    """The files of one run under one directory."""

    def __init__(self, path: Path, shown: str | None = None) -> None:
        """Create the value. `shown`: the directory's name in messages, if `path` is a working copy."""
        self.path, self.shown = path, shown or str(path)
        # File, function, settings and numbers of the job. This file marks a directory as a run directory.
        self.job = path / "job.json"
        self.plan = path / "plan.toml"  # the complete plan
        self.records = path / "records.jsonl"  # one step per line
        self.attempts = path / "attempts.jsonl"  # start and end of each call and restart
        self.events = path / "events.jsonl"  # one incident per line
        self.result = path / "result.json"  # how the run ended
        self.checkpoints = path / "checkpoints"  # one directory per checkpoint
        self.saved = path / "saved.json"  # the step of the newest checkpoint
        self.resize = path / "resize.json"  # the requested number of processes
        self.model = path / "model"  # configuration of a Transformers model
        self.errors = path / "errors"  # tracebacks, one text file per rank

    def trace(self, steps: str) -> Path:
        """Return the path of the trace of these steps."""
        return self.path / f"trace-{steps}.json.gz"

    def holds_run(self) -> bool:
        """Check whether a run has trained here. A run that failed before its first step does not count."""
        if not self.job.exists():
            return False
        result = read_json(self.result)
        return not (result and result.get("status") == "failed" and result.get("steps") == 0)

    def discard_failed_start(self) -> None:
        """Empty the directory if a start failed here before a step and nothing but its own description is there.

        A killed run has no result, and one that has begun its steps has attempts: both stay, as all with a traceback,
        logs or incidents.
        """
        result = read_json(self.result)
        failed = result.get("status") == "failed" and result.get("steps") == 0 if result else not self.attempts.exists()
        own = {
            "job.json",
            "plan.toml",
            "result.json",
            "attempts.jsonl",
            "records.jsonl",
            "source",
            "generations",
            "model",
        }
        there = {path.name: path for path in self.path.iterdir() if path.name != "lock.json"}
        empty = [path for path in there.values() if path.is_dir() and not any(path.iterdir())]
        has_steps = self.records.exists() and self.records.stat().st_size > 0
        if failed and not has_steps and not there.keys() - own - {path.name for path in empty}:
            for path in there.values():
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def check_job(self) -> None:
        """Check that job.json is readable. Raises: IntegrityError if not."""
        if read_json(self.job) is None:
            raise IntegrityError(
                given=f"--resume of {self.shown}",
                conflict=f"{self.job.name} is damaged, so that nothing tells whether this is the job that was trained",
                remedy="restore it from a copy, or add --accept-changes to go on with the job as it is now",
            )

    def request_resize(self, devices: int) -> None:
        """Ask the run to continue with another number of processes, replacing a pending request. Raises: OSError."""
        write_file(self.resize, json.dumps({"devices": devices}) + "\n")

    def requested_devices(self) -> int | None:
        """Return the requested number of processes, or None."""
        devices = (read_json(self.resize) or {}).get("devices")
        return devices if isinstance(devices, int) and devices > 0 else None

    def end_resize(self) -> None:
        """Remove the request for another number of processes."""
        with contextlib.suppress(OSError):
            self.resize.unlink(missing_ok=True)

    def keep_traceback(self, who: str, error: ShoalError) -> None:
        """Write an error's traceback, if it has one, to a file named after the process that raised the error."""
        if error.traceback_text:
            self.errors.mkdir(exist_ok=True, parents=True)
            write_file(self.errors / f"{who}.txt", error.traceback_text)
            error.traceback_file = str(self.errors / f"{who}.txt")

    def check(self, resume: bool) -> None:
        """Check that a new run overwrites no run, or that there is a run to resume. Raises: RunDirectoryError."""
        given = f"--out {self.shown}"
        parent = next(p for p in (self.path, *self.path.absolute().parents) if p.exists())
        if self.path.exists() and not self.path.is_dir():
            conflict, remedy = "that is a file", "give a directory that is new or empty"
        elif resume and not self.job.exists():
            given, conflict = f"--resume {given}", "no run began there (it has no job.json)"
            remedy = "give the directory of the run to resume, or leave --resume out"
        elif (read_json(self.job) or {}).get("function") == SESSION:
            conflict = "it holds the training of a loop with shoal.Session"
            remedy = f"go on with it by Session(checkpoints={self.shown!r}, resume=True), or give another --out"
        elif not resume and self.holds_run():
            conflict = "it holds a run, and nothing is overwritten"
            remedy = "add --resume to go on with that run, or give another --out"
        elif not parent.is_dir():
            conflict, remedy = f"{parent} is a file", "give another --out"
        elif not os.access(parent, os.W_OK):
            conflict, remedy = f"{parent} is not writable", "give another --out"
        else:
            return
        raise RunDirectoryError(given=given, conflict=conflict, remedy=remedy)


@contextlib.contextmanager
def guarded_files(private: bool) -> Iterator[None]:
    """Let no new file or folder of this process be writable by others; with `private`, not readable either.

    The umask may be stricter. Processes that are started in the context inherit it.
    """
    before = os.umask(0o077)
    os.umask(before | (0o077 if private else 0o022))
    try:
        yield
    finally:
        os.umask(before)


def default_directory(name: str, resume: bool, in_use: Container[Path] = ()) -> Path:
    """Return runs/NAME or the first unused runs/NAME-2, ...; for a resume, return the last one that has a run."""
    number, path, newest = 1, Path("runs") / name, Path("runs") / name
    while RunDirectory(path).holds_run() or path in in_use:
        newest = path
        number += 1
        path = Path("runs") / f"{name}-{number}"
    return newest if resume else path


def write_file(path: Path, text: str) -> None:
    """Write a file atomically, without following a link at its temporary name. Raises: OSError."""
    write_aside(path, text).replace(path)


def write_aside(path: Path, text: str, mark: str = "") -> Path:
    """Write a temporary file next to `path`, following no link, and return its path. Raises: OSError."""
    aside = path.with_name(f".{path.name}{mark}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with open(os.open(aside, flags, 0o644), "w", encoding="utf-8") as file:
        file.write(text)
    return aside


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if the file is missing or damaged."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None
