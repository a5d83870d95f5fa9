"""Step loop of a Session: one call of `Session.steps`, which ends on all ranks together."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import warnings
import weakref
from collections.abc import Generator, Iterator
from typing import Any, NoReturn

from torch import Tensor

from shoal.checkpoint.run_state import RunState
from shoal.data.loader import Loader, MapLoader, Microbatch, StepData
from shoal.data.order import Order
from shoal.data.stream import compare_streams
from shoal.distributed.agreement import raise_together, together
from shoal.distributed.failures import as_shoal_error, is_lost_peer, user_error
from shoal.errors import JobError, NonFiniteError, PeerError, ShoalError, UserCodeError
from shoal.jobs.job import Progress, watched_by
from shoal.numerics.precision import LossScale
from shoal.parallel.base import StepSums
from shoal.training.callbacks.base import RunFacts
from shoal.training.callbacks.calls import CallbackCalls, Settled
from shoal.training.microbatch.loss import no_gradient
from shoal.training.session.arguments import Prepared
from shoal.training.session.guard import Guard
from shoal.training.session.meeting import Asked, Meeting, Word, groups_differ, meet
from shoal.training.session.optimizers import group_values, number_of
from shoal.training.session.passes import Base, BatchPasses, Chosen
from shoal.training.session.recording import SessionRecords
from shoal.training.session.saving import Saving
from shoal.training.step_clock import StepClock
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

    def batches(self, *optimizers: Any) -> Iterator[Any]:
        """Return an iterator over this rank's batches of the step. At its end these optimizers (default: all) update.

        Raises: JobError for an optimizer that was not prepared.
        """
        return self._loop.turn(self, optimizers, alone=False)

    def __iter__(self) -> Iterator[Any]:
        return self._loop.turn(self, (), alone=True)


class Loop:
    """Step loop behind `Session.steps`: passes, checkpoints, and meetings of the ranks."""

    def __init__(self, base: Base, prepared: Prepared, loader: Loader, order: Order) -> None:
        """Prepare the passes, and load the newest checkpoint if the session resumes.

        Raises: JobError, PlanError; errors of the checkpoints.
        Collective: all ranks.
        """
        self._base, self._prepared, self._loader, self._order = base, prepared, loader, order
        self._mesh = base.mesh
        self._clock = StepClock(base.mesh.device, enabled=base.records_steps)
        self.passes = BatchPasses(base, prepared, self._clock)
        own = base.training.callbacks if base.replay is None else ()
        self._callbacks = together(base.mesh, lambda: CallbackCalls(own, base.mesh))
        model = self.passes.sharded_model
        self._saving = Saving(base, prepared, model, loader, self.passes.ways.strategy, callbacks=self._callbacks)
        self._records = SessionRecords(base, self._clock, order)
        self.status = "failed"  # until the loop has ended in another way
        self.error: BaseException | None = None  # why the loop has failed
        self._has_started = False
        self._metrics: dict[str, float] = {}  # of evaluations of the current step, which is not counted yet
        self._is_best = False
        self._guard: Guard | None = None
        self.closed = False
        try:
            self.state = self._begun()
        except BaseException:
            self.close()
            raise
        self.asked = Asked()
        self._turns: list[Chosen] = []  # the passes of the current step
        self._known: set[tuple[Chosen, ...]] = set()  # sequences of passes with which steps have ended
        self._alone = False
        self._over = False
        self._pass: weakref.ReferenceType[Generator[Any]] | None = None
        self._open = False
        self._held: list[Microbatch] | None = None
        self._sums: StepSums | None = None
        self._last_update: Update | None = None
        self._skipped: str | None = None

    def _begun(self) -> RunState:
        """Return the first state, restored into model, optimizers and loader. Collective: all ranks."""
        training, plan, replay = self._base.training, self._base.plan, self._base.replay
        scale = LossScale.of(plan.precision.loss_scale, self._base.precision.compute)
        state = (self._saving.load(scale) if training.resume else None) or RunState(loss_scale=scale)
        state.grains = self._base.job.grains
        fuse = training.fuse and not (replay and replay.grain_by_grain)
        self._loader.seek(state.step, plan.batch.grains_per_microbatch if fuse else 1)
        self.passes.watch()
        num_samples = self._order.num_samples if isinstance(self._loader, MapLoader) else None
        model = self.passes.sharded_model
        around = self._around = self._records.begin(state, model, num_samples)
        plan, mesh = self._base.plan, self._mesh
        known = (self._base.job, plan, mesh.rank, mesh.world_size, self._order.num_steps)
        facts = RunFacts(*known, around.out, around.settings, around.description, own_loop=True)
        build = functools.partial(copy.deepcopy, model.model)
        self._callbacks.begin(facts, model, self.passes.every, build, note=around.note, events=around.events)
        return state

    def run(self) -> Generator[SessionStep]:
        """Yield the steps. All ranks leave together: if a rank does not come to the next step, the others raise."""
        self._guard = Guard(self._prepared.optimizers, lambda: self._open)
        try:
            with self.asked.noted(self._saving.keeps):
                self._has_started = True
                self._callbacks.start(self.state)
                while (data := self._next()) is not None:
                    step = SessionStep(self, data)
                    self._data, self._held = data, None
                    try:
                        yield step
                    except GeneratorExit:
                        self._leave()
                        return
                    self._conclude(step)
                self._end()
        except BaseException as error:
            self.error = self.error or error
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Release the loop's resources once, even if the loop never began."""
        self._over = True
        if self.closed:
            return
        self.closed = True
        if self._guard is not None:
            self._guard.lift()
        if isinstance(self.error, Exception):
            self.status = "failed"
        if self.error is not None:
            self.conclude()
        self._records.end(self.status)
        self._saving.close()
        self._loader.close()
        self.passes.close()

    def conclude(self) -> None:
        """Call `on_end` of the callbacks once, at an error, or after the evaluations that follow the loop.

        Raises: on this rank, the error of a required callback, if the loop is completed.
        """
        if not self._has_started:
            return
        self._has_started = False
        error, by = self.error, self._records.ended_by
        if self.status != "failed" and not isinstance(error, Exception):
            failure = self._callbacks.end(self.status, self._records.metrics, reason=by["reason"] if by else None)
            if failure is not None and self.status == "completed":
                raise failure
            return
        if not isinstance(error, Exception):
            by_what = f"by a {type(error).__name__}" if error is not None else "without its update"
            error = RuntimeError(f"step {self.state.step + 1} ended {by_what}")
        if not isinstance(error, ShoalError) and not is_lost_peer(error):
            error = user_error("the loop", error)
        self._callbacks.end("failed", error=error)

    def evaluated(self, metrics: dict[str, float]) -> None:
        """Pass the metrics of an evaluation by the loop to callbacks and records, after the step that it belongs to."""
        if not self._has_started:
            return
        if self._turns and not self._over:  # the step is counted when its body ends
            self._metrics |= metrics
            return
        watched, best = watched_by(self._base.training.callbacks), self.state.best
        self._is_best = watched is not None and self.state.improves(watched, metrics)
        if self._is_best and (self.closed or self._open):
            self._is_best, self.state.best = False, best
            text = (
                "the best evaluation so far came after the loop, or within batches: its state is not kept as the best"
            )
            self._around.note(f"warning: {text}; evaluate in a step's body, after its batches")
        self._callbacks.evaluated(self.state, metrics)
        self._records.evaluated(metrics)

    def average(self) -> contextlib.AbstractContextManager[None] | None:
        """Return the context in which the models have averaged weights that are evaluated as well, or None."""
        average = self._callbacks.average if self._has_started else None
        return average.in_place() if average is not None else None

    def _heed(self, meeting: Meeting) -> None:
        """Follow the requests of any rank's callbacks after a finished step. Collective: all ranks."""
        settled = Settled()
        if meeting.requests:
            try:
                settled = self._callbacks.settle(self._mesh, meeting.requests)
            except ShoalError as error:
                self._fail(error)
        if settled.checkpoint or self._is_best or meeting.words[0].checkpoint:
            self._clock.mark("checkpoint")
            self._saving.regular(self.state, best=self._is_best)
            self._is_best = False
            self._clock.mark("other")
        if settled.end is not None and self._records.ended_by is None:
            self._records.ended_by = settled.end
            self._around.note("{callback} ends the training after step {step}: {reason}".format(**settled.end))

    def _next(self) -> StepData | None:
        """Return the next step's data on this rank, or None at the end."""
        replay = self._base.replay
        num_steps = min(self._order.num_steps, replay.num_steps) if replay else self._order.num_steps
        if self.state.step >= num_steps:
            return None
        self._clock.begin(self.state.step + 1)
        self._saving.mark()
        self._loader.warn_of_incidents()
        is_map, is_first = isinstance(self._loader, MapLoader), not self._known and not self._turns
        data, error = None, None
        try:
            data = self._loader.step(self.state.step)
        except Exception as caught:
            if is_map:
                raise
            error = as_shoal_error(caught)
        if is_first:
            compare_streams(self._mesh, self._loader)
        meets = not is_map or (is_first and bool(self._callbacks)) or self._is_best
        while meets or self._callbacks.unagreed:
            meets = self._callbacks.unagreed = False
            meeting = self._meet(self._word(error=error is not None, has_data=data is not None))
            if any(word.error for word in meeting.words):
                self._raise_together(error)
            self._heed(meeting)
        if self._records.ended_by is not None:
            return None
        if not is_map and not any(word.has_data for word in meeting.words):
            if self._mesh.rank == 0:
                text = f"the stream has ended after {self.state.step} of {num_steps} steps"
                warnings.warn(text, RuntimeWarning, stacklevel=3)
            return None
        return data or StepData(self.state.step, 0, 0, iter(()))

    def turn(self, step: SessionStep, optimizers: tuple[Any, ...], alone: bool) -> Iterator[Any]:
        """Return a pass over the current step's batches."""
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
        if step.number != self.state.step + 1 or self._over or self._open or (self._alone and self._turns):
            raise JobError(
                given=f"the batches of step {step.number} "
                + ("within a pass over them" if self._open else "after its update"),
                conflict="a pass over a step's batches ends with an update, and passes follow each other",
                remedy="write step.batches(optimizer) for each of several updates of a step, one after the other",
            )
        self._alone = alone
        found = self._batches(step, chosen)
        self._pass = weakref.ref(found)
        return found

    def _batches(self, step: SessionStep, chosen: Chosen) -> Generator[Any]:
        """Yield this rank's batches, then update."""
        self._agree(step, chosen)
        self.passes.begin(self.state.step, chosen, len(self._turns), self.state.loss_scale)
        self._open = True
        try:
            yield from self.passes.batches(self._microbatches(), self._data.num_microbatches)
            self.passes.rate(self._progress())
        except GeneratorExit:
            with contextlib.suppress(Exception):  # the user's own error is the one to report
                error = UserCodeError(
                    given=f"rank {self._mesh.rank} left the loop within step {step.number} "
                    "(a break, a return or an exception of its own)",
                    conflict="the batches of all ranks belong to the step's update, which did not take place",
                    remedy="look at what that rank said",
                )
                self._sum(error)
            return
        except BaseException:
            self._over = True  # Ctrl-C within a collective
            raise
        sums = self._sum(self.passes.error)
        self._open = False
        self._update(step, chosen, sums)

    def _agree(self, step: SessionStep, chosen: Chosen) -> None:
        """Check that all ranks continue with the same optimizers and rates, and save a checkpoint that is due."""
        values = group_values(self._prepared.optimizers) if self._mesh.world_size > 1 else []
        due = not self._turns and self._saving.due(self.state.step)
        bits = float(sum(1 << number for number in chosen))
        meeting = self._meet(self._word(checkpoint=due, passes=bits, groups=number_of(values)))
        if meeting.differ("passes"):
            self._fail(
                JobError(
                    given=f"step {step.number}, in which ranks update different optimizers at a time",
                    conflict="the gradients of a pass are summed over all ranks",
                    remedy="choose optimizers by what is the same on all ranks, as step.number is",
                )
            )
        if meeting.differ("groups"):
            self._fail(groups_differ(self._mesh, values, step.number))
        if not self._turns:
            self._heed(meeting)

    def _microbatches(self) -> Iterator[Microbatch]:
        """Yield the current step's microbatches, and keep them if another pass may read them again."""
        if self._held is not None:
            yield from self._held
            return
        self._held = []
        for microbatch in self._data.microbatches:
            if not self._alone:
                self._held.append(microbatch)
            yield microbatch

    def _sum(self, error: ShoalError | None) -> StepSums:
        """Return the sums of a pass. Raises: on every rank, if any rank has an error. Collective: all ranks."""
        try:
            sums = self.passes.finish(error)
        except Exception as caught:
            raise self._lost(caught) from caught
        if sums.flags.errors:
            self._restore()
            self._raise_together(error)
        if sums.is_constant:
            self._restore()
            self._fail(no_gradient(sums.weight))
        return sums

    def _update(self, step: SessionStep, chosen: Chosen, sums: StepSums) -> None:
        assert self._guard is not None
        try:
            with self._guard.lifted():
                update = self.passes.update(sums, self.state.loss_scale, self._progress())
        except BaseException as error:
            self._over = True
            if isinstance(error, Exception) and not self.passes.torn:
                raise self._lost(error) from error
            raise
        step.loss, step.grad_norm, step.learning_rate = sums.loss, update.grad_norm, update.learning_rate
        if update.skipped == "nonfinite" and not self._base.training.skip_nonfinite:
            self._fail(
                NonFiniteError(
                    given=f"step {step.number}: loss {sums.loss}, gradient norm {update.grad_norm}",
                    conflict="one of them is not finite; the parameters are those before the step",
                    remedy="mend the data, or write Session(skip_nonfinite=True)",
                )
            )
        self._turns.append(chosen)
        self._sums, self._last_update, self._skipped = sums, update, self._skipped or update.skipped
        self.state.adapt(update.skipped)

    def _progress(self) -> Progress:
        return Progress(self.state.step, self._order.num_steps, self.state.samples)

    def _conclude(self, step: SessionStep) -> None:
        """Count a step after its loop body. Raises: UserCodeError if the body did not iterate its batches."""
        self._close_pass()
        if self._over or not self._turns:
            self._leave()
            self.status = "failed"
            raise UserCodeError(
                given=f"step {step.number} was not iterated to its end",
                conflict="its batches belong to the training",
                remedy="write: for batch in step: ... step.backward(total, weight)",
            )
        self._count()

    def _close_pass(self) -> None:
        begun = self._pass() if self._pass is not None else None
        if begun is not None and self._open:
            begun.close()

    def _count(self) -> None:
        assert self._sums is not None
        assert self._last_update is not None
        self._known.add(tuple(self._turns))
        self._loader.commit()
        self.state.count(self._sums, self._skipped)
        record = self._records.add(self.state, self._sums, self._last_update)
        self._turns, self._skipped = [], None
        metrics, self._metrics = self._metrics, {}
        if record is not None:
            self._callbacks.stepped(self.state, record)
        if metrics:
            self.evaluated(metrics)

    def _leave(self) -> None:
        """End this rank's loop, tell the other ranks, and save the last finished step. Collective: all ranks."""
        self._close_pass()
        if self._over:
            return
        self.status = "preempted"
        # Whether the interrupted step had all its updates, judged by the updates of earlier steps.
        live = bool(self._turns) and (self._alone or tuple(self._turns) in self._known)
        try:
            if live:
                self._count()
            meeting = self._meet(self._word(leaves=True))
            self._over = True
            self.asked.elsewhere = any(word.asked for word in meeting.words)
            self._save(live=live, clean=meeting.clean)
        except ShoalError as error:  # an error raised while the generator closes would be lost
            self._over = True
            warnings.warn(f"the loop was left after {self.state.step} steps: {error}", RuntimeWarning, stacklevel=2)

    def _end(self) -> None:
        """Finish after the last step. Raises: PeerError if another rank has left within it. Collective: all ranks."""
        self._saving.mark()
        meeting = self._meet(self._word(leaves=True))
        self._over = True
        try:
            if meeting.requests:  # failures after the last step
                self._callbacks.settle(self._mesh, meeting.requests)
        finally:
            self._save(live=True, clean=meeting.clean)
        if not meeting.clean:
            raise meeting.behind(self.state.step)
        self.status = "completed"
        if any(word.asked for word in meeting.words):
            raise self.asked.end()

    def _word(self, leaves: bool = False, **said: Any) -> Word:
        # Nothing can be saved between two updates of a step: a request waits for the last update.
        asked = bool(self.asked.received) and (leaves or not self._turns)
        requests = 0 if self._turns else self._callbacks.request_bits
        return Word(leaves=leaves, asked=asked, clean=not self._turns, step=self.state.step, requests=requests, **said)

    def _meet(self, word: Word) -> Meeting:
        """Gather all ranks' words. Raises: PeerError if another rank has left; the exception of a requested stop."""
        self._clock.mark("exposed_communication" if self._mesh.world_size > 1 else "other")
        try:
            meeting = meet(self._mesh, word, self._records.row)
        except Exception as error:
            raise self._lost(error) from error
        self._clock.mark("other")
        self._records.write(meeting.agreement)
        if word.leaves or not meeting.ends:
            return meeting
        self._over = True
        self._save(clean=meeting.clean)
        if any(other.leaves for other in meeting.words):
            raise meeting.left(self.state.step)
        self.status = "preempted"
        raise self.asked.end()

    def _save(self, *, live: bool = False, clean: bool = True) -> None:
        """Save the last checkpoint if `clean`: all ranks report the same state. Collective: all ranks."""
        if self._callbacks.meddled is not None:
            return
        if self._turns or not clean:
            numbers = sorted({number for chosen in self._turns for number in chosen})
            names = [type(self._prepared.optimizers[number]).__name__ for number in numbers]
            self._saving.torn(self.state, names, at_first=not self._known)
            return
        try:
            self._saving.last(self.state, live=live)
        except Exception as error:
            if isinstance(error, ShoalError) or not is_lost_peer(error):
                raise
            self._saving.alone(self.state)

    def _raise_together(self, error: ShoalError | None) -> None:
        """Raise an error of some ranks on all ranks, after the last checkpoint. Collective: all ranks."""
        self._over = True
        try:
            raise_together(self._mesh, error)
        finally:
            self._save()

    def _fail(self, error: ShoalError) -> NoReturn:
        """Raise an error that all ranks have, after the last checkpoint. Collective: all ranks."""
        self._over = True
        self._restore()
        self._save()
        raise error

    def _restore(self) -> None:
        """Undo the changes of a pass that did not reach its update."""
        if self._open:
            self.passes.buffers.restore()
        self._open = False

    def _lost(self, error: Exception) -> Exception:
        """Return the error for a failed collective, which may mean that another rank is gone."""
        self._over = True
        if isinstance(error, ShoalError) or not is_lost_peer(error):
            return error
        self._restore()
        torn = "the step was left between its updates, and is not saved"
        said = torn if self._turns else self._saving.alone(self.state)
        return PeerError(
            given=f"step {self.state.step + 1} on rank {self._mesh.rank}",
            conflict=f"another rank is gone: {str(error).strip().splitlines()[0][-200:]}",
            remedy=f"look at what the other rank said; {said}",
        )
