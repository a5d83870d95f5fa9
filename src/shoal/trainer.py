"""Trainer: the step loop. Everything is given to it; it looks nothing up."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from shoal.agreement import Agreement, Report, agree, measures, raise_together, together
from shoal.checkpoint.keeper import Keeper, RunState
from shoal.computation import Computation, Computer, RedoError
from shoal.data.loader import Loader, Microbatch, StepData
from shoal.data.order import Order, chain_digest
from shoal.errors import LossError, NonFiniteError, OutOfMemoryError, ShoalError
from shoal.evaluation import Evaluator
from shoal.faults import as_shoal_error, is_out_of_memory
from shoal.job import Job, Progress
from shoal.mesh import Mesh
from shoal.nonfinite import Search
from shoal.precision import LossScale, Precision
from shoal.records import StepRecord
from shoal.strategies.base import NUM_SUMS, Flags, StepSums, Strategy, microbatch_sums
from shoal.strategies.buffers import StepBuffers
from shoal.telemetry import RecordWriter, StepClock, peak_memory_bytes
from shoal.update import Parameters, Update, Updater

# So many steps in a row that are not finite are no accident that leaving them out could mend.
MAX_BAD_STREAK = 10
# Below this loss scale an overflow is not the scale's doing.
_SMALLEST_SCALE = 2.0**-10


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
    mesh: Mesh
    model: nn.Module
    parameters: Parameters
    precision: Precision
    strategy: Strategy
    updater: Updater
    loader: Loader
    order: Order
    evaluator: Evaluator
    keeper: Keeper
    records: RecordWriter
    clock: StepClock
    num_steps: int
    computation: Computation
    loss_scale: LossScale


@dataclass
class Outcome:
    """How a training ended: completed or preempted, after which state."""

    status: str
    state: RunState
    metrics: dict[str, float]
    eval_samples: int
    step_seconds: list[float] = field(default_factory=list)


class Trainer:
    """Trains one job on this rank, in step with the others."""

    def __init__(self, parts: Parts, surroundings: Surroundings, state: RunState | None) -> None:
        self._parts, self._around = parts, surroundings
        self.state = state or RunState(loss_scale=parts.loss_scale)
        self._computer = Computer(parts.job, parts.model, parts.precision, parts.computation)
        if self.state.computation is not None:
            known = Computation.from_json(self.state.computation)
            self._computer.computation = parts.computation.with_care_of(
                replace(known, grains_per_microbatch=parts.computation.grains_per_microbatch)
            )
        self._buffers = StepBuffers(parts.model)
        self._error: ShoalError | None = None
        self._proposal: Computation | None = None
        self._seen: list[Microbatch] = []
        self._record: StepRecord | None = None
        self._measures: tuple[float, ...] = Report().measures
        self._probed = False
        self._step_seconds: list[float] = []
        self._evaluated: tuple[int, dict[str, float], int] | None = None

    def train(self) -> Outcome:
        """Trains to the end, or to the first step at which any rank was asked to stop.

        Raises: ShoalError, on every rank: its own where it failed, else a PeerError that names who did.
        """
        parts = self._parts
        parts.model.train()
        if parts.job.on_nonfinite == "rollback" and self.state.step == 0:
            parts.keeper.save(self.state)
        status = "completed"
        while self.state.step < parts.num_steps:
            parts.clock.begin()
            data = self._fetch(self.state.step)
            agreement = self._agree(data is not None)
            if agreement.stop:
                status = "preempted"
                break
            if not agreement.any_data:
                break
            if agreement.checkpoint:
                parts.clock.mark("checkpoint")
                parts.keeper.save(self.state)
            self._step(data)
        self._flush()
        return self._finish(status)

    def _finish(self, status: str) -> Outcome:
        parts = self._parts
        parts.keeper.save(self.state, wait=True)
        metrics: dict[str, float] = {}
        eval_samples = 0
        if status == "completed":
            if self._evaluated and self._evaluated[0] == self.state.step:
                _, metrics, eval_samples = self._evaluated
            else:
                metrics, eval_samples = parts.evaluator.evaluate(parts.model)
        return Outcome(status, self.state, metrics, eval_samples, self._step_seconds)

    def _fetch(self, step: int) -> StepData | None:
        """This rank's part of the step with its first microbatch read, so that a bad sample is known before any sum."""
        self._parts.clock.mark("data_wait")
        try:
            data = self._parts.loader.step(step)
            if data is None or not data.num_microbatches:
                return data
            first = next(data.microbatches)
            return replace(data, microbatches=itertools.chain([first], data.microbatches))
        except Exception as error:
            self._error = as_shoal_error(error)
            return None

    def _agree(self, has_data: bool) -> Agreement:
        self._parts.clock.mark("exposed_communication")
        report = Report(
            has_data,
            self._error is not None,
            self._around.stop_requested(),
            self._parts.keeper.due(self.state.step),
            self._measures,
        )
        agreement = agree(self._parts.mesh, report)
        self._write_record(agreement)
        if agreement.any_error:
            raise_together(self._parts.mesh, self._error)
        self._parts.clock.mark("other")
        return agreement

    def _step(self, data: StepData | None) -> None:
        if not self._probed:
            data = self._probe(data)
        while True:
            sums = self._compute(data)
            if sums.flags.errors:
                raise_together(self._parts.mesh, self._error)
            if not sums.flags.redo:
                break
            data = self._adopt(self._proposal)
        self._apply(sums)

    def _probe(self, data: StepData | None) -> StepData | None:
        """Finds out, once, how the model has to be computed; the ranks take the most careful finding."""
        self._probed = True
        first: Microbatch | None = None
        if data is not None and data.num_microbatches:
            first = next(data.microbatches)
            data = replace(data, microbatches=itertools.chain([first], data.microbatches))

        def propose() -> Computation | None:
            if first is None:
                return None
            try:
                return self._computer.propose(first, self._buffers)
            except Exception as error:
                if is_out_of_memory(error):  # the step itself will say so again, and is then divided
                    return None
                raise

        found = together(self._parts.mesh, propose)
        before = self._computer.computation.effective_grains
        return self._adopt(found) if self._agreed(found).effective_grains != before else data

    def _agreed(self, proposal: Computation | None) -> Computation:
        """Collective: all ranks, one JSON gather."""
        told = self._parts.mesh.gather_json(proposal.to_json() if proposal else None)
        agreed = self._computer.computation
        for document in filter(None, told):
            agreed = agreed.with_care_of(Computation.from_json(document))
        if agreed.randomness == "opaque" and self._computer.computation.randomness != "opaque":
            self._around.note("the model draws at random in ways that cannot be told apart by grain: grain by grain")
        elif not agreed.fuse and self._computer.computation.fuse and agreed.grains_per_microbatch > 1:
            self._around.note("the loss of a batch is not the sum of its grains' losses: computing grain by grain")
        self._computer.computation = agreed
        self._buffers.watch(agreed.buffers)
        self.state.computation = agreed.to_json()
        return agreed

    def _adopt(self, proposal: Computation | None) -> StepData | None:
        """Agrees on a more careful computation and fetches the step again for it."""
        agreed = self._agreed(proposal)
        self._buffers.restore()
        self._parts.loader.seek(self.state.step, agreed.effective_grains)
        self._proposal = None
        data = self._fetch(self.state.step)
        raise_together(self._parts.mesh, self._error)
        return data

    def _compute(self, data: StepData | None) -> StepSums:
        """Gradients and sums of the step. An exception here leaves every rank in step: it travels with the sums."""
        parts = self._parts
        parts.strategy.begin()
        self._buffers.begin()
        self._seen = []
        flags = Flags()
        try:
            if data is not None:
                for number in range(data.num_microbatches):
                    parts.clock.mark("data_wait")
                    microbatch = next(data.microbatches)
                    self._seen.append(replace(microbatch, batch=None))
                    self._microbatch(microbatch, last=number == data.num_microbatches - 1)
        except RedoError as redo:
            self._proposal, flags = redo.proposal, Flags(redo=1)
        except Exception as error:
            flags = self._failed(error)
        return parts.strategy.finish(flags, NUM_SUMS + self._buffers.num_values)

    def _failed(self, error: Exception) -> Flags:
        grains = self._computer.computation.effective_grains
        if not is_out_of_memory(error):
            self._error = as_shoal_error(error)
        elif grains > 1:
            torch.cuda.empty_cache()
            self._proposal = replace(self._computer.computation, grains_per_microbatch=grains // 2)
            return Flags(redo=1)
        else:
            self._error = OutOfMemoryError(
                given=f"grains of {self._parts.job.grain_size} samples",
                conflict=f"one of them alone does not fit in memory: {str(error).splitlines()[0][:200]}",
                remedy="use smaller grains: Job(grains=...) larger, or a smaller global_batch",
            )
        return Flags(errors=1)

    def _microbatch(self, microbatch: Microbatch, last: bool) -> None:
        parts = self._parts
        parts.clock.mark("host_to_device")
        batch = parts.precision.inputs(microbatch.batch)
        parts.clock.mark("forward")
        with self._computer.scope(microbatch):
            total, weight = self._computer.loss(batch)
            if not total.requires_grad:
                raise LossError(
                    given="a loss whose total depends on no trainable parameter",
                    conflict="it has no gradient",
                    remedy="compute it from the model that the loss is given, outside torch.no_grad()",
                )
            unknown = self._buffers.changed().difference(self._buffers.names)
            if unknown:
                names = tuple({*self._buffers.names, *unknown})
                raise RedoError(replace(self._computer.computation, buffers=names), "further buffers change")
            sums = microbatch_sums(microbatch, total, weight, self._buffers.weighted(microbatch.num_samples))
            parts.clock.mark("backward")
            factor = self.state.loss_scale.factor(parts.job.global_batch)
            parts.strategy.backward(microbatch, total * factor if factor != 1.0 else total, sums, last)
        self._buffers.restore()

    def _apply(self, sums: StepSums) -> None:
        """From the sums to the next state; every rank decides the same, since it sees the same numbers."""
        parts, state = self._parts, self.state
        parts.clock.mark("optimizer")
        progress = Progress(state.step, parts.order.num_steps, state.samples)
        finite = math.isfinite(sums.loss) or sums.weight == 0.0
        bad_before = state.step in state.bad_steps
        update = Update(math.nan, math.nan, "nonfinite")
        if finite and not bad_before:
            factor = state.loss_scale.factor(parts.job.global_batch)
            update = parts.updater.step(sums.weight, factor, progress)
        found: dict[str, Any] | None = None
        if update.skipped == "nonfinite" and finite and not bad_before and self._scale_can_fall():
            update = replace(update, skipped="overflow")
        if update.skipped == "nonfinite" and not bad_before:
            found = self._nonfinite(sums)
            if found is None:
                return  # rolled back
        if update.skipped is None:
            self._buffers.assign(sums.buffers, sums.num_samples)
        self._advance(sums, update, found)

    def _scale_can_fall(self) -> bool:
        return self.state.loss_scale.dynamic and self.state.loss_scale.scale > _SMALLEST_SCALE

    def _nonfinite(self, sums: StepSums) -> dict[str, Any] | None:
        """Acts on the job's policy; None after a rollback. Raises: NonFiniteError, the same on every rank."""
        parts, state = self._parts, self.state
        search = Search(self._computer, parts.precision, parts.parameters)
        found = search.find(parts.mesh, self._seen)
        self._buffers.restore()
        state.bad_streak += 1
        culprit = f"rank {found['rank']} on {found['host']}, grains {found['grains']}, samples {found['samples']}"
        what = "loss" if not math.isfinite(sums.loss) else "gradient"
        self._around.note(f"step {state.step}: {what} is not finite: {culprit}: {parts.job.on_nonfinite}")
        if parts.job.on_nonfinite == "stop" or state.bad_streak > MAX_BAD_STREAK:
            parts.keeper.save(state, wait=True)
            many = f", as in the {MAX_BAD_STREAK} steps before" if state.bad_streak > MAX_BAD_STREAK else ""
            raise NonFiniteError(
                given=f"step {state.step}: {culprit}",
                conflict=f"the {what} there is not finite{many}; the parameters are those before the step",
                remedy='mend or drop these samples, or set Job(on_nonfinite="skip") or "rollback" and --resume',
            )
        if parts.job.on_nonfinite == "skip":
            return found
        bad_steps, streak = {*state.bad_steps, state.step}, state.bad_streak
        restored, complaints = parts.keeper.load(parts.loss_scale)
        for complaint in complaints:
            self._around.note(complaint)
        assert restored is not None, "a run that rolls back keeps a checkpoint from its first step on"
        self.state = restored
        self.state.bad_steps, self.state.bad_streak = bad_steps, streak
        parts.loader.seek(self.state.step, self._computer.computation.effective_grains)
        parts.records.forget_after(self.state.step)
        self._around.note(f"rolled back to step {self.state.step}; step {max(bad_steps)} will be left out")
        return None

    def _advance(self, sums: StepSums, update: Update, found: dict[str, Any] | None) -> None:
        parts, state = self._parts, self.state
        parts.loader.commit()
        state.samples += sums.num_samples
        state.digest = chain_digest(state.digest, sums.digest)
        state.loss = sums.loss if math.isfinite(sums.loss) else None
        if update.skipped in (None, "overflow"):
            state.loss_scale = state.loss_scale.after(update.skipped == "overflow")
        if update.skipped is None:
            state.bad_streak = 0
        else:
            state.skipped_steps += 1
        state.step += 1
        seconds, spans = parts.clock.end()
        self._step_seconds.append(seconds)
        memory = peak_memory_bytes(parts.mesh.device)
        self._measures = measures(spans, seconds, memory)
        self._record = StepRecord(
            step=state.step,
            epoch=parts.order.epoch(state.step - 1),
            samples=state.samples,
            num_samples=sums.num_samples,
            loss=state.loss,
            weight=sums.weight,
            grad_norm=update.grad_norm if math.isfinite(update.grad_norm) else None,
            learning_rate=update.learning_rate if math.isfinite(update.learning_rate) else 0.0,
            loss_scale=state.loss_scale.scale if state.loss_scale.scale != 1.0 else None,
            seconds=seconds,
            spans=spans,
            ranks={},
            memory_bytes=memory,
            digest=state.digest,
            skipped=update.skipped,
            nonfinite=found,
        )
        self._evaluate_epoch()

    def _evaluate_epoch(self) -> None:
        """Evaluates where an epoch has ended; outside the step's time."""
        parts, state = self._parts, self.state
        if parts.order.epoch(state.step) == parts.order.epoch(state.step - 1) or self._record is None:
            return
        metrics, count = parts.evaluator.evaluate(parts.model)
        if count:
            self._evaluated = state.step, metrics, count
            finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
            self._record = replace(self._record, metrics=finite)

    def _write_record(self, agreement: Agreement) -> None:
        """Writes the last step's record, now that every rank's measures of it are known."""
        if self._record is None:
            return
        record = replace(self._record, ranks=agreement.spreads)
        self._record = None
        self._parts.records.write(record)
        self._around.on_step(record, agreement.slowest_rank)

    def _flush(self) -> None:
        """Collective: all ranks."""
        self._write_record(agree(self._parts.mesh, Report(measures=self._measures)))
