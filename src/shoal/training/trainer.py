"""Trainer: the step loop. Everything is given to it; it looks nothing up."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shoal.checkpoint.keeper import Keeper, RunState
from shoal.data.order import Order
from shoal.distributed.agreement import Agreement, Report, agree, from_rows, measures, raise_together, to_row
from shoal.distributed.failures import as_shoal_error
from shoal.errors import IntegrityError, JobError, NonFiniteError, StorageError
from shoal.job import Job, Progress
from shoal.parallel.base import StepSums
from shoal.runs.records import StepRecord
from shoal.training.computation import MicrobatchPolicy
from shoal.training.evaluation import Evaluator
from shoal.training.nonfinite import NonFiniteSearch
from shoal.training.optimizer_step import Parameters, Update, Updater
from shoal.training.step import StepParts, StepRunner
from shoal.training.telemetry import RecordWriter

# So many steps in a row that are not finite are no accident that leaving them out could mend.
MAX_BAD_STREAK = 10
# A stop that arrives after the sums of a step were sent is seen one step later where the agreement travels with them;
# steps longer than this are worth an agreement of their own.
_LONG_STEP_SECONDS = 0.5


@dataclass(frozen=True)
class Surroundings:
    """What the trainer tells and asks: a line for people, a finished step, and whether a stop was requested."""

    note: Callable[[str], None]
    on_step: Callable[[StepRecord, int], None]
    stop_requested: Callable[[], bool]


@dataclass(frozen=True)
class Parts:
    """What the trainer works with. `num_steps` is where this run ends, which need not be the job's own length."""

    job: Job
    model: nn.Module
    parameters: Parameters
    step: StepParts
    updater: Updater
    order: Order
    evaluator: Evaluator
    keeper: Keeper
    records: RecordWriter
    num_steps: int


@dataclass
class Outcome:
    """How a training ended: completed or preempted, after which state; `unsaved` where that was not written."""

    status: str
    state: RunState
    metrics: dict[str, float]
    eval_samples: int
    step_seconds: list[float] = field(default_factory=list)
    unsaved: StorageError | None = None


# The step after which the model was last evaluated, the metrics, and of how many samples they are.
Evaluated = tuple[int, dict[str, float], int]


def conclude(
    parts: Parts, state: RunState, status: str, evaluated: Evaluated | None, step_seconds: list[float]
) -> Outcome:
    """Saves the last state and evaluates it, unless it was `evaluated`. Collective: all ranks."""
    unsaved: StorageError | None = None
    try:
        parts.keeper.save(state, wait=True)
    except StorageError as error:
        unsaved = error
    if status != "completed":
        return Outcome(status, state, {}, 0, step_seconds, unsaved)
    if evaluated is None or evaluated[0] != state.step:
        try:
            evaluated = state.step, *parts.evaluator.evaluate(parts.model)
        except Exception as error:
            told = as_shoal_error(error)
            if unsaved is None:
                parts.keeper.rescue(told, state)
            raise told from error
        parts.step.strategy.rest()
    return Outcome(status, state, *evaluated[1:], step_seconds, unsaved)


def measured(
    parts: Parts, state: RunState, sums: StepSums, update: Update, found: dict[str, Any] | None
) -> dict[str, Any]:
    """What every record has of the step that `state` has counted last; ends the step's time."""
    seconds, spans = parts.step.clock.end()
    return {
        "step": state.step,
        "samples": state.samples,
        "num_samples": sums.num_samples,
        "loss": state.loss,
        "weight": sums.weight if math.isfinite(sums.weight) else None,
        "grad_norm": update.grad_norm if math.isfinite(update.grad_norm) else None,
        "learning_rate": update.learning_rate if math.isfinite(update.learning_rate) else 0.0,
        "loss_scale": state.loss_scale.scale if state.loss_scale.active else None,
        "seconds": seconds,
        "spans": spans,
        "memory_bytes": parts.step.clock.peak_memory_bytes(),
        "digest": state.digest,
        "skipped": update.skipped,
        "nonfinite": found,
    }


