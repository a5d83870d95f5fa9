"""Access from Python to a run on disk: its result, its records and the trained model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import JobFileError, RunDirectoryError, ShoalError
from shoal.jobs.job_file import JobRequest, called, is_path, load, parse_target, split_target, with_settings_of
from shoal.jobs.job_object import is_job
from shoal.jobs.settings import Setting, note_other_secrets, settings_from
from shoal.launch.environment import inside_run
from shoal.runs.address import copy_to_read, is_address
from shoal.runs.directory import RunDirectory, read_json
from shoal.runs.records import StepRecord, read_steps
from shoal.runs.run_files import run_reader
from shoal.runs.sound_values import RUNNING

if TYPE_CHECKING:
    from shoal.checkpoint.store import Step

_SHOWN = ("status", "steps", "train_loss", "metrics", "wall_seconds", "world_size", "weights_sha256")


class Run:
    """A run directory: its path, its files and the trained model.

    Args:
        out: path or address of the run directory. For an address, every access reads the current remote files.
        job: the trained job, which `model()` builds: a Job, a job function, or "file.py:function". A run that
            `shoal.run` returns already has it. Code that only the directory names is never executed.
        settings: settings of the job, over those of the run. Secrets are not in the directory, and are given here.

    Raises: RunDirectoryError if there is no run.
    """

    def __init__(self, out: str | os.PathLike[str], job: Any = None, settings: Mapping[str, Any] | None = None) -> None:
        text = os.fspath(out)
        self.out: Path | str = text if is_address(text) else Path(text)
        self._given = job
        self._settings: tuple[tuple[str, Setting], ...] = tuple(settings_from(settings or {}).items())
        if isinstance(job, str | os.PathLike):  # relative paths become absolute, since the current folder may change
            target = os.fspath(job)
            path, _ = split_target(target)
            self._given = os.path.abspath(target) if is_path(path) or os.sep in path else target
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
        """Content of `result.json`; empty while the run has not ended."""
        with self._files() as files:
            result = read_json(files.result) or {}
            return result if result.get("status") != RUNNING else {}

    @property
    def job(self) -> Mapping[str, Any]:
        """Content of `job.json`: names and numbers that describe the trained job."""
        with self._files() as files:
            return read_json(files.job, exactly=True) or {}

    @property
    def records(self) -> list[StepRecord]:
        """Records of all steps in order of training, from `records.jsonl`."""
        with self._files() as files:
            return list(read_steps(files.records)) if files.records.exists() else []

    def model(self, into: Any = None, *, step: Step = "last", ema: bool = False) -> Any:
        """Return the trained model on the CPU, built by the job or given as `into`, with the weights of a checkpoint.

        `ema`: load the averaged weights of a run with the callback EMA.
        Raises: JobFileError without a job to build the model; otherwise as `shoal.load`.
        """
        from shoal.checkpoint.weights import load as load_weights
        from shoal.numerics.generators import generators_kept
        from shoal.parallel.model.adapters import adapted
        from shoal.training.setup.job_model import whole

        if into is None:
            with generators_kept(), inside_run(os.environ):  # initial values are drawn and then overwritten
                description = self.job
                path, function = Path(str(description.get("file"))), description.get("function")
                if isinstance(self._given, str):
                    request = replace(parse_target(self._given, ()), settings=self._settings)
                    loaded = load(with_settings_of(request, description, all_known=True))
                    job, settings = loaded.job, loaded.settings
                elif is_job(self._given):
                    request = with_settings_of(JobRequest(path, function, self._settings), description, all_known=True)
                    job, settings = called(self._given, request)
                else:
                    raise JobFileError(
                        given=f"the model of {self.out}",
                        conflict=f"its job was of {path}, and a run directory is data: no code that it names is run",
                        remedy=f"give the job: shoal.Run({str(self.out)!r}, 'file.py:job'), or the job function "
                        "itself; or build the model yourself: run.model(into=MODEL)",
                    )
                note_other_secrets(settings, description)
                into = whole(adapted(job.model()), job if job.grains is not None else replace(job, grains=1))
        return load_weights(self.out, into, step=step, ema=ema)

    def __repr__(self) -> str:
        shown_values = ", ".join(f"{name}={value!r}" for name, value in self._rows())
        return f"<shoal.Run {str(self.out)!r}: {shown_values or 'not ended'}>"

    def _repr_html_(self) -> str:
        from shoal.planner.calibrate.comparison import account_of
        from shoal.report.run_page import notebook_view

        rows = "".join(f"<tr><th>{escape(n)}</th><td>{escape(_text(v))}</td></tr>" for n, v in self._rows())
        table = f"<table><caption>{escape(str(self.out))}</caption>{rows}</table>"
        try:
            with run_reader(str(self.out)) as reader:
                files = reader.read()
            return f"{table}{notebook_view(account_of(files))}"
        except (ShoalError, OSError):  # the run was removed or is incomplete
            return table

    def _rows(self) -> list[tuple[str, Any]]:
        result = self.result
        rows = [(name, result[name]) for name in _SHOWN if result.get(name) not in (None, {})]
        return [(name, value[:12] if name == "weights_sha256" else _rounded(value)) for name, value in rows]


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _rounded(inner) for name, inner in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {inner}" for name, inner in value.items())
    return "nan" if value is None else str(value)
