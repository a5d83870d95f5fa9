"""Exceptions of shoal: each states what was given, what that conflicts with, and what to write instead.

Each exception class also derives from the built-in exception that it refines.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import sys
from collections.abc import Mapping
from enum import IntEnum
from typing import Any


def text_of(error: BaseException) -> str:
    """Return an exception's message, even if its `__str__` raises. Lone surrogates are escaped."""
    try:
        return str(error).encode("utf-8", "backslashreplace").decode()
    except Exception as raised:
        return f"it has no text, since its __str__ raised {type(raised).__name__}"


_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_FILES = (errno.EMFILE, errno.ENFILE)
_SHARED_MEMORY = "/dev/shm"  # noqa: S108  (the mount)
_CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Return a text in which control characters, but tab and line feed, are replaced: terminals obey them."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def first_line(error: BaseException, length: int = 200) -> str:
    """Return the first line of an exception's message, at most `length` characters; empty if there is no message."""
    return next(iter(text_of(error).strip().splitlines()), "")[:length]


class ExitCode(IntEnum):
    """Exit codes of the `shoal` command, documented in docs/exit-codes.md."""

    DONE = 0
    FAILED = 1  # a fault inside shoal, or an unclassified one
    USER = 2  # the job, its data, its settings, the plan or the command line
    NONFINITE = 65  # stopped by `on_nonfinite="stop"`, or too many bad steps in a row
    RANK_LOST = 69  # a worker process died
    STORAGE = 73  # the last checkpoint could not be written
    INTEGRITY = 74  # no checkpoint in the run directory passes its checks
    PREEMPTED = 75  # stopped on request after a checkpoint: continue with `--resume`
    INTERRUPTED = 130  # a second Ctrl-C: stopped at once, without a checkpoint


class ShoalError(Exception):
    """Base class of all shoal errors. `given`, `conflict` and `remedy` are one sentence each."""

    exit_code = ExitCode.USER

    def __init__(self, *, given: str, conflict: str, remedy: str) -> None:
        super().__init__(given, conflict, remedy)
        self.given, self.conflict, self.remedy = given, conflict, remedy
        self.rank: int | None = None
        self.host: str | None = None
        self.traceback_text: str | None = None
        self.traceback_file: str | None = None  # the file that the traceback was written to
        self.everywhere = False  # whether every rank raises this error now, so that collectives still work
        self.kinds: frozenset[str] = frozenset()  # names of the classes that the ranks raise, where every rank raises

    def __str__(self) -> str:
        return f"{self.given}; {self.conflict}; {self.remedy}"

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.given, self.conflict, self.remedy))

    def render(self) -> str:
        """Return the message for the terminal: a first line, then given, conflict and remedy, each once.

        A failure with a place has place and conflict in the first line, since people often search logs for that line.
        """
        where, beats = "", {"you gave:": self.given, "conflicts with:": self.conflict, "write instead:": self.remedy}
        if self.rank is not None:
            where = f" on rank {self.rank}" + (f" ({self.host})" if self.host else "")
        elif self.host:
            where = f" on {self.host}"
        first = f"error{where}: {type(self).__name__}"
        lines = [folded(f"{first}: {beats.pop('conflicts with:').strip()}" if where else first, 2)]
        if self.traceback_file:
            beats["traceback:"] = self.traceback_file
        return "\n".join([*lines, *(folded(f"  {name:<15} {text.strip()}", 18) for name, text in beats.items())])


def _rebuild(kind: type[ShoalError], given: str, conflict: str, remedy: str) -> ShoalError:
    return kind(given=given, conflict=conflict, remedy=remedy)


# A command from a colon, or a line's begin, to its end, with variables before it.
_COMMAND = re.compile(
    r"(?:(?<=: )|^ *)(?:[A-Z_]+=\S+ )*"
    r"shoal (?:run|plan|verify|doctor|bench|runs|watch|report|resize|evaluate|predict|export) (?:(?![,;)] ).)+$"
)


def terminal_width() -> int:
    """Return the columns of the terminal, or 80 without one."""
    return shutil.get_terminal_size((80, 24)).columns


def folded(text: str, indent: int | None = None) -> str:
    """Break a text between words where it is wider than the terminal.

    A path, an address or a name stays whole, and so does a command at a line's end, which users copy.


    `indent`: blanks before the lines that follow. Default: they align with the text after a label and two blanks, else
        two more than the line has itself.
    """
    lines, width = [], max(40, terminal_width())
    for number, line in enumerate(printable(text).splitlines()):
        label = re.match(r"\s*\S+( \S+){0,2}  +(?=\S)", line)
        own = len(label[0]) if label and len(label[0]) <= 24 else len(line) - len(line.lstrip()) + 2
        later = " " * (own if indent is None else indent)
        line = later + line if number and indent is not None else line
        while len(line) > width:
            command = _COMMAND.search(line)
            whole = command.start() if command else len(line)
            end = line.rfind(" ", len(later) + 1, min(width + 1, whole))
            end = line.find(" ", width, whole) if end < 0 else end
            if end < 0:
                break
            lines.append(line[:end].rstrip())
            line = later + line[end:].lstrip()
        lines.append(line)
    return "\n".join(lines)


def say_note(text: str) -> None:
    """Print a note to the standard error stream."""
    print(folded(f"note: {text}"), file=sys.stderr, flush=True)


def say_labelled(label: str, text: str) -> None:
    """Print a line of a verdict: a label in a column of its own, and a text."""
    print(folded(f"{label:<18} {text}", 19), flush=True)


