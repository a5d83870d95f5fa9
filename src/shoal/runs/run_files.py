"""Files of a run directory as one value, read without torch. Damaged or missing parts are skipped and counted."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from shoal import bounded_files
from shoal.bounded_files import MOST_LINE_BYTES, MOST_LINES, object_of
from shoal.errors import RunDirectoryError, nearest_file, say_note
from shoal.runs.address import fetch_to_read, is_address
from shoal.runs.attempts import Attempt, attempts_of
from shoal.runs.directory import RunDirectory, held_since, is_held
from shoal.runs.records import CountedRecords, StepRecord, parsed
from shoal.runs.sound_values import sound_job, sound_plan, sound_result

T = TypeVar("T")


@dataclass(frozen=True)
class RunFiles:
    """Content of a run directory at the instant `read_at`, in seconds since the epoch.

    `is_held`: whether a process trains there now.
    `address`: address of the run if `path` is a copy.
    `damaged`: by file, what of it was not read, and why.
    """

    path: Path
    read_at: float
    job: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    result: Mapping[str, Any] = field(default_factory=dict)
    records: tuple[StepRecord, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    events: tuple[Mapping[str, Any], ...] = ()
    saved_step: int | None = None
    is_held: bool = False
    address: str | None = None
    damaged: Mapping[str, str] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """The run directory as messages name it."""
        return self.address or str(self.path)

    def say_damage(self) -> None:
        """Print a note for each file that was not read, or not all of it."""
        for name, damage in self.damaged.items():
            say_note(f"{self.shown}/{name}: {damage}")

    @property
    def name(self) -> str:
        """The last part of the path or address."""
        return self.path.resolve().name if self.address is None else self.address.rstrip("/").rpartition("/")[2]

    @property
    def output_folder(self) -> Path:
        """The default folder for outputs about the run: the directory, or the current folder for an address."""
        return self.path if self.address is None else Path()


class LineFile:
    """Incremental reader of a growing file of JSON lines.

    A file that was replaced or truncated is read from its start, and `replaced` is set. `refused` says why the file, or
    the rest of it, is not read.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.refused, self.replaced = path, "", False
        self._offset, self._identity, self._num_lines, self._num_damaged = 0, (0, 0), 0, 0

    @property
    def damage(self) -> str:
        """The part of the file that was not read, and why; empty if all of it was."""
        return self.refused or (f"{self._num_damaged} lines could not be read" if self._num_damaged else "")

    def more(self, read: Callable[[str], T]) -> list[T]:
        """Return the lines since the last call, parsed by `read`. Lines that `read` rejects are counted as damaged."""
        self.replaced, self.refused = False, ""
        values: list[T] = []
        try:
            file = open(bounded_files.opened(self.path), "rb")  # noqa: SIM115, the next line has the context
        except FileNotFoundError:
            return values
        except OSError as error:
            self.refused = error.strerror or str(error)
            return values
        with file:
            now = os.fstat(file.fileno())
            identity = now.st_dev, now.st_ino
            if identity != self._identity or now.st_size < self._offset:
                self.replaced = self._identity != (0, 0)
                self._identity, self._offset, self._num_lines, self._num_damaged = identity, 0, 0, 0
            file.seek(self._offset)
            for line in bounded_files.whole_lines(
                file
            ):  # an incomplete one is still being written, or was cut off by a kill
                if self._num_lines >= MOST_LINES:
                    break
                self._offset, self._num_lines = file.tell(), self._num_lines + 1
                try:
                    values.append(read(line.decode("utf-8")))
                except (ValueError, KeyError, TypeError, AttributeError):
                    self._num_damaged += 1
            left = now.st_size - self._offset
            if left > MOST_LINE_BYTES or (left and self._num_lines >= MOST_LINES):
                limit = f"{MOST_LINES:,} lines of at most {MOST_LINE_BYTES:,} bytes"
                self.refused = f"only its first {self._num_lines:,} lines were read, and the limit is {limit}"
        return values


