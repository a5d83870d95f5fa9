"""Passes of a Session's step: one reading of its batches on this rank, and the update at the end."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from shoal.checkpoint.state import model_tensors
from shoal.data.microbatch import Microbatch
from shoal.distributed.failures import as_shoal_error
from shoal.errors import ShoalError, UserCodeError
from shoal.job import Progress
from shoal.numerics.batch_statistics import StepBuffers
from shoal.numerics.precision import LossScale
from shoal.parallel.base import Flags, StepSums
from shoal.parallel.model.sharded_model import ShardedModel
from shoal.training.computation import LossComputer, MicrobatchPolicy, RedoError, check_pair
from shoal.training.forward_backward import ForwardBackward, LoadedMicrobatch, StepParts
from shoal.training.observer import Observer
from shoal.training.optimizer_step import Update
from shoal.training.session.guard import LoopWatch
from shoal.training.session.prepared import Prepared
from shoal.training.session.rates import Groups, as_one, turned
from shoal.training.session.ways import Base, Chosen, UpdateWay, UpdateWays
from shoal.training.telemetry import StepClock
from shoal.training.trace.recorder import TraceRecorder


class BatchPasses:
    """Execution of passes, one after the other. `error`: why this rank could not compute the last one.

    `torn`: whether an update was left in the midst of it.
    """

    def __init__(self, base: Base, prepared: Prepared) -> None:
        """Collective: all ranks. Raises: JobError, PlanError."""
        self._base, self._prepared = base, prepared
        self._root = prepared.root()
        self.sharded_model = ShardedModel(base.mesh, self._root, divides_state=base.plan.layout.shard > 1)
        replay = base.replay
        self._observer = TraceRecorder(Path(replay.folder), base.mesh.rank) if replay else Observer()
        self.ways = UpdateWays(base, prepared, self.sharded_model, self._observer)
        self._buffers = StepBuffers(self._root)
        self._buffers.watch()
        self._buffers.begin()
        self._parts = functools.partial(
            StepParts,
            mesh=base.mesh,
            precision=base.precision,
            sharded_model=self.sharded_model,
            buffers=self._buffers,
            clock=StepClock(base.mesh.device, enabled=False),
            observer=self._observer,
        )
        self._every = as_one(prepared.optimizers, base.plan.execution.exact)
        self._count = 0  # of all passes: a verification compares each update by itself
        self._watch = LoopWatch()
        self._after: Groups | None = None
        self._microbatch: Microbatch | None = None
        self.error: ShoalError | None = None
        self.torn = False

    def watch(self) -> None:
        """Writes down the first state, where the loop is verified. Collective: as TraceRecorder.attach."""
        if isinstance(self._observer, TraceRecorder):
            self._observer.attach(self.sharded_model, self._every, self.ways.strategy)
            self._mark()

    def _mark(self) -> None:
        """Keeps what an update has left, to tell what the loop itself changes before the next."""
        self._after, self._values = Groups(self._prepared.optimizers), model_tensors(self._root)

    def begin(self, step: int, chosen: Chosen, turn: int, loss_scale: LossScale) -> None:
        """A pass starts: of which step (from 0), for which optimizers, and its number in the step.

        Raises: JobError where its optimizers have nothing to train; UserCodeError for gradients changed too late.
        """
        base, self.error = self._base, None
        self._watch.begin(self._prepared.optimizers)
        if base.replay is not None:
            self._replay()
        self._way: UpdateWay = self.ways.of(chosen)
        self._way.stepper.turn = turn
        parts = self._parts(strategy=self._way.strategy, computer=self._computer(turn))
        self._passes = ForwardBackward(parts, loss_scale.factor(base.job.global_batch))
        self._passes.begin(step)
        self._observer.begin(self._count, self._passes.factor)

    def _computer(self, turn: int) -> LossComputer:
        """What gives each microbatch its randomness, another one in each pass of a step; the loop computes its loss."""
        base, fuse = self._base, self._base.training.fuse
        job = replace(base.job, seed=turned(base.job.seed, turn)) if turn else base.job
        policy = MicrobatchPolicy(base.plan.batch.grains_per_microbatch, "scoped" if fuse else "opaque", fuse)
        return LossComputer(job, self._root, base.precision, policy)

    def _replay(self) -> None:
        """The state of the run that is replayed, with what the loop itself has changed of the groups since."""
        replay = self._base.replay
        if replay is None or self._after is None:
            return
        if replay.of is None:
            if self._base.mesh.rank == 0:
                replay.note(self._count, self._root, self._values)
            return
        now = Groups(self._prepared.optimizers)
        self._after.put_back()
        replay.start(self._count, self._root, self._every)
        now.put_changes(self._after)

    def batches(self, microbatches: Iterator[Microbatch], count: int) -> Generator[object]:
        """This rank's batches; what goes wrong with them is in `error` afterwards."""
        replay, precision = self._base.replay, self._base.precision
        try:
            if replay is not None:
                microbatches = replay.order(microbatches)
            for number in range(count):
                self._microbatch, self._taken = next(microbatches), False
                self._last = number == count - 1
                loaded = LoadedMicrobatch(self._microbatch, functools.partial(precision.inputs, self._microbatch.batch))
                with self._passes.microbatch(loaded) as batch, precision.autocast():
                    yield batch
                    if not self._taken:
                        raise _no_backward(self._microbatch.step + 1)
                    self._watch.check(self._prepared.optimizers)
                    self._watch.drop()
        except RedoError as redo:
            self.error = _not_fusible(str(redo))
        except Exception as error:
            self.error = as_shoal_error(error)
        finally:
            self._watch.drop()
            self._microbatch = None

    def backward(self, number: int, total: Tensor, weight: Tensor | float | None) -> None:
        """Adds the batch at hand. Raises: LossError; UserCodeError where there is none, or it was added before."""
        microbatch = self._microbatch
        if microbatch is None or self._taken:
            raise _no_batch(number, again=microbatch is not None)
        total, weight = check_pair("loss", total if weight is None else (total, weight))
        self._taken = True
        loss, sums = self._passes.loss(microbatch, total, weight, self._passes.weighted_buffers(microbatch))
        self._way.strategy.backward(microbatch, loss, sums, self._last)
        self._watch.note(self._way.parameters, taken=self._base.plan.execution.exact)

    def rate(self, progress: Progress) -> None:
        """Schedule's multiplier for the coming update; where it raises, `error` says so before the ranks sum."""
        if self.error is not None:
            return
        try:
            self._way.stepper.foresee(progress)
        except Exception as error:
            self.error = as_shoal_error(error)

    def finish(self, error: ShoalError | None) -> StepSums:
        """The sums over all ranks, and every parameter's gradient. Collective: all ranks."""
        return self._passes.finish(Flags(errors=int(error is not None)), [])

    def update(self, sums: StepSums, loss_scale: LossScale, progress: Progress) -> Update:
        """Steps the optimizers of the pass. Raises: as Updater.step."""
        self._way.drop_others()
        begun = self._way.updater.num_begun
        try:
            update = self._way.updater.step(sums.loss, sums.weight, loss_scale, progress)
        finally:  # in the midst of it the parameters are the state after no step
            self.torn = self._way.updater.num_begun > begun
        said = self._passes.updated(sums, update.skipped)
        if said is not None and self._base.mesh.rank == 0:
            warnings.warn(said, RuntimeWarning, stacklevel=2)
        self._count += 1
        if self._after is not None:
            self._mark()
        self._watch.note(self._way.parameters)
        self.torn = False
        return update

    def restore(self) -> None:
        """Puts the buffers back that a pass has changed that does not update."""
        self._buffers.restore()

    def close(self) -> None:
        """Takes hooks off the model."""
        self.ways.close()
        if isinstance(self._observer, TraceRecorder):
            self._observer.close()


def _not_fusible(what: str) -> UserCodeError:
    return UserCodeError(
        given=f"a model that uses {what}",
        conflict="it cannot be told apart by grain where several grains share a forward",
        remedy="write Session(fuse=False): each batch is then one grain",
    )


def _no_backward(number: int) -> UserCodeError:
    return UserCodeError(
        given=f"a batch of step {number} without step.backward(total, weight)",
        conflict="every batch belongs to the step's gradient",
        remedy="call step.backward(total, weight) once for each batch",
    )


def _no_batch(number: int, again: bool) -> UserCodeError:
    return UserCodeError(
        given=f"step.backward() of step {number} "
        + ("a second time for the same batch" if again else "without a batch"),
        conflict="the loss of each batch counts once",
        remedy="call it once within the loop over the batches; add losses up to one total",
    )
