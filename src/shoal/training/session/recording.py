"""Records of a Session, in the directory of its checkpoints, for `shoal report`, `shoal watch` and `shoal doctor`."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.keeper import RunState
from shoal.data.order import Order
from shoal.distributed.mesh import Agreement, Report, measures, to_row
from shoal.distributed.process_setup import versions
from shoal.hardware.detect import cores
from shoal.parallel.base import StepSums
from shoal.parallel.model.sharded_model import ShardedModel
from shoal.plans.plan import plan_text
from shoal.runs.attempts import AttemptLog, Events
from shoal.runs.directory import SESSION, RunDirectory, write_file
from shoal.runs.records import StepRecord
from shoal.runs.source import write_source
from shoal.training.observe.step_records import RecordWriter, StepRecords, Surroundings
from shoal.training.observer import StepClock
from shoal.training.session.passes import Base
from shoal.training.update.optimizer_step import Update


class SessionRecords:
    """Step records of a Session, for callbacks and for files. Without a directory for checkpoints nothing is written.

    `ended_by`: the callback that has requested the end, and its reason.
    """

    ended_by: dict[str, Any] | None = None

    def __init__(self, base: Base, clock: StepClock, order: Order) -> None:
        self._base, self._clock, self._order = base, clock, order
        self._measures = Report().measures
        self._began_at, self._began = time.time(), time.monotonic()
        place = base.training.checkpoints
        self._files = RunDirectory(Path(place)) if place is not None and base.mesh.rank == 0 else None
        self._log = AttemptLog(None)
        self._records: StepRecords | None = None
        self._result: dict[str, Any] | None = None  # once the loop has ended
        self.metrics: dict[str, float] = {}  # of the last evaluation

    def begin(self, state: RunState, sharded_model: ShardedModel, num_samples: int | None) -> Surroundings:
        """Write the description of the training, and drop the records of steps after `state`."""
        self._state = state
        files, base = self._files, self._base
        description = {
            "file": os.path.abspath(sys.argv[0]) if sys.argv and sys.argv[0] else "",
            "function": SESSION,
            "settings": {},
            **base.job.describe(),
            "train_samples": num_samples,
            "parameters": sum(p.numel() for _, p in sharded_model.parameters()),
            "versions": versions(),
        }
        if files is not None and base.records_steps:
            self._log = AttemptLog(files.attempts)
            try:
                write_file(files.plan, plan_text(base.plan))
                write_file(files.job, json.dumps(description, indent=2) + "\n")
                if not base.training.no_source:
                    script = getattr(sys.modules.get("__main__"), "__file__", None)  # none in a notebook
                    code = Path(script).absolute().parent if script else Path.cwd()
                    write_source(files.path, code, own_command=True)
                files.result.unlink(missing_ok=True)
            except OSError as error:
                warnings.warn(f"no records: {files.path} cannot be written: {error}", RuntimeWarning, stacklevel=4)
                files = self._files = None
        place = base.training.checkpoints
        around = Surroundings(
            note=lambda text: print(f"shoal: {text}", file=sys.stderr) if base.mesh.rank == 0 else None,
            on_step=lambda record, slowest: None,
            stop_requested=lambda: False,
            out=Path(place) if place is not None else None,
            description=description,
            events=Events(files.events if files is not None else None),
        )
        if not base.records_steps:
            return around
        self._writer = writer = RecordWriter(files.records if files is not None else None, self._log.undone)
        self._records = StepRecords(
            base.mesh, self._clock, base.plan, num_grains=base.job.num_grains, around=around, writer=writer
        )
        self._log.began(
            self._began_at,
            {},
            resumed_from=state.step if base.training.resume else None,
            restarts=0,
            num_steps=self._order.num_steps,
            world_size=base.mesh.world_size,
            threads=torch.get_num_threads(),
            cores=cores(),
            checkpoint_every=base.training.checkpoint_every,
            host=platform.node(),
            device=torch.cuda.get_device_name(base.mesh.device) if base.mesh.device.type == "cuda" else "cpu",
        )
        self._records.forget_after(state.step)
        return around

    @property
    def row(self) -> list[float]:
        """This rank's measures of the last step, for a meeting of the ranks."""
        return to_row(Report(measures=self._measures)) if self._base.records_steps else []

    def add(self, state: RunState, sums: StepSums, update: Update) -> StepRecord | None:
        """Add and return the record of the last step in `state`, which ends now; None if there are no records."""
        if self._records is None:
            return None
        self._state = state
        record = self._records.add(state, sums, update, None, epoch=self._order.epoch(state.step - 1), ranks={})
        self._measures = measures(record.spans, record.seconds, record.memory_bytes)
        return record

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Add the metrics of an evaluation to the record of the step before it, or to the result after the loop."""
        self.metrics = dict(metrics)
        self._write_result({"metrics": _finite(metrics)})
        if self._records is not None:
            self._records.evaluated(metrics)

    def write(self, agreement: Agreement | None) -> None:
        """Write the record of the last step, with the measures of all ranks."""
        if self._records is not None:
            self._records.write(agreement)

    def saves(self, step: int) -> None:
        """Write all records before the checkpoint of `step`."""
        if self._records is not None:
            self._records.saves(step)

    def failed(self) -> None:
        """Replace the end of a loop that seemed to be left, but was left by an error."""
        if self._result is not None and self._result["status"] == "preempted":
            self._log.ended("failed", self._state.step, time.time(), {})
            self._write_result({"status": "failed"})

    def end(self, status: str) -> None:
        """Write what is left, and how the training ended: completed, preempted or failed."""
        if self._records is None:
            return
        state = self._state
        self._records.write()
        self._writer.close()
        self._records = None
        self._log.ended(status, state.step, time.time(), {})
        if self._files is None:
            return
        self._result = {
            "status": status,
            "steps": state.step,
            "samples": state.samples,
            "world_size": self._base.mesh.world_size,
            "wall_seconds": round(time.monotonic() - self._began, 3),
            "train_loss": state.loss,
            "metrics": _finite(self.metrics),
            "sample_digest": state.digest,
            "skipped_steps": state.skipped_steps,
            "versions": versions(),
            **({"ended_by": self.ended_by} if self.ended_by is not None else {}),
        }
        self._write_result({})

    def _write_result(self, changes: Mapping[str, Any]) -> None:
        """Write the result with changed entries, once the loop has ended."""
        if self._result is None or self._files is None:
            return
        self._result |= changes
        try:
            write_file(self._files.result, json.dumps(self._result, indent=2) + "\n")
        except OSError as error:
            warnings.warn(f"{self._files.result} cannot be written: {error}", RuntimeWarning, stacklevel=5)


def _finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}
