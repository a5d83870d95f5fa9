"""Predicted steps of jobs by number of processes on this machine's cores, kept for the start of later runs.

A run reads one small file. A prediction itself would trace the model, which takes seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from shoal.hardware.detect import measured_file
from shoal.jobs.job_file import JobRequest
from shoal.jobs.settings import setting_text
from shoal.runs.machine_records import MachineRecords

WORTH = 1.1  # smallest ratio of steps for which a run on one process names the other number
_RECORDS = MachineRecords("processes", 200)


def processes_file() -> Path:
    """Return the path of this machine's predictions, next to what `shoal bench` measured."""
    return _RECORDS.path


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
        _RECORDS.store(key_of(job, precision), {str(number): of_step for number, of_step in seconds.items()})


def faster(job: JobRequest, precision: str | None) -> tuple[int, float] | None:
    """Return the number of processes with the fastest step and its ratio to one process, if the ratio is `WORTH` it."""
    if not measured_file().is_file():  # without it, or for another processor, predictions do not count
        return None
    try:
        seconds = {int(n): float(s) for n, s in _RECORDS.read()[key_of(job, precision)].items()}
        best = min(seconds, key=lambda number: seconds[number])
        ratio = seconds[1] / seconds[best]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        return None
    return (best, ratio) if ratio > WORTH else None
