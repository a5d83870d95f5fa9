"""Boundary between the steps of a Session: meetings of the ranks, requests, checkpoints, and the loop's end."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field
from typing import Any, NoReturn

from shoal.checkpoint.keeper import RunState
from shoal.data.loader import Loader, MapLoader
from shoal.data.order import Order
from shoal.distributed.failures import is_lost_peer, user_error
from shoal.distributed.mesh import raise_together, together
from shoal.errors import PeerError, ShoalError
from shoal.jobs.job import watched_by
from shoal.numerics.precision import LossScale
from shoal.training.callbacks.base import RunFacts
from shoal.training.callbacks.calls import CallbackCalls, Settled
from shoal.training.microbatch.policy import MicrobatchPolicy
from shoal.training.observer import StepClock
from shoal.training.session.arguments import Prepared
from shoal.training.session.meeting import Meeting, StopRequests, Word, meet
from shoal.training.session.passes import Base, BatchPasses, Chosen
from shoal.training.session.recording import SessionRecords
from shoal.training.session.saving import Saving


@dataclass
class CurrentStep:
    """The step under way.

    `turns`: its passes so far. `known`: sequences of passes with which steps have ended. `alone`: its only pass is a
    plain iteration. `is_open`: a pass has begun. `is_over`: the loop takes no more steps. `metrics`: of evaluations
    after its updates.
    """

    turns: list[Chosen] = field(default_factory=list)
    known: set[tuple[Chosen, ...]] = field(default_factory=set)
    alone: bool = False
    is_open: bool = False
    is_over: bool = False
    metrics: dict[str, float] = field(default_factory=dict)


class LoopBoundary:
    """Boundary between two steps of a user's loop, with the state after the last finished step.

    `status`: completed, preempted, or failed until the loop has ended in another way. `error`: why it has failed.
    """

    def __init__(
        self, base: Base, prepared: Prepared, loader: Loader, order: Order, *, passes: BatchPasses, clock: StepClock
    ) -> None:
        """Open records and checkpoints. Raises: errors of the checkpoints. Collective: all ranks."""
        self._base, self._prepared, self._loader, self._order = base, prepared, loader, order
        self._mesh, self._passes, self._clock = base.mesh, passes, clock
        own = base.training.callbacks if base.replay is None else ()
        self.callbacks = together(base.mesh, lambda: CallbackCalls(own, base.mesh))
        model, strategy = passes.sharded_model, passes.ways.strategy
        self.saving = Saving(base, prepared, model, loader, strategy, callbacks=self.callbacks)
        self.records = SessionRecords(base, clock, order)
        self.stop_requests, self.current = StopRequests(), CurrentStep()
        self.status = "failed"
        self.error: BaseException | None = None
        self.is_closed = self.has_started = False
        self.is_best = False  # the last evaluation is the best so far, and its state is not saved yet

    def begin(self) -> None:
        """Set the first state, restored into model, optimizers and loader. Collective: all ranks."""
        base, model, plan, mesh = self._base, self._passes.sharded_model, self._base.plan, self._mesh
        training, replay = base.training, base.replay
        scale = LossScale.of(plan.precision.loss_scale, base.precision.compute)
        self.state = (self.saving.load(scale) if training.resume else None) or RunState(
            loss_scale=scale, computation=MicrobatchPolicy.of(base.job, plan.batch.grains_per_microbatch).to_json()
        )
        self.state.grains = base.job.grains
        fuse = training.fuse and not (replay and replay.grain_by_grain)
        self._loader.seek(self.state.step, plan.batch.grains_per_microbatch if fuse else 1)
        self._passes.watch()
        num_samples = self._order.num_samples if isinstance(self._loader, MapLoader) else None
        around = self._around = self.records.begin(self.state, model, num_samples)
        known = (base.job, plan, mesh.rank, mesh.world_size, self._order.num_steps)
        facts = RunFacts(*known, around.out, around.settings, around.description, own_loop=True)
        build = functools.partial(copy.deepcopy, model.model)
        self.callbacks.begin(facts, model, self._passes.every, build, note=around.note, events=around.events)

    def start(self) -> None:
        """Call `on_start` of the callbacks, before the first step."""
        self.has_started = True
        self.callbacks.start(self.state)

    def meet(self, *, leaves: bool = False, **said: Any) -> Meeting:
        """Gather all ranks' words. Raises: PeerError if another rank has left; the exception of a requested stop.

        Collective: all ranks.
        """
        turns = self.current.turns
        # Nothing can be saved between two updates of a step: a request waits for the last update.
        word = Word(
            leaves=leaves,
            stop_requested=bool(self.stop_requests.received) and (leaves or not turns),
            clean=not turns,
            step=self.state.step,
            requests=0 if turns else self.callbacks.request_bits,
            **said,
        )
        self._clock.mark("exposed_communication" if self._mesh.world_size > 1 else "other")
        try:
            meeting = meet(self._mesh, word, self.records.row)
        except Exception as error:
            raise self.lost(error) from error
        self._clock.mark("other")
        self.records.write(meeting.agreement)
        if leaves or not meeting.ends:
            return meeting
        self.current.is_over = True
        self.save(clean=meeting.clean)
        if any(other.leaves for other in meeting.words):
            raise meeting.left(self.state.step)
        self.status = "preempted"
        raise self.stop_requests.end()

    def serve(self, meeting: Meeting) -> None:
        """Follow the requests of any rank's callbacks after a finished step, and save a checkpoint that is due.

        Collective: all ranks.
        """
        settled = Settled()
        if meeting.requests:
            try:
                settled = self.callbacks.settle(self._mesh, meeting.requests)
            except ShoalError as error:
                self.fail(error)
        if settled.checkpoint or self.is_best or meeting.words[0].checkpoint:
            self._clock.mark("checkpoint")
            self.records.saves(self.state.step)
            self.saving.regular(self.state, best=self.is_best)
            self.is_best = False
            self._clock.mark("other")
        if settled.end is not None and self.records.ended_by is None:
            self.records.ended_by = settled.end
            self._around.note("{callback} ends the training after step {step}: {reason}".format(**settled.end))

    def evaluated(self, metrics: dict[str, float]) -> None:
        """Pass the metrics of an evaluation by the loop to callbacks and records, after the step that it belongs to."""
        current = self.current
        if not self.has_started:
            return
        if current.turns and not current.is_over:  # the step is counted when its body ends
            current.metrics |= metrics
            return
        watched, best = watched_by(self._base.training.callbacks), self.state.best
        if watched is not None and self.state.improves(watched, metrics):
            self.is_best = not (self.is_closed or current.is_open)
            if not self.is_best:
                self.state.best = best
                text = "the best evaluation so far came after the loop, or within batches: its state is not kept"
                self._around.note(f"warning: {text} as the best; evaluate in a step's body, after its batches")
        self.callbacks.evaluated(self.state, metrics)
        self.records.evaluated(metrics)

    def save(self, *, live: bool = False, clean: bool = True) -> None:
        """Save the last checkpoint if `clean`: all ranks report the same state. Collective: all ranks."""
        turns = self.current.turns
        if self.callbacks.meddled is not None:
            return
        if turns or not clean:
            numbers = sorted({number for chosen in turns for number in chosen})
            names = [type(self._prepared.optimizers[number]).__name__ for number in numbers]
            self.saving.torn(self.state, names, at_first=not self.current.known)
            return
        self.records.saves(self.state.step)
        try:
            self.saving.last(self.state, live=live)
        except Exception as error:
            if isinstance(error, ShoalError) or not is_lost_peer(error):
                raise
            self.saving.alone(self.state)

    def raise_together(self, error: ShoalError | None) -> None:
        """Raise an error of some ranks on all ranks, after the last checkpoint. Collective: all ranks."""
        self.current.is_over = True
        try:
            raise_together(self._mesh, error)
        finally:
            self.save()

    def fail(self, error: ShoalError) -> NoReturn:
        """Raise an error that all ranks have, after the last checkpoint. Collective: all ranks."""
        self.current.is_over = True
        self.restore()
        self.save()
        raise error

    def restore(self) -> None:
        """Undo the changes of a pass that did not reach its update."""
        if self.current.is_open:
            self._passes.buffers.restore()
        self.current.is_open = False

    def lost(self, error: Exception) -> Exception:
        """Return the error for a failed collective, which may mean that another rank is gone."""
        self.current.is_over = True
        if isinstance(error, ShoalError) or not is_lost_peer(error):
            return error
        self.restore()
        torn = "the step was left between its updates, and is not saved"
        said = torn if self.current.turns else self.saving.alone(self.state)
        return PeerError(
            given=f"step {self.state.step + 1} on rank {self._mesh.rank}",
            conflict=f"another rank is gone: {str(error).strip().splitlines()[0][-200:]}",
            remedy=f"look at what the other rank said; {said}",
        )

    def close(self) -> None:
        """Write how the loop has ended, wait for checkpoints, and unlock their directory."""
        self.is_closed = True
        if isinstance(self.error, Exception):
            self.status = "failed"
        try:
            if self.error is not None:
                self.conclude()
        finally:
            try:
                self.records.end(self.status)
            finally:
                self.saving.close()

    def conclude(self) -> None:
        """Call `on_end` of the callbacks once, at an error, or after the evaluations that follow the loop.

        Raises: on this rank, the error of a required callback, if the loop is completed.
        """
        if not self.has_started:
            return
        self.has_started = False
        error, by = self.error, self.records.ended_by
        if self.status != "failed" and not isinstance(error, Exception):
            failure = self.callbacks.end(self.status, self.records.metrics, reason=by["reason"] if by else None)
            if failure is not None and self.status == "completed":
                raise failure
            return
        if not isinstance(error, Exception):
            by_what = f"by a {type(error).__name__}" if error is not None else "without its update"
            error = RuntimeError(f"step {self.state.step + 1} ended {by_what}")
        if not isinstance(error, ShoalError) and not is_lost_peer(error):
            error = user_error("the loop", error)
        self.callbacks.end("failed", error=error)