class Trainer:
    """Trains one job on this rank, in step with the others."""

    def __init__(self, parts: Parts, surroundings: Surroundings, state: RunState) -> None:
        self._parts, self._around, self.state = parts, surroundings, state
        self._mesh, self._clock, self._buffers = parts.step.mesh, parts.step.clock, parts.step.buffers
        self._runner = StepRunner(parts.step)
        if state.computation is not None:
            self._runner.recall(state.computation)
        self._first_scale = state.loss_scale
        self._agreed: Agreement | None = None
        self._record: StepRecord | None = None
        self._computation: MicrobatchPolicy | None = None  # that of which the state has the JSON value
        self._measures: tuple[float, ...] = Report().measures
        self._step_seconds: list[float] = []
        self._evaluated: Evaluated | None = None
        self._num_updates = parts.updater.num_begun  # those that the state counts

    @property
    def _factor(self) -> float:
        return self.state.loss_scale.factor(self._parts.job.global_batch)

    def train(self) -> Outcome:
        """Trains to the end, or to the first step at which any rank was asked to stop.

        Raises: ShoalError, on every rank: its own where it failed, else a PeerError that names who did.
        """
        parts = self._parts
        parts.model.train()
        if parts.job.on_nonfinite == "rollback" and self.state.step == 0:
            parts.keeper.save(self.state, wait=True)
        try:
            status = self._steps()
        except Exception as error:
            told = as_shoal_error(error)
            parts.keeper.rescue(told, self.state, self._torn)
            if self._record is not None:  # the last good step's, of which the other ranks' measures are still to come
                self._parts.records.write(self._record)
                self._around.on_step(self._record, self._mesh.rank)
            raise told from error
        self._flush()
        return conclude(parts, self.state, status, self._evaluated, self._step_seconds)

    @property
    def _torn(self) -> str | None:
        """Why model and optimizer are not those of the state; None where they are."""
        if self._parts.updater.num_begun == self._num_updates:
            return None
        return "the error came in the midst of an update"

    def _steps(self) -> str:
        """All the steps that are left, or until a stop: completed or preempted."""
        parts = self._parts
        while self.state.step < parts.num_steps:
            self._clock.begin()
            data = self._runner.fetch(self.state.step)
            agreement = self._agree(data is not None)
            self._agreed = None
            if agreement.stop:
                return "preempted"
            if not agreement.any_data:
                break
            if agreement.checkpoint:
                self._clock.mark("checkpoint")
                parts.keeper.save(self.state)
            try:
                sums = self._runner.run(data, self._factor, self._say)
            except Exception:
                with contextlib.suppress(JobError):  # of a buffer that has another shape now: that is the error
                    self._buffers.restore()  # to those of the last good step
                raise
            if self._runner.has_next and sums.rows is not None:
                agreement = from_rows(sums.rows)
                self._write_record(agreement)
                long = agreement.spreads["step_seconds"].max > _LONG_STEP_SECONDS
                self._agreed = None if long else agreement
            self._apply(sums)
        return "completed"

    def _say(self, has_data: bool, error: bool) -> list[float]:
        """This rank's row about the next step, sent with the sums of the one in hand."""
        return to_row(self._report(has_data, error, self.state.step + 1))

    def _report(self, has_data: bool, error: bool, step: int) -> Report:
        return Report(has_data, error, self._around.stop_requested(), self._parts.keeper.due(step), self._measures)

    def _agree(self, has_data: bool) -> Agreement:
        """What all agree on before a step: it came with the last step's sums, or is asked for now."""
        self._clock.mark("exposed_communication")
        agreement = self._agreed
        if agreement is None:
            report = self._report(has_data, self._runner.error is not None, self.state.step)
            agreement = agree(self._mesh, report)
            self._write_record(agreement)
        if agreement.any_error:
            raise_together(self._mesh, self._runner.error)
        self._clock.mark("other")
        return agreement

    def _apply(self, sums: StepSums) -> None:
        """From the sums to the next state; every rank decides the same, since it sees the same numbers."""
        parts, state = self._parts, self.state
        self._clock.mark("optimizer")
        progress = Progress(state.step, parts.order.num_steps, state.samples)
        found = state.bad_steps.get(state.step)
        if found is not None:
            update = Update(math.nan, math.nan, "nonfinite")
        else:
            update = parts.updater.step(sums.loss, sums.weight, state.loss_scale, progress)
            if update.skipped == "nonfinite":
                found = self._nonfinite(sums)
                if found is None:
                    return  # rolled back
        if update.skipped is None:
            self._buffers.assign(sums.buffers, sums.num_samples)
        parts.step.observer.updated(update.skipped)
        self._advance(sums, update, found)

    def _nonfinite(self, sums: StepSums) -> dict[str, Any] | None:
        """Acts on the job's policy; None after a rollback. Raises: NonFiniteError, the same on every rank."""
        parts, state = self._parts, self.state
        if parts.step.sharded_model.divided:  # a sample alone would be computed by all ranks of the model
            found: dict[str, Any] = {"rank": None, "host": None, "grains": [], "samples": [], "other_ranks": []}
        else:
            search = NonFiniteSearch(parts.step.computer, parts.step.precision, parts.parameters)
            found = search.find(self._mesh, self._runner.seen)
        self._buffers.restore()
        state.bad_streak += 1
        culprit = f"rank {found['rank']} on {found['host']}, grains {found['grains']}, samples {found['samples']}"
        if parts.step.sharded_model.divided:
            culprit = "which sample brought it is not searched for in a divided model"
        what = "loss" if not math.isfinite(sums.loss) else "gradient"
        self._around.note(f"step {state.step}: {what} is not finite: {culprit}: {parts.job.on_nonfinite}")
        if parts.job.on_nonfinite == "stop" or state.bad_streak > MAX_BAD_STREAK:
            with contextlib.suppress(StorageError):  # was warned of; what comes now is the reason to end
                parts.keeper.save(state, wait=True)
            many = f", as in the {MAX_BAD_STREAK} steps before" if state.bad_streak > MAX_BAD_STREAK else ""
            raise NonFiniteError(
                given=f"step {state.step}: {culprit}",
                conflict=f"the {what} there is not finite{many}; the parameters are those before the step",
                remedy='mend or drop these samples, or set Job(on_nonfinite="skip") or "rollback" and --resume',
            )
        if parts.job.on_nonfinite == "skip":
            return found
        bad_steps, streak = {**state.bad_steps, state.step: found}, state.bad_streak
        self._num_updates = -1  # until the model is that of a state again
        restored, complaints = parts.keeper.load(self._first_scale)
        for complaint in complaints:
            self._around.note(complaint)
        if restored is None:
            raise IntegrityError(
                given="a rollback",
                conflict="the checkpoint that this run wrote before its first step is not there any more",
                remedy="leave the run directory alone while the run lasts; start anew with another --out",
            )
        self.state, self._computation, self._num_updates = restored, None, parts.updater.num_begun
        self.state.bad_steps, self.state.bad_streak = bad_steps, streak
        self._runner.forget()
        self._agreed = None
        parts.step.loader.seek(self.state.step, parts.step.computer.computation.effective_grains)
        parts.records.forget_after(self.state.step)
        self._around.note(f"rolled back to step {self.state.step}; step {max(bad_steps)} will be left out")
        return None

    def _advance(self, sums: StepSums, update: Update, found: dict[str, Any] | None) -> None:
        parts, state = self._parts, self.state
        parts.step.loader.commit()
        state.advance(sums, update.skipped)
        self._num_updates = parts.updater.num_begun
        if parts.step.computer.computation is not self._computation:
            self._computation = parts.step.computer.computation
            state.computation = self._computation.to_json()
        self._record = StepRecord(
            **measured(parts, state, sums, update, found),
            epoch=parts.order.epoch(state.step - 1),
            ranks={},
            compression=self._compared(sums, update),
        )
        self._step_seconds.append(self._record.seconds)
        self._measures = measures(self._record.spans, self._record.seconds, self._record.memory_bytes)
        self._evaluate_epoch()

    def _compared(self, sums: StepSums, update: Update) -> dict[str, Any] | None:
        """What the guard of compressed sums has seen in this step; it is said once where it ends the compression."""
        compression, found = self._parts.step.strategy.compression, sums.compared
        if compression is None or found is None:
            return None
        said = compression.said(found) if update.skipped is None else None
        if said is not None:
            self._around.note(said)
        return {**found.to_json(), "fell_back": said is not None}

    def _evaluate_epoch(self) -> None:
        """Evaluates where an epoch has ended; outside the step's time."""
        parts, state = self._parts, self.state
        if parts.order.epoch(state.step) == parts.order.epoch(state.step - 1) or self._record is None:
            return
        metrics, count = parts.evaluator.evaluate(parts.model)
        parts.step.strategy.rest()
        if count:
            self._evaluated = state.step, metrics, count
            self._record = self._record.evaluated(metrics)

    def _write_record(self, agreement: Agreement) -> None:
        """Writes the last step's record, now that every rank's measures of it are known."""
        if self._record is None:
            return
        record = self._record.with_ranks(agreement.spreads)
        self._record = None
        self._parts.records.write(record)
        self._around.on_step(record, agreement.slowest_rank)

    def _flush(self) -> None:
        """Collective: all ranks."""
        self._write_record(agree(self._mesh, Report(measures=self._measures)))
