"""Runs below a folder, each as one entry, read from the ends of their files; and their removal."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shoal.errors import InUseError, PlanError, RunDirectoryError
from shoal.jobs.differences import flat
from shoal.plans.plan import layout_name, read_plan
from shoal.runs.attempts import Attempt, read_attempts, run_status
from shoal.runs.directory import NAME, SESSION, RunDirectory, claim, held_since, is_held, read_json
from shoal.runs.records import StepRecord, last_records
from shoal.runs.sound_values import sound_job, sound_result
from shoal.runs.source import COMMIT, read_source

_DEPTH = 4  # folders below the given one in which runs are looked for
_CERTIFICATE = "certificate.json"


@dataclass(frozen=True)
class RunEntry:
    """One run.

    Attributes:
        kind: run, session or verify.
        state: running, completed, stopped (by a callback), preempted, failed or killed; of a certificate its verdict.
        stopped: the callback that stopped the run, and its reason.
        num_steps: steps that the run is to have; None if unknown.
        metrics: of the last evaluation.
        best: metric, value and step of the best evaluation, or of the last one if the job watches no metric.
        layout: degrees of the plan, such as `dp8 zero3 tp2`; None without a plan that can be read.
        larger_is_better: direction of the watched metric; None if the job watches none.
        seconds: time in which the run had its devices.
        size: bytes on the disk; a file with several names counts once.
        commit: git commit of its code, with a plus sign if there were uncommitted changes.
    """

    path: str
    name: str
    kind: str
    job: str
    state: str
    steps: int
    size: int
    settings: Mapping[str, Any]
    began_at: float | None
    commit: str | None = None
    num_steps: int | None = None
    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    best: tuple[str, float, int | None] | None = None
    larger_is_better: bool | None = None
    devices: int | None = None
    seconds: float | None = None
    layout: str | None = None
    error: str | None = None
    stopped: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the entry as a JSON value."""
        document = asdict(self)
        if self.best is not None:
            document["best"] = dict(zip(("metric", "value", "step"), self.best, strict=True))
        if self.began_at is not None:
            document["began_at"] = datetime.fromtimestamp(self.began_at, UTC).isoformat(timespec="seconds")
        return document


def runs_below(folder: Path) -> Iterator[RunEntry]:
    """Yield the runs in a folder and in the folders below it, by path. Links are not followed."""
    if (folder / "job.json").exists():
        yield entry_of(folder, folder.name)
        return

    def within(path: Path, depth: int) -> Iterator[RunEntry]:
        try:
            children = [one for one in os.scandir(path) if one.is_dir(follow_symlinks=False)]
        except OSError:
            return
        for child in sorted(children, key=lambda one: one.name):
            place = Path(child.path)
            if is_listed(place):
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    yield entry_of(place, place.relative_to(folder).as_posix())
            elif depth > 1 and not child.name.startswith("."):
                yield from within(place, depth - 1)

    yield from within(folder, _DEPTH)


def is_listed(path: Path) -> bool:
    """Return True if a folder is a run, a certificate, or has the traceback of a start that failed."""
    return (path / "job.json").exists() or (path / _CERTIFICATE).exists() or _failed_start(path)


def _failed_start(path: Path) -> bool:
    return (path / "generations").is_dir() and any(path.glob("errors/*.txt"))


