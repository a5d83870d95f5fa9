"""Passes: one reading of a step's batches on this rank, and the update that it ends with."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from shoal.checkpoint.state import model_tensors
from shoal.data.microbatch import Microbatch
from shoal.distributed.failures import as_shoal_error
from shoal.errors import ShoalError, UserCodeError
from shoal.job import Progress
from shoal.numerics.batch_statistics import StepBuffers
from shoal.numerics.grain_randomness import GrainScope, NotFusibleError, seed_everything
from shoal.numerics.precision import LossScale
from shoal.parallel.base import NUM_SUMS, Flags, StepSums, microbatch_sums
from shoal.parallel.model.sharded_model import ShardedModel
from shoal.plans.grains import random_key
from shoal.training.computation import check_pair
from shoal.training.observer import Observer
from shoal.training.optimizer_step import Update
from shoal.training.session.guard import LoopWatch
from shoal.training.session.prepared import Prepared
from shoal.training.session.rates import Groups, as_one, turned
from shoal.training.session.ways import Base, Chosen, UpdateWay, UpdateWays
from shoal.training.trace.recorder import TraceRecorder


@dataclass(frozen=True)
class BatchPass:
    """One pass: of which step (from 0), for which optimizers, and its number in the step."""

    step: int
    chosen: Chosen
    turn: int
    loss_scale: LossScale


class BatchPasses:
    """Computes passes, one after the other. `error`: why this rank could not compute the last one.

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
        self._every = as_one(prepared.optimizers, base.plan.execution.exact)
        self._count = 0  # of all passes: a verification compares each update by itself
        self._watch = LoopWatch()
        self._after: Groups | None = None
        self._microbatch: Microbatch | None = None
        self.error: ShoalError | None = None
        self.torn = False

    def watch(self) -> None:
        """Writes down the first state, where the loop is verified. Collective: as Holding.wholes."""
        if isinstance(self._observer, TraceRecorder):
            self._observer.attach(self.sharded_model, self._every, self.ways.strategy)
            self._mark()

    def _mark(self) -> None:
        """Keeps what an update has left, to tell what the loop itself changes before the next."""
        self._after, self._values = Groups(self._prepared.optimizers), model_tensors(self._root)

    def begin(self, now: BatchPass) -> None:
        """A pass starts.

        Raises: JobError where its optimizers have nothing to train; UserCodeError for gradients changed too late.
        """
        self._now, self.error = now, None
        self._watch.begin(self._prepared.optimizers)
        if self._base.replay is not None:
            self._replay()
        self._way: UpdateWay = self.ways.of(now.chosen)
        self._way.stepper.turn = now.turn
        self._way.strategy.begin(now.step, self._factor)
        self._buffers.begin()
        self._observer.begin(self._count, self._factor)

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
                batch = precision.inputs(self._microbatch.batch)
                self._observer.microbatch(self._microbatch, batch)
                with precision.products(), self._scope(self._microbatch), precision.autocast():
                    yield batch
                if not self._taken:
                    raise _no_backward(self._now.step + 1)
                self._watch.check(self._prepared.optimizers)
                self._watch.drop()
                self._observer.computed()
                self._buffers.restore()
        except Exception as error:
            self.error = as_shoal_error(error)
        finally:
            self._watch.drop()
            self._microbatch = None

    @contextlib.contextmanager
    def _scope(self, microbatch: Microbatch) -> Iterator[None]:
        seed = turned(self._base.job.seed, self._now.turn)
        if not self._base.training.fuse:
            seed_everything(random_key(seed, "model", microbatch.step, microbatch.grains[0].index))
            yield
            return
        try:
            with GrainScope(seed, microbatch.step, microbatch.grains) as scope:
                yield
                leaked = scope.leaked()
        except NotFusibleError as error:
            raise _not_fusible(str(error)) from error
        if leaked:
            raise _not_fusible("randomness outside torch's functions")

    def backward(self, number: int, total: Tensor, weight: Tensor | float | None) -> None:
        """Adds the batch at hand. Raises: LossError; UserCodeError where there is none, or it was added before."""
        microbatch = self._microbatch
        if microbatch is None or self._taken:
            raise _no_batch(number, again=microbatch is not None)
        total, weight = check_pair("loss", total if weight is None else (total, weight))
        self._taken = True
        sums = microbatch_sums(microbatch, total, weight, self._buffers.weighted(microbatch.num_samples))
        self._observer.loss(total.detach(), weight)
        factor = self._factor
        self._way.strategy.backward(microbatch, total * factor if factor != 1.0 else total, sums, self._last)
        self._watch.note(self._way.parameters, taken=self._base.plan.execution.exact)

    def rate(self, progress: Progress) -> None:
        """What the schedule says of the update to come; where it raises, `error` says so before the ranks sum."""
        if self.error is not None:
            return
        try:
            self._way.stepper.foresee(progress)
        except Exception as error:
            self.error = as_shoal_error(error)

    def finish(self, error: ShoalError | None) -> StepSums:
        """The sums over all ranks, and every parameter's gradient. Collective: all ranks."""
        flags = Flags(errors=1) if error is not None else Flags()
        return self._way.strategy.finish(flags, NUM_SUMS + self._buffers.num_values, [])

    def update(self, sums: StepSums, progress: Progress) -> Update:
        """Steps the optimizers of the pass. Raises: as Updater.step."""
        self._way.drop_others()
        begun = self._way.updater.num_begun
        try:
            update = self._way.updater.step(sums.loss, sums.weight, self._now.loss_scale, progress)
        finally:  # in the midst of it the parameters are the state after no step
            self.torn = self._way.updater.num_begun > begun
        if update.skipped is None:
            self._buffers.assign(sums.buffers, sums.num_samples)
            self._tell_of_fall_back(sums)
        self._observer.updated(update.skipped)
        self._count += 1
        if self._after is not None:
            self._mark()
        self._watch.note(self._way.parameters)
        self.torn = False
        return update

    def restore(self) -> None:
        """Puts the buffers back that a pass has changed that does not update."""
        self._buffers.restore()

    def _tell_of_fall_back(self, sums: StepSums) -> None:
        compression = self._way.strategy.compression
        said = compression.said(sums.compared) if compression is not None and sums.compared is not None else None
        if said is not None and self._base.mesh.rank == 0:
            warnings.warn(said, RuntimeWarning, stacklevel=2)

    @property
    def _factor(self) -> float:
        return self._now.loss_scale.factor(self._base.job.global_batch)

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
