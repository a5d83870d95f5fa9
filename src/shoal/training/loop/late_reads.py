"""Steps that are read late: queued on the device before the previous step's result is read, so that no read waits.

The device masks a step's update in the cases that the host would handle first: a loss or norm that is not finite, a
failed rank, a weight of zero, or an interruption before the step on which all ranks agree. All later steps are masked,
too, so that nothing has changed when the host reads the result. The host then continues as if each step were read at
once: decision 0053.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from shoal.checkpoint.keeper import RunState
from shoal.distributed.mesh import Agreement, Report, agree, from_rows, interrupts, measures, to_row
from shoal.jobs.job import Progress
from shoal.numerics import device_reads
from shoal.numerics.precision import LossScale
from shoal.parallel.base import NUM_SUMS, SAMPLES, Flags, StepSums
from shoal.training.loop.captured_evaluation import CapturedChunks
from shoal.training.loop.captured_step import RECORDERS, CapturedStep, LaunchedStep
from shoal.training.microbatch.step import FetchedStep, StepRunner, UnreadStep
from shoal.training.observe.step_records import StepRecords
from shoal.training.observer import StepTime
from shoal.training.update.optimizer_step import Update

if TYPE_CHECKING:
    from shoal.training.loop.trainer import TrainingParts

# If the agreement travels with a step's sums, a stop that arrives after them is seen one step later;
# steps longer than this get a separate agreement, and are not bound by reads.
LONG_STEP_SECONDS = 0.5
# If an update cannot be queued after this many steps, it never can.
_MOST_TRIES = 8
# Maximum steps that are read at once after a masked step; the number doubles with each masked step.
_LONGEST_PAUSE = 64
# Number of steps for which callbacks say in advance after which step they run at once.
_LOOK_AHEAD = 256


@dataclass(frozen=True)
class StepInFlight:
    """A step with queued kernels and results that are not read yet.

    `scale`, `samples`: loss scale and number of samples before the step. `measured`: the step measured in the row.
    `num_updates`: updates including this step's. `agreed`: the ranks' agreement, if rows do not travel with the sums.
    """

    step: UnreadStep
    fetched: FetchedStep
    scale: LossScale
    samples: int
    rate: float
    num_updates: int
    masks_next: Tensor
    reading: device_reads.LateNumbers
    time_taken: StepTime
    measured: int | None
    agreed: Agreement | None


class LateReads:
    """Launch and read of steps that are read one step late. All ranks agree on which these are."""

    def __init__(
        self,
        parts: TrainingParts,
        runner: StepRunner,
        records: StepRecords,
        is_due: Callable[[int], bool],
        note: Callable[[str], None],
    ) -> None:
        """Prepare the launch. `is_due`: whether work due after a number of steps needs the model of exactly that."""
        self._parts, self._runner, self._records, self._is_due = parts, runner, records, is_due
        self._mesh = parts.mesh
        kinds = set(parts.sharded_model.dtypes)
        self._possible = (
            device_reads.waits(parts.mesh.device)
            and parts.strategy.queues
            and parts.loader.looks_ahead
            and parts.job.outputs is None  # whose ranks read each other's grains within the step
            and parts.computer.norm is None
            and not kinds & {torch.float64, torch.complex128}
        )
        self._tries, self._pause, self._not_before = 0, 1, 0
        self._reported = -1  # the last step measured in a row
        self._last = math.inf  # the step that all ranks read before they launch the next one
        self._is_slow = False
        self._captured: CapturedStep | None = None
        self.is_possible = self._possible  # False: `apply` is False for every step
        if parts.plan.execution.cuda_graph:
            self.capture(note)

    def capture(self, note: Callable[[str], None] | None = None) -> None:
        """Capture the coming steps, and on one rank the chunks of evaluations, in CUDA graphs.

        `note`: receives the reason if none is captured.
        """
        device, parts = self._mesh.device, self._parts
        recorder = RECORDERS[device.type](device)
        self._captured = CapturedStep(parts, self._runner, recorder, note)
        if self._mesh.world_size == 1:
            parts.evaluator.capture(lambda: CapturedChunks(parts.model, recorder, note))
        self.is_possible = True

    @property
    def why_no_graph(self) -> str | None:
        """Why the coming steps are not captured, or None."""
        return self._captured.why_not if self._captured is not None else None

    def apply(self, state: RunState, agreement: Agreement) -> bool:
        """Return True if the next step may be queued, and the step after it before its read. Collective: all ranks."""
        step = state.step
        never = not self._possible or self._tries >= _MOST_TRIES
        if never or self._parts.observer.looks:
            if self._captured is not None:
                self._captured.read_at_once(never=never)
            return False
        if step < self._not_before or step <= max(state.bad_steps, default=-1) or self._is_due(step + 1):
            return False
        self._is_slow = agreement.spreads["step_seconds"].max > LONG_STEP_SECONDS
        if self._is_slow or self._parts.callbacks.always_at_once:
            if self._captured is not None:
                self._captured.read_at_once(is_slow=self._is_slow)
            return False
        # A callback's at_once may return different values, or raise, on different ranks: any rank's value counts.
        fits = self._captured is None or self._captured.fits
        own = [float(self._parts.updater.queues), self._parts.callbacks.num_late(step + 1, _LOOK_AHEAD), float(fits)]
        ready, num_late, fits = self._mesh.all_gather(own).min(axis=0).tolist()
        self._tries = 0 if ready else self._tries + 1
        self._last = step + 1 + num_late
        if not (ready and num_late):
            return False
        if self._captured is not None and not fits:
            self._captured.drop()
        self._reported = -1  # the steps before may have been rolled back
        return True

    def must_read(self, flight: StepInFlight) -> bool:
        """Return True if the step has to be read before the next one is launched."""
        asks = flight.agreed is not None and comes_between(flight.agreed)
        step = flight.fetched.step + 1
        return self._is_due(step) or step >= self._last or self._is_slow or asks

    def launch(
        self,
        state: RunState,
        fetched: FetchedStep,
        before: StepInFlight | None,
        report: Callable[[FetchedStep | None, int], Report],
    ) -> StepInFlight:
        """Queue a step and its update, which the device masks if it must not happen.

        Args:
            state: the state after the last step that was read.
            fetched: the step.
            before: the step before it, if that is not read.
            report: returns this rank's report on the next step.

        Raises: errors of this rank, which other ranks do not know.
        Collective: all ranks.
        """
        parts, reports = self._parts, list[Report]()

        def row(following: FetchedStep | None) -> list[float]:
            reports.append(report(following, fetched.step + 1))
            return to_row(reports[0])

        fetched = self._runner.probe.before_step(fetched)
        scale, samples, masked = state.loss_scale, state.samples, None
        if before is not None:
            scale, masked = before.scale.after(overflow=False), before.masks_next
            samples = before.samples + sum(grain.size for grain in parts.order.grains(before.fetched.step))
        measured = state.step if state.step > self._reported else None
        self._reported = state.step
        # A schedule may also change what a graph fixes.
        rate = parts.updater.stepper.set_rates(Progress(fetched.step, parts.order.num_steps, samples))
        launched = self._captured.queue(fetched, scale, masked) if self._captured is not None else None
        if launched is None:
            factor = scale.factor(parts.job.global_batch)
            step = self._runner.queue(fetched, factor, row)
            sums = step.sums
            parts.clock.mark("optimizer")
            bad = torch.zeros((), device=self._mesh.device) if masked is None else masked

            def update(masks: Tensor) -> None:
                parts.updater.num_begun += 1
                parts.updater.stepper.queue_step(masks)

            norms = parts.updater.queue(sums, bad, factor, update)
            if step.passes.is_alone:
                step.passes.began, parts.buffers.saved = parts.buffers.saved, {}
            elif parts.buffers.names:
                parts.buffers.queue_assign(sums.sums[NUM_SUMS:], sums.sums[SAMPLES].round(), bad == 0)
            numbers = sums.packed(bad, norms)
            masks_next = bad if sums.rows is None else bad.maximum(interrupts(sums.rows).float())
            launched = LaunchedStep(step, masks_next, numbers)
        else:
            row(launched.step.following)
        step = launched.step
        reading = device_reads.LateNumbers(launched.numbers)
        agreed = None
        if step.sums.rows is None:
            # Agree from host to host, without a wait for the device. Ranks with parts of one model synchronize within a
            # step: they cannot queue a step that one of them has not read, nor a step after a failure on one of them.
            parts.clock.mark("exposed_communication")
            failed = step.error is not None or step.proposal is not None
            agreed = agree(self._mesh, replace(reports[0], error=reports[0].error or failed))
        return StepInFlight(
            step,
            fetched,
            scale=scale,
            samples=samples,
            rate=rate,
            num_updates=parts.updater.num_begun,
            masks_next=launched.masks_next,
            reading=reading,
            time_taken=parts.clock.stop(),
            measured=measured,
            agreed=agreed,
        )

    def read(self, flight: StepInFlight) -> Flags | tuple[StepSums, Update, Agreement | None]:
        """Read a step. Return its failures if it changed nothing, otherwise its sums, its update and the agreement.

        The agreement on the next step is None on one rank. It also completes the record that its rows measure.
        """
        numbers = flight.reading.numbers()
        bad, failures, values, rows, norms = flight.step.sums.unpacked(numbers)
        if bad[0]:
            return Flags(int(failures[0]), int(failures[1]))
        self._pause = 1
        agreement = None
        if self._mesh.world_size > 1:
            agreement = flight.agreed or from_rows(rows.reshape(self._mesh.world_size, -1).astype(np.float64))
            self._is_slow |= agreement.spreads["step_seconds"].max > LONG_STEP_SECONDS
            waiting = self._records.waiting
            if waiting and waiting[0].step == flight.measured:
                self._records.write(agreement)
        sums = StepSums(values, Flags())
        return (
            sums,
            self._parts.updater.queued(sums.weight, flight.scale, float(np.linalg.norm(norms)), flight.rate),
            agreement,
        )

    def close(self) -> None:
        """Free the captured step, which may use the process group."""
        if self._captured is not None:
            self._captured.drop()
        self._parts.evaluator.capture(lambda: None)
        self._captured, self.is_possible = None, self._possible

    def was_added(self, *, followed: bool) -> None:
        """Write the records that are complete after a step was added. `followed`: another step is already launched."""
        if self._mesh.world_size == 1:
            self._is_slow |= self._records.waiting[-1].seconds > LONG_STEP_SECONDS
            if followed:
                self.write_records(keep=0)

    def write_records(self, keep: int = 1) -> None:
        """Write all waiting records but `keep`, which the next agreement covers. Collective: all ranks."""
        while len(self._records.waiting) > keep:
            record = self._records.waiting[0]
            own = measures(record.spans, record.seconds, record.memory_bytes)
            self._records.write(agree(self._mesh, Report(measures=own)))

    def undo(self, *flights: StepInFlight) -> None:
        """Restore the buffers that steps which changed nothing else have left; the last step comes first."""
        for flight in flights:
            self._parts.buffers.model.put(flight.step.passes.began)

    def repeat(self, flight: StepInFlight, failures: Flags) -> None:
        """Handle the failures of a step that changed nothing, and read some steps at once from there.

        Raises: on every rank, if any rank failed.
        Collective: all ranks.
        """
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._not_before = flight.fetched.step + self._pause - 1
        self._runner.redo(flight.fetched.step, flight.step, failures)


def comes_between(agreement: Agreement) -> bool:
    """Return True if an agreement interrupts late reads; the host's version of `interrupts`."""
    asks = agreement.stop or agreement.checkpoint or agreement.any_error or bool(agreement.requests)
    return asks or not agreement.any_data