def entry_of(path: Path, name: str) -> RunEntry:
    """Return the entry of a run directory. Damaged and missing files leave their parts empty."""
    files = RunDirectory(path)
    job = read_json(files.job)
    if job is None and (path / _CERTIFICATE).exists():
        document = read_json(path / _CERTIFICATE) or {}
        job = document.get("job") or {}
        commit = read_source(path).get(COMMIT, {}).get("commit")
        return RunEntry(
            path=str(path),
            name=name,
            kind="verify",
            job=os.path.basename(str(job.get("file") or "")),
            state=str(document.get("verdict") or "unknown"),
            steps=int(document.get("steps") or 0),
            size=size_of(path),
            commit=commit[:8] if commit else None,
            began_at=(path / _CERTIFICATE).stat().st_mtime,
            settings=dict(flat(job.get("settings") or {})),
        )
    job, result = sound_job(job or {}), sound_result(read_json(files.result) or {})
    last, attempts = None, read_attempts(files.attempts)
    with contextlib.suppress(OSError):
        last = next(iter(last_records(files.records)), None)
    layout = None
    if files.plan.exists():
        with contextlib.suppress(PlanError):  # of a newer version, or damaged
            layout = layout_name(read_plan(files.plan))
    source = read_source(path)
    is_session = job.get("function") == SESSION
    if not result and not files.job.exists():
        result = {"status": "failed"}  # before a rank could describe the run
    state = run_status(is_held=is_held(path), attempts=attempts, result=result)
    ended_by = result.get("ended_by") or {}
    if state == "completed" and ended_by:
        state = "stopped"
    best, watched = result.get("best") or {}, str(job.get("watch") or "")
    metrics: Mapping[Any, Any] = result.get("metrics") or (last.metrics if last else None) or {}
    metric = best.get("metric") or watched.rpartition(":")[0] or next(iter(metrics), None)
    value = _number(best.get("value", metrics.get(metric)))
    step = best.get("step", last.step if last else None)
    commit = source.get(COMMIT, {})
    file = str(job.get("file") or job.get("module") or "")
    function = "" if is_session or job.get("function") in ("job", None) else f":{job['function']}"
    error = result.get("error") or {}
    return RunEntry(
        path=str(path),
        name=name,
        kind="session" if is_session else "run",
        job=f"{os.path.basename(file)}{function}",
        state=state,
        steps=last.step if last else int(result.get("steps") or 0),
        num_steps=attempts[-1].num_steps if attempts else None,
        loss=_number(last.loss if last else result.get("train_loss")),
        metrics={name: number for name, one in metrics.items() if (number := _number(one)) is not None},
        best=(str(metric), value, step) if value is not None else None,
        larger_is_better=watched.endswith(":max") if watched else None,
        devices=attempts[-1].world_size if attempts else result.get("world_size"),
        seconds=_seconds(attempts, last, held_since(path) if state == "running" else None),
        size=size_of(path),
        commit=f"{commit['commit'][:8]}{'+' if commit.get('dirty') else ''}" if commit.get("commit") else None,
        began_at=attempts[0].started_at if attempts else path.stat().st_mtime,
        settings=dict(flat(job.get("settings") or {})),
        layout=layout,
        error=str(error.get("conflict") or error.get("kind") or "") or None,
        stopped=f"by {ended_by.get('callback')}: {ended_by.get('reason')}" if state == "stopped" else None,
    )


def size_of(path: Path) -> int:
    """Return the bytes that a folder has on the disk. A file with several names counts once; links count nothing."""
    seen: dict[tuple[int, int], int] = {}
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                status = os.lstat(os.path.join(folder, name))
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode):
                seen[status.st_dev, status.st_ino] = status.st_size
    return sum(seen.values())


def check_removable(path: Path) -> None:
    """Check that a folder is a run that may be deleted. Raises: RunDirectoryError; InUseError."""
    given = f"deleting {path}"
    if any(one.is_symlink() for one in (path, *path.parents)):
        real = path.resolve()
        conflict, remedy = "the path goes through a link, and nothing behind a link is deleted", f"write {real}"
    elif not path.is_dir():
        conflict, remedy = "there is no such folder", "see: shoal runs"
    elif not (_failed_start(path) or _only_certificate(path)) and not isinstance(
        (read_json(path / "job.json") or {}).get("versions"), dict
    ):
        conflict, remedy = "it holds no job.json of shoal, so it may not be a run", "delete it by other means"
    elif Path.cwd().resolve().is_relative_to(path.resolve()) or (path / ".git").exists():
        conflict, remedy = "it is or holds the current folder, or is a checkout", "delete it by other means"
    elif any(one.parent != path for one in path.rglob("job.json")):
        conflict, remedy = "other runs are in it", "delete those first"
    elif is_held(path):
        raise InUseError(given=given, conflict="a process trains there now", remedy="stop it first")
    else:
        return
    raise RunDirectoryError(given=given, conflict=conflict, remedy=remedy)


def _only_certificate(path: Path) -> bool:
    """Return True if a folder has a certificate of `shoal verify` and nothing that is not shoal's."""
    verdict = (read_json(path / _CERTIFICATE) or {}).get("verdict")
    own = {_CERTIFICATE, "source", "generations", "logs", "errors"}
    return verdict is not None and {one.name for one in path.iterdir()} <= own


def remove(path: Path) -> None:
    """Delete a run that `check_removable` passes, under its lock. Raises: as `check_removable`; OSError."""
    check_removable(path)
    if (path / NAME).is_symlink():
        (path / NAME).unlink()
    lock = claim(path, lambda text: None, removes=True)
    try:
        shutil.rmtree(path)
    finally:
        lock.release()


def _seconds(attempts: tuple[Attempt, ...], last: StepRecord | None, since: float | None) -> float | None:
    """Return the sum of the attempts' times; an attempt without an end lasts to its last record, or until now."""
    total = 0.0
    for place, attempt in enumerate(attempts):
        end = attempt.ended_at
        if end is None and place == len(attempts) - 1:
            end = datetime.now(UTC).timestamp() if since is not None else last.at if last else None
        total += max(0.0, (end or attempt.began_at) - attempt.started_at)
    return total if attempts else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