def refused_by_system(error: BaseException) -> ShoalError | None:
    """Return the error of a full disk, too many open files or refused writes in three beats; None for another error."""
    number = error.errno if isinstance(error, OSError) else None
    place = f" at {error.filename}" if isinstance(error, OSError) and error.filename is not None else ""
    go_on = "--resume goes on from the newest checkpoint of a run"
    if number in _FULL and _SHARED_MEMORY in text_of(error):
        return StorageError(
            given=f"shared memory{place}",
            conflict=f"{_SHARED_MEMORY} is full: {os.strerror(number or 0)}",
            remedy=f"free some space there, or make it larger (mount -o remount,size=8G {_SHARED_MEMORY}; "
            f"docker run --shm-size 8g); {go_on}",
        )
    if number == errno.EFBIG:
        return StorageError(
            given=f"a file of this command{place}",
            conflict="it is larger than this process may write: File too large",
            remedy=f"raise the limit (ulimit -f unlimited); {go_on}",
        )
    if number in (*_FULL, errno.EROFS):
        return StorageError(
            given=f"files of this command{place}",
            conflict=f"the disk takes nothing: {os.strerror(number or 0)}",
            remedy=f"free some space, or write to another disk; {go_on}",
        )
    if number in _NO_FILES or "Too many open files" in text_of(error):
        return LaunchError(
            given=f"files and sockets of this process{place}",
            conflict="it may open no more: Too many open files",
            remedy="raise the limit (ulimit -n 65536), or close what the job's own code has opened",
        )
    return None


class CommandError(ShoalError, ValueError):
    """The command line asks for something that does not exist or contradicts itself."""


class JobFileError(ShoalError, ImportError):
    """A job file is missing, fails to load, or lacks the requested function."""


class SettingError(ShoalError, ValueError):
    """A `--set name=value` names no parameter of the job function, or its value has the wrong type."""


class JobError(ShoalError, ValueError):
    """A Job's fields are missing, of the wrong type, or contradict each other."""


class JobMismatchError(ShoalError, ValueError):
    """The checkpoint to resume belongs to another job."""


class PlanError(ShoalError, ValueError):
    """A plan has unknown keys, wrong types or values, or requests a feature that this version does not execute."""


class HardwareError(ShoalError, ValueError):
    """A cluster name or cluster file is unknown or contradicts itself."""


class RunDirectoryError(ShoalError, FileExistsError):
    """The run directory already contains a run, or contains no run to resume."""


class InUseError(RunDirectoryError):
    """Another run is using the run directory."""


class DataError(ShoalError, RuntimeError):
    """A dataset is empty, raised an exception, or returned a sample that cannot be trained on."""


class DatasetNotFoundError(ShoalError, FileNotFoundError):
    """A dataset is not on this machine and cannot be downloaded."""


class LossError(ShoalError, TypeError):
    """A loss or a metric did not return a pair of sums (total, weight)."""


class UserCodeError(ShoalError, RuntimeError):
    """The job's own code (model, loss, optimizer, metric, schedule) raised an exception."""


class OutOfMemoryError(ShoalError, MemoryError):
    """The model, its training state or a single grain does not fit in the memory of a rank."""


class NonFiniteError(ShoalError, ArithmeticError):
    """The loss or the gradient is NaN or infinite, and the job's policy is to stop."""

    exit_code = ExitCode.NONFINITE


class LaunchError(ShoalError, OSError):
    """The worker processes could not start or could not connect to each other."""


class RankLostError(ShoalError, ChildProcessError):
    """A worker process died without reporting an error."""

    exit_code = ExitCode.RANK_LOST


class PeerError(ShoalError, ConnectionError):
    """Another rank failed; this rank did not. It is never the root cause."""

    exit_code = ExitCode.RANK_LOST


class FencedError(ShoalError, RuntimeError):
    """A later generation of the run's processes has started, so this process must not write any more."""

    exit_code = ExitCode.RANK_LOST


class CollectiveError(ShoalError, ValueError):
    """A collective received an unsupported tensor, or ranks called different collectives."""


class CertificateError(ShoalError, ValueError):
    """The certificate does not cover the run that requires it."""


class NotDeterministicError(ShoalError, RuntimeError):
    """A job gives different results for the same inputs, so that no comparison is possible."""


class StorageError(ShoalError, OSError):
    """A required checkpoint could not be written or read."""

    exit_code = ExitCode.STORAGE


class IntegrityError(ShoalError, OSError):
    """No checkpoint passes verification."""

    exit_code = ExitCode.INTEGRITY


class InternalError(ShoalError, RuntimeError):
    """A fault of shoal itself."""

    exit_code = ExitCode.FAILED


class SettingWarning(UserWarning):
    """A setting has no effect in its place."""


def nearest_file(path: str) -> str:
    """Return a hint to append that names the closest file or folder beside a missing one, or ""."""
    import difflib
    from pathlib import Path

    folder, suffix = Path(path).parent, Path(path).suffix
    known: list[str] = []
    with contextlib.suppress(OSError):
        known = [one.stem for one in folder.iterdir() if one.suffix == suffix and one.name != Path(path).name]
    closest = difflib.get_close_matches(Path(path).stem, known, n=1, cutoff=0.6)
    return f"; did you mean {str(folder / (closest[0] + suffix))!r}?" if closest else ""


def nearest(name: str, known: list[str]) -> str:
    """Return a hint to append that names the known name closest to `name`, or "" if none is close."""
    import difflib

    found = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""


def from_json(document: Mapping[str, Any]) -> ShoalError:
    """Rebuild an error from the JSON value that `failures.to_json` made in another process."""
    kind: type[ShoalError] = globals().get(document["kind"], InternalError)
    error = kind(**{name: str(document[name]) for name in ("given", "conflict", "remedy")})
    error.rank, error.host, error.traceback_text = document["rank"], document["host"], document.get("traceback")
    return error
