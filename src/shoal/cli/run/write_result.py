"""Result file of a run, `result.json`, written at every kind of end."""

from __future__ import annotations

import math
import platform
import time
import warnings
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from shoal.checkpoint.keeper import RunState
from shoal.checkpoint.state import sha256_of
from shoal.distributed.failures import to_json
from shoal.distributed.process_setup import versions
from shoal.errors import ShoalError, StorageError
from shoal.hardware.values import kind_of
from shoal.parallel.model.sharded_model import whole_tensors
from shoal.planner.calibrate.comparison import MeasuredStep, beside
from shoal.runs.attempts import AttemptLog, EffectiveTime, earlier_starts
from shoal.runs.directory import Fence, RunDirectory
from shoal.runs.records import RunRecord, StepRecord
from shoal.training.loop.trainer import Outcome
from shoal.training.microbatch.policy import MicrobatchPolicy
from shoal.training.observe.metering import Shares, StepMeter, blocks, describe, predicted
from shoal.training.setup.engine import Engine

_RECENT = 1000  # number of steps to compare with the prediction


@dataclass
class Result:
    """Result of this call, updated with each step. `last`: the last finished step, or the state of a checkpoint."""

    engine: Engine
    path: Path
    started_at: float
    certificate: str | None
    resumed_from: int | None
    last: RunState | StepRecord | None
    first_step_at: float | None = None
    recent: deque[MeasuredStep] = field(default_factory=lambda: deque(maxlen=_RECENT))
    peak_bytes: int | None = None
    restarts: int = 0
    fence: Fence = field(default_factory=Fence)
    log: AttemptLog = field(default_factory=lambda: AttemptLog(None))
    trained_at: float | None = None
    after: dict[str, float] = field(default_factory=dict)
    began_at: float | None = None  # start of training in this attempt
    call_began_at: float | None = None  # differs from `started_at` after an engine's restart
    effective: EffectiveTime = field(init=False)

    def __post_init__(self) -> None:
        self.effective = EffectiveTime(self.resumed_from or 0)

    def take(self, record: StepRecord) -> None:
        """Count a finished step."""
        self.last = record
        self.effective.take(record)
        self.recent.append(MeasuredStep.of(record))
        self.peak_bytes = int(record.ranks["memory_bytes"].max) if "memory_bytes" in record.ranks else None
        self.first_step_at = self.first_step_at or time.time()

    def of(self, outcome: Outcome, num_steps: int, served: dict[str, Any] | None) -> RunRecord:
        """Return the record of a training that ended normally, up to `num_steps`.

        Collective: all ranks.
        """
        self.trained_at, self.after = time.time(), outcome.after
        engine, state = self.engine, outcome.state
        seconds = np.array(outcome.step_seconds or [math.nan])
        median, p10, p90 = (float(np.percentile(seconds, q)) for q in (50, 10, 90))
        predicted = {} if served is not None else engine.plan.prediction  # the planner does not support servers
        compression = engine.strategy.compression
        early, wanted = None, engine.order.samples_before(num_steps)
        is_stream = engine.num_train_samples is None
        if is_stream and outcome.status == "completed" and not outcome.ended_by and state.samples < wanted:
            early = {"steps": state.step, "wanted_steps": num_steps}
            early |= {"samples": state.samples, "wanted_samples": wanted}
        record = RunRecord(
            status="failed" if outcome.unsaved else outcome.status,
            error=_error_fields(outcome.unsaved, engine.mesh.rank) if outcome.unsaved else None,
            steps=state.step,
            samples=state.samples,
            world_size=engine.plan.degrees.world_size,
            train_loss=state.loss,
            metrics={k: v if math.isfinite(v) else None for k, v in outcome.metrics.items()},
            eval_samples=outcome.eval_samples,
            best=state.best,
            weights_sha256=sha256_of(
                whole for _, whole in whole_tensors(engine.sharded_model, engine.sharded_model.state_dict())
            ),
            sample_digest=state.digest,
            step_seconds={"median": median, "p10": p10, "p90": p90} if outcome.step_seconds else {},
            wall_seconds=time.time() - self.started_at,
            first_step_seconds=self.first_step_at - self.started_at if self.first_step_at else None,
            look_seconds=round(engine.computer.look_seconds, 6),
            resumed_from=self.resumed_from,
            restarts=self.restarts,
            ettr=self.ettr(),
            skipped_steps=state.skipped_steps,
            compression={"scheme": compression.scheme, "fell_back": compression.fell_back} if compression else None,
            certificate=self.certificate,
            computation=state.computation,
            versions=versions(),
            server=served,
            ended_early=early,
            ended_by=outcome.ended_by,
        )
        kind = kind_of(engine.mesh.device.type)
        compared = beside(predicted, self.recent, self.peak_bytes, kind) if predicted.get("terms") else None
        return replace(record, prediction=compared, **_measured(engine, outcome))

    def ettr(self) -> float | None:
        """Return the effective training time ratio of this call, from the first step of its first start; on rank 0."""
        if self.engine.mesh.rank != 0 or self.began_at is None:
            return None
        began_at, seconds = self.began_at, self.effective.seconds + self.after.get("evaluation", 0.0)
        if self.restarts:
            files = RunDirectory(self.path.parent)
            since = self.call_began_at or self.started_at
            first, earlier_seconds = earlier_starts(files.attempts, files.records, since, self.resumed_from or 0)
            began_at, seconds = min(began_at, first or began_at), seconds + earlier_seconds
        whole = (self.trained_at or time.time()) - began_at
        return round(min(1.0, seconds / whole), 6) if whole > 0.0 and seconds > 0.0 else None

    def write(self, record: RunRecord) -> StorageError | None:
        """Write the file on rank 0. Return the error if that fails."""
        try:
            if self.engine.mesh.rank == 0:
                self.fence.write(self.path, record.to_json())
                trained_at, writer = self.trained_at or time.time(), self.engine.keeper.writer
                writing = writer.mean_cpu_seconds() if writer is not None else None
                self.log.ended(record.status, record.steps, trained_at, self.after, checkpoint_cpu=writing)
        except OSError as error:
            return StorageError(
                given=str(self.path),
                conflict=f"it could not be written: {error}",
                remedy="mend the disk; --resume goes on from the newest checkpoint that is there",
            )
        return None

    def write_failed(self, error: ShoalError) -> None:
        """Write the file of a training that failed, on rank 0, if possible."""
        at = self.last or RunState()
        self.write(
            RunRecord(
                status="failed",
                steps=at.step,
                samples=at.samples,
                world_size=self.engine.plan.degrees.world_size,
                train_loss=at.loss,
                metrics={},
                eval_samples=0,
                weights_sha256=None,
                sample_digest=at.digest if self.last else None,
                step_seconds={},
                wall_seconds=time.time() - self.started_at,
                resumed_from=self.resumed_from,
                restarts=self.restarts,
                ettr=self.ettr(),
                error=_error_fields(error, self.engine.mesh.rank),
                versions=versions(),
            )
        )


