"""Step loop of a Session: one call of `Session.steps`, which ends on all ranks together."""

from __future__ import annotations

import contextlib
import math
import warnings
import weakref
from collections.abc import Generator, Iterator
from typing import Any

from torch import Tensor

from shoal.data.loader import Loader, MapLoader, Microbatch, StepData
from shoal.data.order import Order
from shoal.data.stream import compare_streams
from shoal.distributed.failures import as_shoal_error
from shoal.errors import JobError, NonFiniteError, ShoalError, UserCodeError
from shoal.jobs.job import Progress
from shoal.parallel.base import StepSums
from shoal.training.microbatch.step import no_gradient
from shoal.training.observer import StepClock
from shoal.training.session.arguments import Prepared
from shoal.training.session.boundary import LoopBoundary
from shoal.training.session.guard import Guard
from shoal.training.session.meeting import groups_differ
from shoal.training.session.optimizers import group_values, number_of
from shoal.training.session.passes import Base, BatchPasses, Chosen
from shoal.training.update.optimizer_step import Update


class SessionStep:
    """Step of a user's loop: iterate over this rank's batches and call `backward` once per batch; the update follows.

    For several optimizers or several updates per step, iterate `batches(optimizer)` once for each update instead. After
    an iteration `loss` is the mean over the global batch, `grad_norm` the norm before clipping, and `learning_rate` the
    first group's. `number` counts from 1.
    """

    def __init__(self, loop: Loop, data: StepData) -> None:
        self._loop = loop
        self.number = data.step + 1
        self.epoch = data.epoch
        self.loss = math.nan
        self.grad_norm = math.nan
        self.learning_rate = math.nan

    def backward(self, total: Tensor, weight: Tensor | float | None = None) -> None:
        """Add the loss of the current batch: `total`, its sum over samples or tokens, and `weight`, their number.

        Raises: LossError for a total without a weight.
        """
        self._loop.passes.backward(self.number, total, weight)

    def gather(self, tensor: Tensor) -> Tensor:
        """Return a tensor by sample of the current batch for the whole global batch, in the order of samples.

        The result is differentiable: gradients of all ranks are summed, so that the loss may be the whole one on each
        rank, `step.backward(total, weight)`, or that of the rank's own rows with their weight.

        Args:
            tensor: [samples of the batch, ...], with the same dtype and row shape on all ranks.

        Raises:
            JobError: If a rank has several batches in the step, or none, or if ranks give unlike tensors.

        Collective: all ranks, equally often, and again in the backward.
        """
        return self._loop.passes.gather(self.number, tensor)

    def batches(self, *optimizers: Any) -> Iterator[Any]:
        """Return an iterator over this rank's batches of the step. At its end these optimizers (default: all) update.

        Raises: JobError for an optimizer that was not prepared.
        """
        return self._loop.turn(self, optimizers, alone=False)

    def __iter__(self) -> Iterator[Any]:
        return self._loop.turn(self, (), alone=True)