class RunReader:
    """Reader of a run directory that may still change. Each `read` reads only the new part of long files."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time, address: str | None = None) -> None:
        """Create the reader. `address`: address of the run if `path` is a copy, which each `read` updates."""
        self._files, self._clock, self._address = RunDirectory(path), clock, address
        self._records = CountedRecords()
        self._lines = {name: LineFile(getattr(self._files, name)) for name in ("records", "attempts", "events")}
        self._attempts: list[dict[str, Any]] = []
        self._events: list[dict[str, Any]] = []

    def read(self) -> RunFiles:
        """Return the current content of the directory. Raises: RunDirectoryError if there is no run."""
        files = self._files
        if self._address is not None:
            fetch_to_read(self._address, files.path)
        if not os.path.lexists(files.job) and not os.path.lexists(files.records):
            raise RunDirectoryError(
                given=str(files.path),
                conflict="no run began there (it has no job.json)",
                remedy=f"give the directory of a run, which shoal run prints{nearest_file(str(files.path))}",
            )
        new_records = self._lines["records"].more(parsed)
        if self._lines["records"].replaced:
            self._records = CountedRecords()
        for one in new_records:
            self._records.add(one)
        records = self._records.records
        self._grow(self._lines["attempts"], self._attempts, object_of)
        self._grow(self._lines["events"], self._events, object_of)
        damaged = {f"{name}.jsonl": lines.damage for name, lines in self._lines.items() if lines.damage}
        documents: dict[str, dict[str, Any]] = {}
        for path in (files.job, files.plan, files.result, files.saved):
            try:
                documents[path.stem] = (
                    bounded_files.read_toml(path) if path == files.plan else bounded_files.read_object(path)
                )
            except FileNotFoundError:
                documents[path.stem] = {}
            except OSError as error:
                documents[path.stem], damaged[path.name] = {}, error.strerror or str(error)
        saved = documents["saved"].get("step")
        now, trains_now, attempts = self._clock(), is_held(files.path), attempts_of(self._attempts)
        if trains_now and attempts:
            newest = records[-1].at if records else None
            since, lost = held_since(files.path) or 0.0, 0.0
            for event in self._events:
                with contextlib.suppress(ValueError, TypeError):
                    if event.get("kind") == "lost":
                        lost = max(lost, datetime.fromisoformat(str(event.get("at"))).timestamp())
            # Ranks that are still starting have not written a line.
            is_restart, last = lost > max(since, newest or 0.0), attempts[-1]
            since = lost if is_restart else since
            if last.began_at < since:
                known = ("num_steps", "world_size", "host", "device", "threads", "cores")
                about = {name: getattr(last, name) for name in known}
                restarts = last.restarts + 1 if is_restart else 0
                attempts += (Attempt(min(since, now), now, resumed_from=last.step, restarts=restarts, **about),)
        job, plan = sound_job(documents["job"]), sound_plan(bounded_files.cleaned(documents["plan"]))
        run = RunFiles(files.path, now, job, plan, sound_result(documents["result"]), tuple(records), attempts)
        saved = saved if isinstance(saved, int) else None
        run = replace(run, events=tuple(self._events), saved_step=saved, is_held=trains_now)
        return replace(run, address=self._address, damaged=damaged)

    def _grow(self, lines: LineFile, into: list[T], read: Callable[[str], T]) -> None:
        new_values = lines.more(read)
        if lines.replaced:
            into.clear()
        into.extend(new_values)


def read_run(path: Path, clock: Callable[[], float] = time.time) -> RunFiles:
    """Return the current content of a run directory. Raises: RunDirectoryError if there is no run."""
    return RunReader(path, clock).read()


@contextlib.contextmanager
def run_reader(run: str) -> Iterator[RunReader]:
    """Yield a reader of a run directory, or of a temporary copy of a run at an address. Raises: CommandError."""
    if not is_address(run):
        yield RunReader(Path(run))
        return
    with tempfile.TemporaryDirectory(prefix="shoal-run-") as folder:
        yield RunReader(Path(folder), address=run)