def _error_fields(error: ShoalError, rank: int) -> dict[str, Any]:
    return {k: v for k, v in to_json(error, rank, platform.node()).items() if k != "traceback"}


def _measured(engine: Engine, outcome: Outcome) -> dict[str, Any]:
    """Return the entries `traffic` and `memory` of the result.

    Collective: all ranks, a JSON gather.
    """
    meter, mesh = engine.observer, engine.mesh
    if not isinstance(meter, StepMeter) or not meter.attached:
        return {}
    measurement = meter.to_json()
    if measurement is not None:
        computation = MicrobatchPolicy.from_json(
            outcome.state.computation or {"grains_per_microbatch": 1, "buffers": ()}
        )
        grains = engine.order.grains(measurement["step"] - 1)
        shares = Shares(engine.job.num_grains, grains, computation.effective_grains, engine.buffers.num_values)
        try:
            step = describe(engine.sharded_model, engine.updater.optimizer, engine.plan, engine.precision, shares)
            compression = engine.strategy.compression
            ended = compression.fell_back if compression is not None else None
            is_compressed = ended is None or ended["step"] >= measurement["step"]
            plan = engine.plan if is_compressed else engine.plan.uncompressed
            measurement["predicted"] = predicted(plan, step, mesh.rank)
        except Exception as error:  # a failed prediction must not cost a finished run its result
            measurement["predicted"] = None
            warnings.warn(f"no prediction of traffic and memory: {error}", RuntimeWarning, stacklevel=2)
    return blocks(mesh.gather_json(measurement))
