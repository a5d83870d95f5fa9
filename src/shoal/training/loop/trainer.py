"""Trainer: the step loop of a run, and what it does between two steps with the model of exactly the finished step."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shoal.checkpoint.keeper import Keeper, RunState
from shoal.checkpoint.whole_optimizer import evaluated_weights, may_draw
from shoal.data.loader import Loader
from shoal.data.order import Order
from shoal.data.stream import compare_streams
from shoal.distributed.failures import as_shoal_error
from shoal.distributed.mesh import Agreement, Report, agree, from_rows, measures, raise_together, to_row
from shoal.errors import IntegrityError, JobError, StorageError
from shoal.jobs.job import Job, Progress
from shoal.parallel.base import Flags, StepSums
from shoal.plans.resolve import CompletePlan
from shoal.training.callbacks.calls import CallbackCalls
from shoal.training.callbacks.ema import PREFIX
from shoal.training.loop.late_reads import LONG_STEP_SECONDS, LateReads, StepInFlight, comes_between
from shoal.training.loop.replicas import ReplicaCheck
from shoal.training.loop.share_balance import balance_of
from shoal.training.loop.step_modes import RunTrial, StepModes
from shoal.training.microbatch.evaluation import BetweenChunks, EvaluationLeftError, EvaluationSets
from shoal.training.microbatch.nonfinite import NOBODY, NonFiniteStep, find_nonfinite
from shoal.training.microbatch.policy import MicrobatchPolicy
from shoal.training.microbatch.step import ComputedStep, FetchedStep, StepParts, StepRunner
from shoal.training.observe.step_records import RecordWriter, StepRecords, Surroundings
from shoal.training.observer import StepTime
from shoal.training.update.job_optimizer import Parameters
from shoal.training.update.optimizer_step import Update, Updater


@dataclass(frozen=True, kw_only=True)
class TrainingParts(StepParts):
    """All parts of a training: the parts of its steps, the data, the optimizer, evaluation and checkpoints."""

    job: Job
    plan: CompletePlan
    model: nn.Module
    parameters: Parameters
    loader: Loader
    updater: Updater
    order: Order
    evaluator: EvaluationSets
    keeper: Keeper
    replicas: ReplicaCheck
    callbacks: CallbackCalls


# Bit of the ranks' requests for incidents that only one rank notices, next to the bits of callbacks.
NOTICED = 1 << 20


def share_incidents(parts: TrainingParts, around: Surroundings, state: RunState) -> None:
    """Share incidents of the ranks' loaders. All ranks then skip samples that any rank could not read.

    `state` stores these samples.
    Raises: DataError, on every rank, if there are more bad samples than allowed.
    Collective: all ranks, a JSON gather.
    """
    mesh, loader = parts.mesh, parts.loader
    own = [vars(incident) for incident in loader.incidents]
    loader.incidents.clear()
    for rank, row in enumerate(mesh.gather_json({"host": mesh.host, "incidents": own})):
        for incident in row["incidents"]:
            host = row["host"]
            bad = {int(i): said for i, said in incident.pop("bad").items()}  # JSON keys are strings
            state.bad_samples |= bad
            around.note(f"rank {rank} on {host}: {incident['what']}; {incident['done']}")
            about: dict[str, Any] = {"step": state.step, "rank": rank, "host": host, "noticed": "reading", **incident}
            about |= {"samples": sorted(bad)} if bad else {}
            kind = "samples" if bad else "workers"
            around.events.add(kind, **{name: value for name, value in about.items() if value is not None})
    loader.leave_out(state.bad_samples)


@dataclass
class Outcome:
    """Result of a training: completed or preempted, with the last state; `unsaved`: why the state was not saved.

    `ended_by`: the callback that requested the end, and its reason. `after`: seconds of the evaluation and the
    checkpoint after the last step. `trial`: what came of the trial of step modes. `plan`: with the mode of the last
    steps, if a trial may have changed it.
    """

    status: str
    state: RunState
    metrics: dict[str, float]
    eval_samples: int
    step_seconds: list[float] = field(default_factory=list)
    unsaved: StorageError | None = None
    ended_by: dict[str, Any] | None = None
    after: dict[str, float] = field(default_factory=dict)
    trial: dict[str, Any] | None = None
    plan: CompletePlan | None = None


class BetweenSteps:
    """Evaluations and checkpoints of a training, those at its end and those that a signal or a callback requests.

    `fetch`: called before each of them, with whether the optimizer's state is needed; parameter servers keep the model.
    """

    ended_by: dict[str, Any] | None = None  # the callback that has requested the end, and its reason

    def __init__(
        self,
        parts: TrainingParts,
        around: Surroundings,
        records: StepRecords,
        num_steps: int,
        fetch: Callable[[bool], None] = lambda optimizer: None,
    ) -> None:
        self._parts, self._around, self._records, self._num_steps = parts, around, records, num_steps
        self._fetch = fetch
        # Nothing would repeat the end that a callback has requested, so the evaluation before it is not left.
        self._between_chunks = BetweenChunks(lambda: self.ended_by is None and around.stop_requested(), around.note)
        # The step of the last evaluation, its metrics, and its number of samples.
        self._evaluated: tuple[int, dict[str, float], int] | None = None

    def evaluates_after(self, step: int) -> bool:
        """Return True if an evaluation follows step `step`, by `evaluate_every` or the end of a pass over the data."""
        every, order = self._around.evaluate_every, self._parts.order
        return step % every == 0 if every is not None else order.first_step(order.epoch(step)) == step

    def is_due(self, step: int) -> bool:
        """Return True if work that is due after `step` steps needs the model of exactly that step."""
        every = self._parts.keeper.every_steps
        saves = every is not None and step % every == 0
        return (
            step >= self._num_steps
            or self.evaluates_after(step)
            or self._parts.replicas.is_due(step, saves=False)
            or saves
        )

    def save(self, state: RunState, *, wait: bool = False, in_step: bool = False) -> None:
        """Save a checkpoint of a finished step, unless that step is saved.

        `wait`: until it is written. `in_step`: the clock of the coming step counts the time.
        Raises: StorageError.
        Collective: all ranks.
        """
        self._fetch(True)
        with contextlib.nullcontext() if in_step else self._records.timed("checkpoint"):
            self._records.saves(state.step)
            self._parts.keeper.save(state, wait=wait)

    def evaluate(self, state: RunState) -> None:
        """Evaluate the model and averaged weights, outside the step's time, and save the best. Collective: all ranks.

        If a rank has to stop, the evaluation is left, and a resume evaluates again.
        Raises: errors of the metrics; StorageError.
        """
        parts, records = self._parts, self._records
        watched, average = parts.job.watched, parts.callbacks.average
        self._fetch(watched is not None)
        if state.evaluation_due and not records.waiting:
            records.take_up(state.step)
        try:
            with records.timed("evaluation"):
                with evaluated_weights(parts.updater.optimizer):
                    metrics, count = parts.evaluator.evaluate(parts.model, self._between_chunks)
                    parts.strategy.rest()
                if average is not None and count:
                    with average.in_place():
                        averaged, _ = parts.evaluator.evaluate(parts.model, self._between_chunks)
                        parts.strategy.rest()
                    metrics |= {f"{PREFIX}{name}": value for name, value in averaged.items()}
        except EvaluationLeftError:
            parts.strategy.rest()
            state.evaluation_due = True
            self._around.note(f"evaluation after step {state.step}: left, to stop; --resume evaluates again")
            return
        state.evaluation_due = False
        self._evaluated = state.step, metrics, count
        parts.computer.has_evaluated = count > 0
        for name, why in parts.evaluator.without_value.items():
            self._around.note(f"evaluation after step {state.step}: {name} has no value: {why}")
        is_best = watched is not None and state.improves(watched, metrics)
        if count:
            parts.callbacks.evaluated(state, metrics)  # the checkpoint includes their new state
        if is_best:
            with records.timed("checkpoint"):
                parts.keeper.save_best(state)
        if count:
            records.evaluated(metrics)

    def serve(self, state: RunState, requests: int, is_sound: Callable[[], bool] = lambda: True) -> None:
        """Serve the requests of any rank's callbacks: an evaluation, a checkpoint, the end.

        `is_sound`: called before an evaluation or a checkpoint; returns False after a rollback, which ends the call.
        Collective: all ranks.
        """
        settled = self._parts.callbacks.settle(self._parts.mesh, requests)
        if (settled.checkpoint or settled.evaluate) and not is_sound():
            return
        if settled.end is not None and self.ended_by is None:
            self.ended_by = settled.end
            self._around.note("{callback} ends the training after step {step}: {reason}".format(**settled.end))
        if settled.evaluate and state.step and not self._is_evaluated(state):
            self.evaluate(state)
        if settled.checkpoint and state.step:
            self.save(state)

    def forget(self) -> None:
        """Drop the last evaluation, after a rollback."""
        self._evaluated = None

    def conclude(self, state: RunState, status: str) -> Outcome:
        """Save the last state of a run that is "completed" or, after a SIGTERM, "preempted"; evaluate a completed run.

        A completed run whose last evaluation was left is preempted.
        Raises: errors of the evaluation, after the checkpoint.
        Collective: all ranks.
        """
        unsaved = self._save_last(state)
        if status == "completed" and not self._is_evaluated(state):
            try:
                if not state.evaluation_due or self.ended_by is not None:
                    self.evaluate(state)
                status = "preempted" if state.evaluation_due else status
                unsaved = unsaved or self._save_last(state)  # again, if it is the best
            except Exception as error:
                shown = as_shoal_error(error)
                if unsaved is None:
                    self._parts.keeper.rescue(shown, state)
                raise shown from error
        metrics, count = ({}, 0) if status != "completed" or self._evaluated is None else self._evaluated[1:]
        seconds, after = self._records.step_seconds, self._records.after
        return Outcome(status, state, metrics, count, seconds, unsaved, self.ended_by, after)

    def _save_last(self, state: RunState) -> StorageError | None:
        try:
            self.save(state, wait=True)
        except StorageError as error:
            return error
        return None

    def _is_evaluated(self, state: RunState) -> bool:
        return self._evaluated is not None and self._evaluated[0] == state.step


class Trainer:
    """Trains one job on this rank, in step with the other ranks, from `state` up to `num_steps`."""

    def __init__(
        self,
        parts: TrainingParts,
        around: Surroundings,
        state: RunState,
        num_steps: int,
        writer: RecordWriter,
        *,
        trial: RunTrial | None = None,
    ) -> None:
        self._parts, self._around, self.state, self._num_steps = parts, around, state, num_steps
        self._mesh, self._clock, self._buffers = parts.mesh, parts.clock, parts.buffers
        self._runner = StepRunner(
            parts,
            parts.loader,
            around.note,
            rests=not may_draw(parts.updater.optimizer),
            repeats=parts.updater.needs_closure,
        )
        if state.computation is not None:
            self._runner.probe.restore(state.computation)
        self._balance = balance_of(parts, around)
        self._records = StepRecords(
            parts.mesh,
            parts.clock,
            parts.plan,
            num_grains=parts.job.num_grains,
            around=around,
            writer=writer,
            measured=self._balance.take if self._balance is not None else None,
        )
        self._between = BetweenSteps(parts, around, self._records, num_steps)
        self._late = LateReads(
            parts,
            self._runner,
            self._records,
            lambda step: (
                self._between.is_due(step)
                or (
                    step == self._trial.ends_at
                    if self._trial is not None
                    else self._balance is not None and self._balance.proposed is not None
                )
            ),
            around.note,
        )
        # The modes of all steps, and the same while turns of a trial are left.
        self._modes = StepModes(parts, self._late, self._runner, around.note, trial) if trial is not None else None
        self._trial: StepModes | None = None
        parts.loader.leave_out(state.bad_samples)
        self._first_scale, self._compares = state.loss_scale, parts.replicas.compares
        self._computation: MicrobatchPolicy | None = None  # the policy that the state has as a JSON value
        self._measures: tuple[float, ...] = Report().measures
        self._num_updates = parts.updater.num_begun  # updates that the state counts
        self._advanced = False  # whether a step was added since the last work between steps, or an evaluation is due
        self._has_callbacks = bool(parts.callbacks)
        self._of_step: Exception | None = None  # the last error in the computation of a step

        def unwritten(reason: str, done: str) -> None:
            around.events.add("checkpoint", step=self.state.step, what=reason, noticed="writing it", done=done)

        if parts.keeper.writer is not None:
            parts.keeper.writer.report = unwritten
        self._go_back(state.step)

    def train(self) -> Outcome:
        """Train to the end, or to the first step at which any rank was requested to stop.

        Raises: ShoalError, on every rank: the rank's own error, or else a PeerError that names the failed rank.
        """
        parts, callbacks = self._parts, self._parts.callbacks
        parts.model.train()
        callbacks.start(self.state)
        rolls_back = parts.job.on_nonfinite == "rollback" or parts.replicas.every is not None
        if rolls_back and self.state.step == 0:
            self._between.save(self.state, wait=True, in_step=True)
        status = ""
        try:
            while not status:
                try:
                    status = self._steps()
                except Exception as error:  # of a candidate of the trial, whose step is computed again
                    again = error is self._of_step and parts.updater.num_begun == self._num_updates
                    self._of_step = None  # its frames hold tensors
                    if self._trial is None or not again or not self._trial.refuses(error, self.state.step):
                        raise
                    with contextlib.suppress(JobError):
                        self._buffers.restore()
                    parts.loader.seek(self.state.step, parts.computer.computation.effective_grains)
                    self._trial = self._trial.unless_over()
        except Exception as error:
            shown = as_shoal_error(error)
            torn = callbacks.meddled  # why model and optimizer do not match the state, or None
            if parts.updater.num_begun != self._num_updates:
                torn = "the error came in the midst of an update"
            parts.keeper.rescue(shown, self.state, torn)
            while self._records.waiting:  # records of the last good steps, still without other ranks' measures
                self._records.write()
            callbacks.end("failed", error=shown)
            raise shown from error
        finally:
            self._late.close()
        last = agree(self._mesh, Report(requests=NOTICED if parts.loader.incidents else 0, measures=self._measures))
        if last.requests:
            share_incidents(parts, self._around, self.state)
        self._records.write(last)
        outcome = self._between.conclude(self.state, status)
        if self._modes is not None:
            outcome.trial, outcome.plan = self._modes.close(), self._modes.plan
        if self._balance is not None:
            outcome.plan = self._balance.planned(outcome.plan or parts.plan)
        callbacks.conclude(self._mesh, outcome.status, outcome.metrics, outcome.ended_by)
        return outcome

    def _steps(self) -> str:
        """Train all remaining steps, or until a stop; return "completed" or "preempted".

        A step is read before the next one begins, or "late": after the launch of the next one.
        """
        parts = self._parts
        fetched: FetchedStep | None = None
        agreement: Agreement | None = None
        unread: StepInFlight | None = None
        late = False
        while True:
            if unread is None:  # the one decision on what follows a step
                if self._advanced:
                    self._advanced = False
                    evaluates = self.state.evaluation_due or self._between.evaluates_after(self.state.step)
                    last = self.state.step == self._num_steps
                    if self._compares and not self._replicas_agree(saves=evaluates or last, last=last):  # rolled back
                        fetched = agreement = None
                    elif evaluates:
                        self._runner.draws_may_follow()
                        self._between.evaluate(self.state)
                        # Left, to stop: the agreement is older than the request.
                        agreement = None if self.state.evaluation_due else agreement
                trial = self._trial
                self._trial = trial.followed(self.state.step, fetched) if trial is not None else None
                if self.state.step >= self._num_steps:
                    return "completed"
                balance = self._balance if self._trial is None else None
                anew = balance is not None and balance.changes(self.state.step, self._modes)
                fetched, agreement = (None, None) if anew else (fetched, agreement)
                self._clock.begin(self.state.step + 1)
                if fetched is None:
                    fetched = self._runner.fetch(self.state.step)
                    compare_streams(self._mesh, parts.loader)
                    self._clock.mark("other")
                agreement = self._agree(fetched, agreement)
                ends = self._between.ended_by is not None
                saves = agreement.checkpoint or agreement.stop or ends
                differ = self._compares and not self._replicas_agree(saves)
                if differ or fetched.step != self.state.step:  # rolled back to an earlier state
                    fetched = agreement = None
                    continue
                if agreement.stop and not ends:
                    return "preempted"
                if ends or not agreement.any_data:
                    return "completed"
                if agreement.checkpoint:
                    self._clock.mark("checkpoint")
                    self._runner.draws_may_follow()
                    self._between.save(self.state, in_step=True)
                late = self._late.is_possible and self._late.apply(self.state, agreement)
            assert fetched is not None
            if not late:
                try:
                    factor = self.state.loss_scale.factor(parts.job.global_batch)
                    # The row about the next step travels with the sums of this step.
                    computed = self._runner.run(
                        fetched, factor, lambda following: to_row(self._report(following, self.state.step + 1))
                    )
                except Exception as error:
                    self._of_step = error
                    with contextlib.suppress(JobError):  # a buffer with a new shape: the first error is reported
                        self._buffers.restore()  # to the values of the last good step
                    raise
                fetched, agreement = computed.following, None
                if fetched is not None and computed.sums.rows is not None:
                    agreement = from_rows(computed.sums.rows)
                    self._records.write(agreement)
                    parts.callbacks.unagreed |= bool(agreement.requests)  # the next agreement repeats the request
                    is_long = agreement.spreads["step_seconds"].max > LONG_STEP_SECONDS
                    agreement = None if is_long else agreement
                if not self._apply(computed):
                    fetched = agreement = None  # the next step is not the step that was read
                continue
            try:
                flight = self._late.launch(self.state, fetched, unread, self._report)
            except Exception as error:
                self._of_step = error
                with contextlib.suppress(Exception):  # the first error is the reason to end
                    self._buffers.restore()
                    if unread is not None and isinstance(self._take(unread, followed=True), Flags):
                        parts.updater.num_begun -= 1  # it was masked: its update changed nothing
                        self._late.undo(unread)
                raise
            after = self._read_late(unread, flight) if unread is not None else None
            if after is None and self._late.must_read(flight):
                after = self._read_late(flight, None) or (flight.step.following, None)
            if after is not None:
                (fetched, agreement), unread = after, None
                continue
            unread = flight
            # A rank that could not read the next step has failed in this step, and computes nothing of the next.
            fetched = flight.step.following or FetchedStep(flight.fetched.step + 1)
            self._clock.begin(fetched.step + 1)

    def _read_late(
        self, flight: StepInFlight, followed: StepInFlight | None
    ) -> tuple[FetchedStep | None, Agreement | None] | None:
        """Read a step and advance; return None if nothing interrupts before the next step.

        Otherwise return the fetched next step and the agreement on it, each None if unknown. `followed`: the step that
        was launched after it; an interruption discards that step.
        """
        outcome = self._take(flight, followed=followed is not None)
        failures, agreement = (outcome, None) if isinstance(outcome, Flags) else (None, outcome)
        interrupted = agreement is not None and comes_between(agreement)
        if failures is None and not (interrupted and followed is not None):
            if followed is None:
                self._late.write_records()
            return None
        if followed is not None:
            self._parts.updater.num_begun -= 1
        self._late.write_records()
        if failures is None:
            assert followed is not None
            assert agreement is not None
            self._parts.callbacks.unagreed |= bool(agreement.requests)
            error = followed.fetched.error
            return (FetchedStep(followed.fetched.step, error=error) if error is not None else None), agreement
        self._parts.updater.num_begun -= 1
        try:
            self._late.undo(*filter(None, (followed, flight)))
            self._late.repeat(flight, failures)
        except Exception as error:
            self._of_step = error
            raise
        return None, None

    def _take(self, flight: StepInFlight, *, followed: bool) -> Flags | Agreement | None:
        """Read a step. Return its failures if it changed nothing; otherwise advance, and return any agreement."""
        outcome = self._late.read(flight)
        if isinstance(outcome, Flags):
            return outcome
        sums, update, agreement = outcome
        self._advance(sums, update, None, None, late=(flight.time_taken, flight.num_updates, followed))
        self._late.was_added(followed=followed)
        return agreement

    def _report(self, fetched: FetchedStep | None, step: int) -> Report:
        has_data, error = fetched is not None and fetched.data is not None, fetched is not None and bool(fetched.error)
        stop, due = self._around.stop_requested(), self._parts.keeper.due(step)
        request_bits = self._parts.callbacks.request_bits | (NOTICED if self._parts.loader.incidents else 0)
        return Report(has_data, error, stop, due, request_bits, self._measures)

    def _agree(self, fetched: FetchedStep, agreement: Agreement | None) -> Agreement:
        """Return the agreement before a step, from the last step's sums or from a separate exchange."""
        several = self._mesh.world_size > 1
        if several:
            self._clock.mark("exposed_communication")
        while agreement is None or self._parts.callbacks.unagreed:
            self._parts.callbacks.unagreed = False
            agreement = agree(self._mesh, self._report(fetched, self.state.step))
            if agreement.requests & NOTICED:
                share_incidents(self._parts, self._around, self.state)
            if agreement.requests & ~NOTICED:  # requests of any rank's callbacks
                self._between.serve(self.state, agreement.requests, lambda: self._replicas_agree(saves=True))
                self._clock.begin(self.state.step + 1)
            self._records.write(agreement)
        if agreement.any_error:
            raise_together(self._mesh, fetched.error)
        if several:
            self._clock.mark("other")
        return agreement

    def _apply(self, computed: ComputedStep) -> bool:
        """Update from the sums, which are the same on every rank; return False after a rollback."""
        parts, state, sums = self._parts, self.state, computed.sums
        self._clock.mark("optimizer")
        progress = Progress(state.step, parts.order.num_steps, state.samples)
        nonfinite = state.bad_steps.get(state.step)
        if nonfinite is not None:
            update = Update(math.nan, math.nan, "nonfinite")
        else:
            again = functools.partial(
                self._runner.run_again, state.step, state.loss_scale.factor(parts.job.global_batch)
            )
            update = parts.updater.step(sums.loss, sums.weight, state.loss_scale, progress, sums.norm, again=again)
            if update.skipped == "nonfinite":
                nonfinite = self._nonfinite(computed)
                if nonfinite is None:
                    return False
        said = computed.passes.updated(sums, update.skipped)
        if said is not None:
            self._around.note(said)
        self._advance(sums, update, nonfinite, said)
        return True

    def _nonfinite(self, computed: ComputedStep) -> dict[str, Any] | None:
        """Apply the job's policy; return None after a rollback. Raises: NonFiniteError, the same on every rank."""
        parts, state = self._parts, self.state
        culprits = None
        self._buffers.restore()
        if not parts.sharded_model.divided:  # all ranks of a divided model would have to compute each sample
            computer = parts.computer
            culprits = find_nonfinite(computer, computer.precision, parts.parameters, self._mesh, computed.seen)
        self._buffers.restore()
        state.bad_streak += 1
        bad = NonFiniteStep(state.step, computed.sums.loss, culprits, state.bad_streak, parts.job.on_nonfinite)
        self._around.note(str(bad))
        where = {name: culprits[name] for name in ("rank", "host", "samples")} if culprits else {}
        done = "the run ended" if bad.ends else {"skip": "no update", "rollback": "rolled back"}[bad.policy]
        noticed = "looking at the sums of all ranks"
        self._around.events.add("nonfinite", step=state.step + 1, what=bad.cause, noticed=noticed, done=done, **where)
        if bad.ends:
            with contextlib.suppress(StorageError):  # already reported; the non-finite step is the reason to end
                self._between.save(state, wait=True, in_step=True)
            remedy = 'Job(on_nonfinite="skip") or "rollback" and --resume'
            raise bad.error("the parameters are those before the step", remedy)
        culprits = culprits or dict(NOBODY)
        if bad.policy == "skip":
            return culprits
        step = state.step
        self._roll_back({**state.bad_steps, step: culprits}, state.bad_streak)
        self._around.note(f"step {step} will be left out")
        return None

    def _replicas_agree(self, saves: bool = False, *, last: bool = False) -> bool:
        """Return True if no check is due or the replicas agree; otherwise roll back to the newest checkpoint."""
        replicas, step = self._parts.replicas, self.state.step
        if not step or not replicas.is_due(step, saves=saves, last=last):
            return True
        said = replicas.differing(step)
        if said is None:
            for rank in replicas.flipped:
                what = f"most likely it was rank {rank}: its state was the farthest from what the same steps gave again"
                self._around.note(f"step {step}: {what}")
                about: dict[str, Any] = {"what": what, "noticed": "training the steps again", "done": "nothing more"}
                self._around.events.add("replicas", step=step, rank=rank, **about)
            return True
        self._around.note(f"step {step}: {said}")
        self._roll_back(self.state.bad_steps, self.state.bad_streak)
        done = f"rolled back to step {self.state.step}"
        noticed = "comparing checksums of replicas"
        self._around.events.add("replicas", step=step, what=said, noticed=noticed, done=done)
        return False

    def _roll_back(self, bad_steps: dict[int, dict[str, Any]], streak: int) -> None:
        """Restore the newest checkpoint, with the bad steps to skip from there."""
        self._num_updates = -1  # until the model matches a state again
        restored, complaints = self._parts.keeper.load(self._first_scale)
        for complaint in complaints:
            self._around.note(complaint)
        if restored is None:
            raise IntegrityError(
                given="a rollback",
                conflict="the checkpoint that this run wrote before its first step is not there any more",
                remedy="leave the run directory alone while the run lasts; start anew with another --out",
            )
        restored.bad_steps, restored.bad_streak = bad_steps, streak
        restored.bad_samples = {**restored.bad_samples, **self.state.bad_samples}
        self.state, self._computation, self._num_updates = restored, None, self._parts.updater.num_begun
        self._go_back(restored.step)
        self._around.note(f"rolled back to step {restored.step}")

    def _go_back(self, step: int) -> None:
        """Reset data and records to `step`."""
        self._parts.loader.seek(step, self._parts.computer.computation.effective_grains)
        self._records.forget_after(step)
        self._between.forget()
        self._advanced = self.state.evaluation_due
        if self._modes is not None:
            self._modes.go_to(step)
            self._trial = self._modes.unless_over()

    def _advance(
        self,
        sums: StepSums,
        update: Update,
        nonfinite: dict[str, Any] | None,
        said: str | None,
        late: tuple[StepTime, int, bool] | None = None,
    ) -> None:
        """Advance to the next state, and add the step's record.

        `said`: set if the guard of compressed sums has ended the compression. `late`: time, number of updates, and
        whether another step is already launched.
        """
        parts, state = self._parts, self.state
        time_taken, num_updates, followed = late or (None, parts.updater.num_begun, False)
        parts.loader.commit()
        state.advance(sums, update.skipped)
        self._num_updates = num_updates
        if parts.computer.computation is not self._computation:
            self._computation = parts.computer.computation
            state.computation = self._computation.to_json()
        record = self._records.add(
            state,
            sums,
            update,
            nonfinite,
            time_taken,
            epoch=parts.order.epoch(state.step - 1),
            ranks={},
            expert_imbalance=parts.sharded_model.division.expert_loads.imbalance(),
            compression=sums.compared and {**sums.compared.to_json(), "fell_back": said is not None},
        )
        self._measures = measures(record.spans, record.seconds, record.memory_bytes)
        if self._trial is not None:
            self._trial.take(state.step)
        parts.callbacks.stepped(state, record, late=followed)
        if self._has_callbacks:
            self._runner.draws_may_follow()
        self._advanced = True