class Loop:
    """Step loop behind `Session.steps`. Its `boundary` meets the other ranks, and saves and records finished steps."""

    def __init__(self, base: Base, prepared: Prepared, loader: Loader, order: Order) -> None:
        """Prepare the passes, and load the newest checkpoint if the session resumes.

        Raises: JobError, PlanError; errors of the checkpoints.
        Collective: all ranks.
        """
        self._base, self._prepared, self._loader, self._order = base, prepared, loader, order
        clock = StepClock(base.mesh.device, enabled=base.records_steps)
        self._clock, self.passes = clock, BatchPasses(base, prepared, clock)
        self.boundary = LoopBoundary(base, prepared, loader, order, passes=self.passes, clock=clock)
        self._current = self.boundary.current
        self._guard: Guard | None = None
        try:
            self.boundary.begin()
        except BaseException:
            self.close()
            raise
        self._pass: weakref.ReferenceType[Generator[Any]] | None = None
        self._microbatches: list[Microbatch] | None = None  # of the current step, if they were read
        self._last: tuple[StepSums, Update] | None = None  # of the current step's last update
        self._skipped: str | None = None

    def run(self) -> Generator[SessionStep]:
        """Yield the steps. All ranks leave together: if a rank does not come to the next step, the others raise."""
        boundary, current = self.boundary, self._current
        self._guard = Guard(self._prepared.optimizers, lambda: current.is_open)
        try:
            with boundary.stop_requests.noted(boundary.saving.keeps):
                boundary.start()
                while (data := self._next()) is not None:
                    step = SessionStep(self, data)
                    self._data, self._microbatches = data, None
                    try:
                        yield step
                    except GeneratorExit:
                        self._leave()
                        return
                    self._close_pass()
                    if current.is_over or not current.turns:
                        self._leave()
                        boundary.status = "failed"
                        raise UserCodeError(
                            given=f"step {step.number} was not iterated to its end",
                            conflict="an update needs every batch of its step",
                            remedy="write: for batch in step: ... step.backward(total, weight)",
                        )
                    self._count()
                # After the last step all ranks leave; another rank may have left within it.
                boundary.saving.mark()
                meeting = boundary.meet(leaves=True)
                current.is_over = True
                try:
                    if meeting.requests:  # failures after the last step
                        boundary.callbacks.settle(self._base.mesh, meeting.requests)
                finally:
                    boundary.save(live=True, clean=meeting.clean)
                if not meeting.clean:
                    raise meeting.behind(boundary.state.step)
                boundary.status = "completed"
                if any(word.stop_requested for word in meeting.words):
                    raise boundary.stop_requests.end()
        except BaseException as error:
            boundary.error = boundary.error or error
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Release the loop's resources once, even if the loop never began."""
        self._current.is_over = True
        if self.boundary.is_closed:
            return
        if self._guard is not None:
            self._guard.lift()
        try:
            self.boundary.close()
        finally:
            self._loader.close()
            self.passes.close()

    def _next(self) -> StepData | None:
        """Return the next step's data on this rank, or None at the end."""
        replay, mesh, boundary, current = self._base.replay, self._base.mesh, self.boundary, self._current
        step, callbacks = boundary.state.step, boundary.callbacks
        num_steps = min(self._order.num_steps, replay.num_steps) if replay else self._order.num_steps
        if step >= num_steps:
            return None
        self._clock.begin(step + 1)
        boundary.saving.mark()
        self._loader.warn_of_incidents()
        is_map, is_first = isinstance(self._loader, MapLoader), not current.known
        data, error = None, None
        try:
            data = self._loader.step(step)
        except Exception as caught:
            if is_map:
                raise
            error = as_shoal_error(caught)
        if is_first:
            compare_streams(mesh, self._loader)
        has_data, meets = is_map, not is_map or (is_first and bool(callbacks)) or boundary.is_best
        while meets or callbacks.unagreed:
            meets = callbacks.unagreed = False
            meeting = boundary.meet(error=error is not None, has_data=data is not None)
            if any(word.error for word in meeting.words):
                boundary.raise_together(error)
            has_data = any(word.has_data for word in meeting.words)
            boundary.serve(meeting)
        if boundary.records.ended_by is not None:
            return None
        if not has_data:
            if mesh.rank == 0:
                text = f"the stream has ended after {step} of {num_steps} steps"
                warnings.warn(text, RuntimeWarning, stacklevel=3)
            return None
        return data or StepData(step, 0, 0, iter(()))

    def turn(self, step: SessionStep, optimizers: tuple[Any, ...], alone: bool) -> Iterator[Any]:
        """Return a pass over the current step's batches."""
        current = self._current
        every = tuple(range(len(self._prepared.optimizers)))
        if alone and len(every) > 1:
            raise JobError(
                given=f"for batch in step, with {len(every)} optimizers",
                conflict="each update has its own loss, so that it has to be said which of them a pass over the "
                "batches is for",
                remedy="write: for batch in step.batches(optimizer): ... step.backward(total, weight), once for each "
                "update; step.batches() where one loss is for all of them",
            )
        chosen = tuple(sorted({self._prepared.index(optimizer) for optimizer in optimizers})) or every
        if (
            step.number != self.boundary.state.step + 1
            or current.is_over
            or current.is_open
            or (current.alone and current.turns)
        ):
            raise JobError(
                given=f"the batches of step {step.number} "
                + ("within a pass over them" if current.is_open else "after its update"),
                conflict="a pass over a step's batches ends with an update, and passes follow each other",
                remedy="write step.batches(optimizer) for each of several updates of a step, one after the other",
            )
        current.alone = alone
        batches = self._batches(step, chosen)
        self._pass = weakref.ref(batches)
        return batches

    def _batches(self, step: SessionStep, chosen: Chosen) -> Generator[Any]:
        """Agree with the other ranks, yield this rank's batches, then update."""
        boundary, current, passes, mesh = self.boundary, self._current, self.passes, self._base.mesh
        state, first = boundary.state, not current.turns
        values = group_values(self._prepared.optimizers) if mesh.world_size > 1 else []
        bits = float(sum(1 << number for number in chosen))
        due = first and boundary.saving.keeper.due(state.step)
        meeting = boundary.meet(checkpoint=due, passes=bits, groups=number_of(values))
        if meeting.differ("passes"):
            boundary.fail(
                JobError(
                    given=f"step {step.number}, in which ranks update different optimizers at a time",
                    conflict="the gradients of a pass are summed over all ranks",
                    remedy="choose optimizers by what is the same on all ranks, as step.number is",
                )
            )
        if meeting.differ("groups"):
            boundary.fail(groups_differ(mesh, values, step.number))
        if first:
            boundary.serve(meeting)
        passes.begin(state.step, chosen, len(current.turns), state.loss_scale)
        progress = Progress(state.step, self._order.num_steps, state.samples)
        current.is_open = True
        try:
            yield from passes.batches(self._read(), self._data.num_microbatches)
            passes.rate(progress)
        except GeneratorExit:
            with contextlib.suppress(Exception):  # the user's own error is the one to report
                error = UserCodeError(
                    given=f"rank {mesh.rank} left the loop within step {step.number} "
                    "(a break, a return or an exception of its own)",
                    conflict="the batches of all ranks belong to the step's update, which did not take place",
                    remedy="look at what that rank said",
                )
                self._sum(error)
            return
        except BaseException:
            current.is_over = True  # Ctrl-C within a collective
            raise
        sums = self._sum(passes.error)
        current.is_open = False
        assert self._guard is not None
        try:
            with self._guard.lifted():
                update = passes.update(sums, state.loss_scale, progress)
        except BaseException as error:
            current.is_over = True
            if isinstance(error, Exception) and not passes.torn:
                raise boundary.lost(error) from error
            raise
        step.loss, step.grad_norm, step.learning_rate = sums.loss, update.grad_norm, update.learning_rate
        if update.skipped == "nonfinite" and not self._base.training.skip_nonfinite:
            boundary.fail(
                NonFiniteError(
                    given=f"step {step.number}: loss {sums.loss}, gradient norm {update.grad_norm}",
                    conflict="one of them is not finite; the parameters are those before the step",
                    remedy="mend the data, or write Session(skip_nonfinite=True)",
                )
            )
        current.turns.append(chosen)
        self._last, self._skipped = (sums, update), self._skipped or update.skipped
        state.adapt(update.skipped)

    def _read(self) -> Iterator[Microbatch]:
        """Yield the current step's microbatches, and store them if another pass may read them again."""
        if self._microbatches is not None:
            yield from self._microbatches
            return
        self._microbatches = []
        for microbatch in self._data.microbatches:
            if not self._current.alone:
                self._microbatches.append(microbatch)
            yield microbatch

    def _sum(self, error: ShoalError | None) -> StepSums:
        """Return the sums of a pass. Raises: on every rank, if any rank has an error. Collective: all ranks."""
        boundary = self.boundary
        try:
            sums = self.passes.finish(error)
        except Exception as caught:
            raise boundary.lost(caught) from caught
        if sums.flags.errors:
            boundary.restore()
            boundary.raise_together(error)
        if sums.is_constant:
            boundary.fail(no_gradient(sums.weight))
        return sums

    def _close_pass(self) -> None:
        begun = self._pass() if self._pass is not None else None
        if begun is not None and self._current.is_open:
            begun.close()

    def _count(self) -> None:
        """Count the step, record it, and call the callbacks."""
        boundary, current = self.boundary, self._current
        assert self._last is not None
        current.known.add(tuple(current.turns))
        self._loader.commit()
        boundary.state.count(self._last[0], self._skipped)
        record = boundary.records.add(boundary.state, *self._last)
        metrics, current.metrics = current.metrics, {}
        current.turns, self._skipped = [], None
        if record is not None:
            boundary.callbacks.stepped(boundary.state, record)
        if metrics:
            boundary.evaluated(metrics)

    def _leave(self) -> None:
        """End this rank's loop, tell the other ranks, and save the last finished step. Collective: all ranks."""
        boundary, current = self.boundary, self._current
        self._close_pass()
        if current.is_over:
            return
        boundary.status = "preempted"
        # Whether the interrupted step had all its updates, judged by the updates of earlier steps.
        live = bool(current.turns) and (current.alone or tuple(current.turns) in current.known)
        try:
            if live:
                self._count()
            meeting = boundary.meet(leaves=True)
            current.is_over = True
            boundary.stop_requests.elsewhere = any(word.stop_requested for word in meeting.words)
            boundary.save(live=live, clean=meeting.clean)
        except ShoalError as error:  # an error raised while the generator closes would be lost
            current.is_over = True
            text = f"the loop was left after {boundary.state.step} steps: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
