"""Predicted steps of jobs by number of processes on this machine's cores, kept for the start of later runs.

A run reads one small file. A prediction itself would trace the model, which takes seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.hardware.detect import measured_file
from shoal.jobs.job_file import JobRequest
from shoal.jobs.settings import setting_text
from shoal.runs.directory import write_file

WORTH = 1.1  # smallest ratio of steps for which a run on one process names the other number
_MOST = 200  # jobs in the file


def processes_file() -> Path:
    """Return the path of this machine's predictions, next to what `shoal bench` measured."""
    known = measured_file()
    return known.with_name(f"{known.stem}-processes.json")


def key_of(job: JobRequest, precision: str | None) -> str:
    """Return the digest of a job's file, function, settings and precision. Raises: OSError if there is no file."""
    settings = [setting_text(name, value) for name, value in job.settings]
    facts = [job.path.read_text(encoding="utf-8"), str(job.path.absolute()), job.function or "job", settings, precision]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def record(job: JobRequest, precision: str | None, seconds: Mapping[int, float]) -> None:
    """Store the predicted seconds of a job's step by number of processes, if this machine was measured."""
    if not measured_file().is_file():
        return
    with contextlib.suppress(OSError):  # the prediction was printed; only later runs miss it
        key, known = key_of(job, precision), _known()
        known.pop(key, None)
        newest = dict([*known.items()][1 - _MOST :])
        write_file(
            processes_file(), json.dumps({**newest, key: {str(n): s for n, s in seconds.items()}}, indent=1) + "\n"
        )


def faster(job: JobRequest, precision: str | None) -> tuple[int, float] | None:
    """Return the number of processes with the fastest step and its ratio to one process, if the ratio is `WORTH` it."""
    try:
        seconds = {int(n): float(s) for n, s in _known()[key_of(job, precision)].items()}
        best = min(seconds, key=lambda number: seconds[number])
        ratio = seconds[1] / seconds[best]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        return None
    return (best, ratio) if ratio > WORTH else None


def _known() -> dict[str, Any]:
    if not measured_file().is_file():  # without it, or for another processor, predictions do not count
        return {}
    try:
        document = json.loads(processes_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
