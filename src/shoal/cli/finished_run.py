"""A run that is on disk, as Python reads it: its result, its records and the trained model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import JobFileError, RunDirectoryError, ShoalError
from shoal.launch.environment import inside_run
from shoal.runs.address import copy_to_read, is_address
from shoal.runs.directory import RunDirectory, read_json
from shoal.runs.job_file import JobRequest, called, load, parse_target
from shoal.runs.job_module import is_path, split_target
from shoal.runs.job_object import is_job
from shoal.runs.records import StepRecord, read_steps
from shoal.runs.run_files import run_reader

if TYPE_CHECKING:
    from shoal.checkpoint.store import Step

_SHOWN = ("status", "steps", "train_loss", "metrics", "wall_seconds", "world_size", "weights_sha256")


class Run:
    """A run directory: `out` is its path, `result` and `job` are its files; `model()` is the trained model.

    Of one at an address `out` is that, as text, and each look at a file is one at what is there then.
    `job`: the job that was trained, which `model()` builds: a Job, a job function, or "file.py:function". The run that
    `shoal.run` returns has it. No code that the directory names is run.
    Raises: RunDirectoryError where no run began there.
    """

    def __init__(self, out: str | os.PathLike[str], job: Any = None) -> None:
        text = os.fspath(out)
        self.out: Path | str = text if is_address(text) else Path(text)
        self._given = _lasting(os.fspath(job)) if isinstance(job, str | os.PathLike) else job
        with self._files() as files:
            if not files.job.exists():
                raise RunDirectoryError(
                    given=f"shoal.Run({str(self.out)!r})",
                    conflict="no run began there (it has no job.json)",
                    remedy="give the directory of a run, which shoal.run and shoal run print",
                )

    @contextlib.contextmanager
    def _files(self) -> Iterator[RunDirectory]:
        with copy_to_read(str(self.out)) as folder:
            yield RunDirectory(folder)

    @property
    def result(self) -> Mapping[str, Any]:
        """How the run ended: `result.json`; empty where it has not."""
        with self._files() as files:
            return read_json(files.result) or {}

    @property
    def job(self) -> Mapping[str, Any]:
        """Description of the job that was trained, as far as names and numbers go: `job.json`."""
        with self._files() as files:
            return read_json(files.job) or {}

    @property
    def records(self) -> list[StepRecord]:
        """The records of all steps, in the order in which they were trained: `records.jsonl`."""
        with self._files() as files:
            return list(read_steps(files.records)) if files.records.exists() else []

    def model(self, into: Any = None, *, step: Step = "last", ema: bool = False) -> Any:
        """The trained model, on the CPU: built as the job builds it, or `into`, with the weights of a checkpoint.

        `ema`: the averaged weights of a run with the callback EMA.

        Raises: JobFileError where no job was given that builds it; otherwise as `shoal.load`.
        """
        from shoal.checkpoint.weights import load as load_weights
        from shoal.numerics.isolation import generators_kept
        from shoal.training.lazy_modules import whole

        if into is None:
            with generators_kept(), inside_run(os.environ):  # initial values are drawn, and overwritten
                job = self._job()
                into = whole(job.model(), job if job.grains is not None else replace(job, grains=1))
        return load_weights(self.out, into, step=step, ema=ema)

    def _job(self) -> Any:
        told = self.job
        settings = tuple(told.get("given", {}).items())
        if isinstance(self._given, str):
            return load(replace(parse_target(self._given, ()), settings=settings)).job
        path, function = Path(str(told.get("file"))), told.get("function")
        if is_job(self._given):
            return called(self._given, JobRequest(path, function, settings))[0]
        raise JobFileError(
            given=f"the model of {self.out}",
            conflict=f"its job was of {path}, and a run directory is data: no code that it names is run",
            remedy=f"give the job: shoal.Run({str(self.out)!r}, 'file.py:job'), or the job function itself; "
            "or build the model yourself: run.model(into=MODEL)",
        )

    def __repr__(self) -> str:
        told = ", ".join(f"{name}={value!r}" for name, value in self._rows())
        return f"<shoal.Run {str(self.out)!r}: {told or 'not ended'}>"

    def _repr_html_(self) -> str:
        from shoal.cli.report import account_of
        from shoal.report.notebook import shown

        rows = "".join(f"<tr><th>{escape(n)}</th><td>{escape(_text(v))}</td></tr>" for n, v in self._rows())
        table = f"<table><caption>{escape(str(self.out))}</caption>{rows}</table>"
        try:
            with run_reader(str(self.out)) as reader:
                files = reader.read()
            return f"{table}{shown(account_of(files))}"
        except (ShoalError, OSError):  # what is left of a run that was removed
            return table

    def _rows(self) -> list[tuple[str, Any]]:
        result = self.result
        found = [(name, result[name]) for name in _SHOWN if result.get(name) not in (None, {})]
        return [(name, value[:12] if name == "weights_sha256" else _rounded(value)) for name, value in found]


def _lasting(target: str) -> str:
    """A target that stays the same where the current folder changes: a path becomes an absolute one."""
    text, _ = split_target(target)
    return os.path.abspath(target) if is_path(text) or os.sep in text else target


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _rounded(inner) for name, inner in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {inner}" for name, inner in value.items())
    return "nan" if value is None else str(value)
