"""Steps that are queued on the device before the previous step's result is read, so that no read waits for the queue.

The device masks a step's update in the cases that the host would handle first: a loss or norm that is not finite, a
failed rank, a weight of zero, or an interruption before the step on which all ranks agree. All later steps are masked,
too, so that nothing has changed when the host reads the result. The host then continues as if each step were read at
once: decision 0053.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from shoal.checkpoint.run_state import RunState
from shoal.distributed.agreement import Agreement, Report, agree, from_rows, interrupts, measures, to_row
from shoal.jobs.job import Progress
from shoal.numerics import device_reads
from shoal.numerics.precision import LossScale
from shoal.parallel.base import NUM_SUMS, SAMPLES, Flags, StepSums
from shoal.training.loop.captured_step import LaunchedStep, captured_step
from shoal.training.microbatch.compute import FetchedStep
from shoal.training.microbatch.step import StepRunner, UnreadStep
from shoal.training.observe.step_records import StepRecords, TrainingParts
from shoal.training.observe.telemetry import StepTime
from shoal.training.update.optimizer_step import Update

# If the agreement travels with a step's sums, a stop that arrives after them is seen one step later;
# steps longer than this get a separate agreement, and are not bound by reads.
LONG_STEP_SECONDS = 0.5
# If an update cannot be queued after this many steps, it never can.
_MOST_TRIES = 8
# Maximum steps that are read at once after a masked step; the number doubles with each masked step.
_LONGEST_PAUSE = 64
# Number of steps for which callbacks say in advance after which step they run at once.
_LOOK_AHEAD = 256
_NUM_FAILURES = 3


@dataclass(frozen=True)
class _Queued:
    """Step with queued kernels and results that are not read yet.

    `measured`: the step measured in the row. `num_updates`: updates including this step's. `agreed`: the
    ranks' agreement, if rows do not travel with the sums.
    """

    step: UnreadStep
    fetched: FetchedStep
    scale: LossScale
    rate: float
    num_updates: int
    masks_next: Tensor
    reading: device_reads.LateNumbers
    time_taken: StepTime
    measured: int | None
    agreed: Agreement | None


@dataclass(frozen=True)
class TrainerHooks:
    """Functions of the trainer: this rank's report on the next step, the advance to the next state, and notes.

    `advance` takes sums, update, time, number of updates, and whether another step is already queued.
    """

    report: Callable[[FetchedStep | None, int], Report]
    advance: Callable[[StepSums, Update, StepTime, int, bool], bool]
    note: Callable[[str], None]


# The fetched next step and the agreement on it, each None if unknown.
After = tuple[FetchedStep | None, Agreement | None]


class StepsAhead:
    """Runs of steps that are read one step late. All ranks agree on the steps that belong to a run."""

    def __init__(
        self, parts: TrainingParts, runner: StepRunner, records: StepRecords, hooks: TrainerHooks, num_steps: int
    ) -> None:
        self._parts, self._runner, self._records, self._hooks = parts, runner, records, hooks
        self._mesh, self._num_steps = parts.mesh, num_steps
        kinds = set(parts.sharded_model.dtypes)
        self._possible = (
            device_reads.waits(parts.mesh.device)
            and parts.strategy.queues
            and parts.loader.looks_ahead
            and not kinds & {torch.float64, torch.complex128}
        )
        self._tries, self._pause, self._not_before = 0, 1, 0
        self._told = -1  # the last step measured in a row of this run
        self._last = math.inf  # the step that all ranks read before they queue the next one
        self._is_slow = False
        self._captured = captured_step(parts, runner, hooks.note)

    def applies(self, state: RunState, agreement: Agreement) -> bool:
        """Return True if the next step may be queued, and the step after it before its read. Collective: all ranks."""
        step = state.step
        if not self._possible or self._tries >= _MOST_TRIES or self._parts.observer.looks:
            if self._captured is not None:
                self._captured.read_at_once()
            return False
        if step < self._not_before or step <= max(state.bad_steps, default=-1) or self._is_due(step + 1):
            return False
        self._is_slow = agreement.spreads["step_seconds"].max > LONG_STEP_SECONDS
        if self._is_slow or self._parts.callbacks.always_at_once:
            if self._captured is not None:
                self._captured.read_at_once(is_slow=self._is_slow)
            return False
        # A callback's at_once may return different values, or raise, on different ranks: any rank's value counts.
        own = [float(self._parts.updater.queues), self._parts.callbacks.num_late(step + 1, _LOOK_AHEAD)]
        ready, num_late = self._mesh.all_gather(own).min(axis=0).tolist()
        self._tries = 0 if ready else self._tries + 1
        self._last = step + 1 + num_late
        return bool(ready and num_late)

    def run(self, state: RunState, fetched: FetchedStep) -> After:
        """Train from an agreed step up to a step after which the host is needed; add all good steps to the state.

        Raises: as StepRunner.run.
        Collective: all ranks.
        """
        parts, unread = self._parts, None
        if self._captured is not None:
            self._captured.begin()
        self._told = -1  # an earlier run's steps may have been rolled back
        scale, samples = state.loss_scale, state.samples
        while True:
            try:
                fetched = self._runner.probe.before_step(fetched)
                queued = self._queue(state, fetched, (scale, samples), unread)
            except Exception:
                with contextlib.suppress(Exception):  # the first error is the reason to end
                    parts.buffers.restore()
                    if unread is not None and isinstance(self._take(state, unread, followed=True), Flags):
                        parts.updater.num_begun -= 1  # it was masked: its update changed nothing
                raise
            if unread is not None:
                after = self._settle(state, unread, followed=queued)
                if after is not None:
                    return after
            if self._ends_with(queued):
                return self._settle(state, queued) or (queued.step.following, None)
            unread, scale = queued, scale.after(overflow=False)
            samples += sum(grain.size for grain in parts.order.grains(fetched.step))
            # A rank that could not read the next step has failed in this step, and computes nothing of the next.
            fetched = queued.step.following or FetchedStep(fetched.step + 1)
            parts.clock.begin(fetched.step + 1)

    def _is_due(self, step: int) -> bool:
        """Return True if the work due after `step` steps needs the model of exactly that step."""
        parts, every = self._parts, self._parts.keeper.every_steps
        due = self._records.evaluates_after(step) or parts.replicas.is_due(step, saves=False)
        saved = every is not None and step % every == 0
        return step >= self._num_steps or due or saved

    def _ends_with(self, queued: _Queued) -> bool:
        """Return True if the step has to be read before the next step is queued."""
        asks = queued.agreed is not None and _comes_between(queued.agreed)
        step = queued.fetched.step + 1
        return self._is_due(step) or step >= self._last or self._is_slow or asks

    def _queue(
        self, state: RunState, fetched: FetchedStep, known: tuple[LossScale, int], unread: _Queued | None
    ) -> _Queued:
        parts, (scale, samples), reports = self._parts, known, list[Report]()

        def row(following: FetchedStep | None) -> list[float]:
            reports.append(self._hooks.report(following, fetched.step + 1))
            return to_row(reports[0])

        measured = state.step if state.step > self._told else None
        self._told = state.step
        progress = Progress(fetched.step, parts.order.num_steps, samples)
        masked = unread.masks_next if unread is not None else None
        done = self._captured.queue(fetched, scale, progress, masked) if self._captured is not None else None
        if done is None:
            step = self._runner.queue(fetched, scale.factor(parts.job.global_batch), row)
            done = self._launched(step, scale, progress, masked)
        else:
            row(done.step.following)
        reading = device_reads.LateNumbers(done.numbers)
        agreed = self._agreed(done.step, reports[0]) if done.step.sums.rows is None else None
        num_updates, time_taken = parts.updater.num_begun, parts.clock.stop()
        about = (scale, done.rate, num_updates, done.masks_next, reading, time_taken, measured, agreed)
        return _Queued(done.step, fetched, *about)

    def _launched(self, step: UnreadStep, scale: LossScale, progress: Progress, masked: Tensor | None) -> LaunchedStep:
        """Queue the step's update, too. `masked`: bool [], whether an earlier step is masked; None at first."""
        parts, sums = self._parts, step.sums
        parts.clock.mark("optimizer")
        fine = (sums.failures == 0).all()
        if masked is not None:
            fine = fine & ~masked
        update = parts.updater.queue(sums, fine, scale, progress)
        good = update.good
        parts.buffers.queue_assign(sums.sums[NUM_SUMS:], sums.sums[SAMPLES].round(), good)
        masks_next = ~good if sums.rows is None else ~good | interrupts(sums.rows)
        return LaunchedStep(step, update.learning_rate, masks_next, sums.packed(good, update.norm))

    def _agreed(self, step: UnreadStep, report: Report) -> Agreement:
        """Agree from host to host, without a wait for the device. Collective: all ranks.

        Ranks with parts of one model synchronize within a step. They cannot queue a step that one of them has not read,
        nor a step after a failure on one of them.
        """
        self._parts.clock.mark("exposed_communication")
        failed = step.error is not None or step.proposal is not None
        return agree(self._mesh, replace(report, error=report.error or failed))

    def _settle(self, state: RunState, unread: _Queued, followed: _Queued | None = None) -> After | None:
        """Read a step and advance the state; return None if nothing interrupts before the next step.

        `followed`: the step that was queued after it. An interruption discards that step.
        """
        agreement = None
        failures = self._take(state, unread, followed is not None)
        if isinstance(failures, Agreement):
            agreement, failures = failures, None
        interrupted = agreement is not None and _comes_between(agreement)
        if failures is None and (not interrupted or followed is None):
            if followed is None:
                self._tell_all()
            return None
        if followed is not None:
            self._parts.updater.num_begun -= 1
        self._tell_all()
        if failures is None:
            assert followed is not None
            assert agreement is not None
            self._parts.callbacks.unagreed |= bool(agreement.asked)
            error = followed.fetched.error
            return (FetchedStep(followed.fetched.step, error=error) if error is not None else None), agreement
        self._parts.updater.num_begun -= 1
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._not_before = unread.fetched.step + self._pause - 1
        self._runner.redo(unread.fetched.step, unread.step, failures)
        return None, None

    def _take(self, state: RunState, unread: _Queued, followed: bool) -> Flags | Agreement | None:
        """Read a step. Return its failures if it changed nothing; otherwise advance, and return any agreement."""
        numbers = unread.reading.numbers()
        (good, norm), failures = numbers[:2].tolist(), numbers[2 : 2 + _NUM_FAILURES].tolist()
        if not good:
            return Flags(int(failures[0]), int(failures[1]))
        self._pause = 1
        length = unread.step.sums.sums.numel()
        found, rest = np.split(numbers[2 + _NUM_FAILURES :], [length])
        agreement: Agreement | None = None
        if self._mesh.world_size > 1:
            agreement = unread.agreed or from_rows(rest.reshape(self._mesh.world_size, -1))
            self._is_slow |= agreement.spreads["step_seconds"].max > LONG_STEP_SECONDS
            waiting = self._records.waiting
            if waiting and waiting[0].step == unread.measured:
                self._records.write(agreement)
        sums = StepSums(found, Flags())
        update = self._parts.updater.queued(sums.weight, unread.scale, norm, unread.rate)
        self._hooks.advance(sums, update, unread.time_taken, unread.num_updates, followed)
        if agreement is None:
            self._is_slow |= self._records.waiting[-1].seconds > LONG_STEP_SECONDS
            self._tell(0)
        return agreement

    def _tell_all(self) -> None:
        """Write all records but the last, which the next agreement covers. Collective: all ranks."""
        self._tell(1)

    def _tell(self, keep: int) -> None:
        while len(self._records.waiting) > keep:
            record = self._records.waiting[0]
            own = measures(record.spans, record.seconds, record.memory_bytes)
            self._records.write(agree(self._mesh, Report(measures=own)))


def _comes_between(agreement: Agreement) -> bool:
    """Return True if an agreement interrupts the run; the host's version of `interrupts`."""
    asks = agreement.stop or agreement.checkpoint or agreement.any_error or bool(agreement.asked)
    return asks or not agreement.any_data
