"""Session: shoal's grains, sums and checkpoints for those who keep their own training loop."""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from shoal.adapters import adapted
from shoal.agreement import Report, agree, raise_together
from shoal.buffers import StepBuffers
from shoal.checkpoint.store import Store
from shoal.computation import check_pair
from shoal.data.loader import MapLoader, Place
from shoal.data.order import Order
from shoal.data.source import MapSource, open_source
from shoal.environment import Environment, joined
from shoal.errors import JobError, NonFiniteError, PlanError, ShoalError, StorageError, UserCodeError
from shoal.evaluation import Evaluator
from shoal.faults import as_shoal_error
from shoal.grains import random_key
from shoal.holding import Holding
from shoal.job import Epochs, Job, Length, Progress
from shoal.keeper import Keeper, RunState, Trained
from shoal.mesh import open_mesh
from shoal.microbatch import Microbatch, StepData
from shoal.observation import Observer
from shoal.plan import AXES, Plan
from shoal.plan.resolve import Wishes, apply_wishes, complete, refuse_unsupported
from shoal.precision import LossScale, Precision
from shoal.randomness import GrainScope, NotFusibleError, seed_everything
from shoal.recorder import Recorder
from shoal.replay import Replay
from shoal.startup import prepare_process
from shoal.strategies.assemble import assemble
from shoal.strategies.base import NUM_SUMS, Flags, StepSums, microbatch_sums
from shoal.strategies.compiled import compile_blocks
from shoal.strategies.recompute import recompute
from shoal.update import Parameters, Updater


@dataclass(frozen=True, kw_only=True)
class Training:
    """The numbers of a Session's training; the fields are a Job's, see there.

    `fuse`: whether neighbouring grains may share a forward; False for losses that compare the samples of a batch.
    `checkpoints`: a directory for them, or None; `resume`: go on from the newest good one there.
    """

    global_batch: int
    grains: int = 8
    seed: int = 0
    clip_norm: float | None = None
    schedule: Callable[[Progress], float] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    shuffle: bool = True
    fuse: bool = True
    skip_nonfinite: bool = False
    checkpoints: str | os.PathLike[str] | None = None
    resume: bool = False


class Session:
    """Parallel training for a loop of your own: one process alone, or one of many under torchrun.

    `plan` and the keyword arguments `exact` and `precision` say how; everything else is a field of `Training`.
    Raises: JobError, PlanError, LaunchError as `shoal run` does. Use as a context manager, or call `close`.
    """

    def __init__(
        self, plan: Plan | None = None, *, exact: bool | None = None, precision: str | None = None, **training: Any
    ) -> None:
        self.training = Training(**training)
        self._job = _check(self.training)
        environment = joined(os.environ) or Environment()
        wishes = Wishes(devices=None if plan else environment.world_size, exact=exact, precision=precision)
        plan = apply_wishes(plan or Plan(), wishes, from_file=False)
        self.replay = Replay.told(os.environ)
        if self.replay and self.replay.of is not None:  # the same loop on one process
            plan = plan.with_sections(layout=dict.fromkeys(AXES, 1))
        if self.replay:  # compressed sums are not those of one process
            plan = plan.uncompressed
        self.plan = complete(plan, self._job.grains, self._job.grain_size)
        refuse_unsupported(self.plan)
        _refuse_divided(self.plan)
        prepare_process(self.plan.execution.exact, num_threads=None)
        self._exit = contextlib.ExitStack()
        self.mesh = self._exit.enter_context(open_mesh(environment, self.plan.degrees))
        self._precision = Precision.of(self.plan.precision, self.mesh.device, self.plan.execution.channels_last)
        self._stepped = False
        self._model: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None

    @property
    def rank(self) -> int:
        """This process's number; rank 0 prints."""
        return self.mesh.rank

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The same two objects: the model on its device in the plan's dtype, with rank 0's values on every rank."""
        model = self._precision.apply(adapted(model).to(self.mesh.device))
        self.mesh.broadcast([t.detach() for t in (*model.parameters(), *model.buffers())])
        recompute(model, self.plan.memory.recompute)
        compile_blocks(model, self.plan, self._precision)
        self._model, self._optimizer = model, optimizer
        return model, optimizer

    def steps(self, dataset: Any, length: Length | None = None, *, epochs: float | None = None) -> Iterator[Step]:
        """The steps of a training on a map-style dataset; iterate each for this rank's batches.

        Raises: on every rank, where a batch of any rank cannot be read or computed by shoal. An exception in the
        loop's own body ends its process, and the others at their next collective.
        """
        if self._model is None or self._optimizer is None:
            raise JobError(
                given="session.steps() before session.prepare()",
                conflict="the session does not know the model",
                remedy="write: model, optimizer = session.prepare(model, optimizer)",
            )
        source = open_source("dataset", dataset, self.training.collate)
        if not isinstance(source, MapSource):
            raise JobError(
                given="a stream as the dataset of a Session",
                conflict="a Session reads map-style datasets",
                remedy="give a dataset with a length, or use shoal run",
            )
        goal = length if length is not None else Epochs(epochs if epochs is not None else 1)
        order = Order(len(source), self._job.global_batch, self._job.grains, self._job.seed, self._job.shuffle, goal)
        if self._stepped:
            raise JobError(
                given="session.steps() a second time",
                conflict="a Session is one training: its order, schedule and checkpoints go on through all epochs",
                remedy="write one loop over session.steps(dataset, epochs=N); step.epoch tells which it is in",
            )
        self._stepped = True
        yield from _Loop(self, self._job, source, order).run(self._model, self._optimizer)

    def evaluate(self, dataset: Any, metrics: Mapping[str, Callable[[Any, Any], Any]]) -> tuple[dict[str, float], int]:
        """Each metric's sum over its count on every sample once, and how many samples that were. Collective: all."""
        assert self._model is not None, "prepare() comes first"
        source = open_source("dataset", dataset, self.training.collate)
        return Evaluator(self._job, self.mesh, self._precision, source, metrics).evaluate(self._model)

    def close(self) -> None:
        """Ends the process group."""
        self._exit.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _refuse_divided(plan: Plan) -> None:
    if plan.serves:
        raise PlanError(
            given=f'a Session with server.mode = "{plan.server.mode}"',
            conflict="a loop of your own updates the parameters itself, which servers would do",
            remedy='use shoal run with a job file, or server.mode = "none"',
        )
    if plan.divides_model:
        degrees = ", ".join(f"{axis} = {n}" for axis, n in plan.layout.model_dump().items() if n > 1)
        raise PlanError(
            given=f"a Session with {degrees}" + (f", shard.level = {plan.shard.level!r}" if plan.shards_model else ""),
            conflict="a Session is given a model and an optimizer that are whole, and each rank of it keeps them so",
            remedy='use data, or shard with shard.level = "optimizer"; or a Job and shoal run, which divide the model',
        )


def _check(training: Training) -> Job:
    """The numbers as a Job, which checks them."""

    def unused(*_: Any) -> Any:
        raise AssertionError("a Session's loop computes its own loss")

    return Job(
        model=unused,
        loss=unused,
        optimizer=unused,
        train_data=(),
        global_batch=training.global_batch,
        grains=training.grains,
        seed=training.seed,
        clip_norm=training.clip_norm,
        schedule=training.schedule,
        collate=training.collate,
        shuffle=training.shuffle,
    )


class Step:
    """One optimizer step. Iterate it for this rank's batches and call `backward` once for each; it then updates.

    After the iteration `loss` is the mean over the global batch, `grad_norm` the norm before clipping; `number` counts
    from 1.
    """

    def __init__(self, loop: _Loop, data: StepData) -> None:
        self._loop, self._data = loop, data
        self.number = data.step + 1
        self.epoch = data.epoch
        self.loss = math.nan
        self.grad_norm = math.nan
        self._pair: tuple[Tensor, Tensor | float] | None = None

    def backward(self, total: Tensor, weight: Tensor | float) -> None:
        """Takes the loss of the batch at hand: a sum over its samples or tokens, and how many they were."""
        self._pair = check_pair("loss", (total, weight))
        self._loop.backward(self._pair)

    def __iter__(self) -> Iterator[Any]:
        yield from self._loop.batches(self, self._data)


class _Loop:
    """The engine behind the steps of one `Session.steps`."""

    def __init__(self, session: Session, job: Job, source: MapSource, order: Order) -> None:
        self._session, self._job, self._order = session, job, order
        self._mesh, self._plan, self._precision = session.mesh, session.plan, session._precision
        place = Place(self._mesh.data_rank, self._mesh.num_data_ranks)
        cuda = self._mesh.device.type == "cuda"
        self._loader = MapLoader(source, order, place, self._plan.data.workers, cuda)
        self._microbatch: Microbatch | None = None
        self._last = False
        self._error: ShoalError | None = None

    def run(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Step]:
        training = self._session.training
        parameters = Parameters(model)
        holding = Holding(self._mesh, model, divides_state=self._plan.layout.shard > 1)
        self._strategy = assemble(self._plan, holding, parameters, self._job.grains, lambda span: None)
        replay = self._session.replay
        self._observer = Recorder(Path(replay.folder), self._mesh.rank) if replay else Observer()
        exact = self._plan.execution.exact
        self._updater = Updater(optimizer, self._job, self._observer, self._strategy, holding, exact=exact)
        self._buffers = StepBuffers(model)
        self._buffers.watch()
        folder = training.checkpoints if replay is None else None  # a verification leaves the user's own alone
        store = None if folder is None else Store(Path(folder))
        if store is not None and self._mesh.rank == 0:
            store.clean()
        self._keeper = Keeper(self._mesh, store, Trained(holding, optimizer, self._loader, self._strategy), None)
        self._scale = LossScale.of(self._plan.precision.loss_scale, self._precision.compute)
        loaded = self._keeper.load(self._scale)[0] if training.resume else None
        self.state = loaded or RunState(loss_scale=self._scale)
        fuse = training.fuse and not (replay and replay.grain_by_grain)
        self._loader.seek(self.state.step, self._plan.batch.grains_per_microbatch if fuse else 1)
        if isinstance(self._observer, Recorder):
            self._observer.attach(holding, optimizer, self._strategy)
        num_steps = min(self._order.num_steps, replay.num_steps) if replay else self._order.num_steps
        try:
            while self.state.step < num_steps:
                data = self._loader.step(self.state.step)
                if replay:
                    replay.start(self.state.step, model, optimizer)
                    data = replace(data, microbatches=replay.order(data.microbatches))
                step = Step(self, data)
                yield step
                if self.state.step != step.number:
                    raise _not_iterated(step)
            with contextlib.suppress(StorageError):  # the writer has warned; what comes after the loop is the user's
                self._keeper.save(self.state, wait=True)
        finally:
            self._keeper.close()
            self._loader.close()
            self._strategy.close()

    def batches(self, step: Step, data: StepData) -> Iterator[Any]:
        """This rank's batches, then the update."""
        agreement = agree(self._mesh, Report(has_data=True, checkpoint=self._keeper.due(self.state.step)))
        if agreement.checkpoint:
            self._keeper.save(self.state)
        self._strategy.begin(self.state.step, self._factor)
        self._buffers.begin()
        self._observer.begin(self.state.step, self._factor)
        flags = Flags()
        try:
            for number in range(data.num_microbatches):
                self._microbatch, step._pair = next(data.microbatches), None
                self._last = number == data.num_microbatches - 1
                batch = self._precision.inputs(self._microbatch.batch)
                self._observer.microbatch(self._microbatch, batch)
                with self._precision.products(), self._scope(self._microbatch), self._precision.autocast():
                    yield batch
                if step._pair is None:
                    raise _no_backward(step)
                self._observer.computed()
                self._buffers.restore()
        except GeneratorExit:
            raise
        except Exception as error:
            self._error, flags = as_shoal_error(error), Flags(errors=1)
        sums = self._strategy.finish(flags, NUM_SUMS + self._buffers.num_values, [])
        if sums.flags.errors:
            raise_together(self._mesh, self._error)
        step.loss = sums.loss
        progress = Progress(self.state.step, self._order.num_steps, self.state.samples)
        update = self._updater.step(sums.loss, sums.weight, self.state.loss_scale, progress)
        step.grad_norm = update.grad_norm
        if update.skipped == "nonfinite" and not self._session.training.skip_nonfinite:
            raise NonFiniteError(
                given=f"step {step.number}: loss {sums.loss}, gradient norm {update.grad_norm}",
                conflict="one of them is not finite; the parameters are those before the step",
                remedy="mend the data, or write Session(skip_nonfinite=True)",
            )
        if update.skipped is None:
            self._buffers.assign(sums.buffers, sums.num_samples)
            self._tell_of_fall_back(sums)
        self._observer.updated(update.skipped)
        self.state.advance(sums, update.skipped)

    def _tell_of_fall_back(self, sums: StepSums) -> None:
        compression = self._strategy.compression
        said = compression.said(sums.compared) if compression is not None and sums.compared is not None else None
        if said is not None and self._mesh.rank == 0:
            warnings.warn(said, RuntimeWarning, stacklevel=2)

    @contextlib.contextmanager
    def _scope(self, microbatch: Microbatch) -> Iterator[None]:
        if not self._session.training.fuse:
            seed_everything(random_key(self._job.seed, "model", microbatch.step, microbatch.grains[0].index))
            yield
            return
        try:
            with GrainScope(self._job.seed, microbatch.step, microbatch.grains) as scope:
                yield
                leaked = scope.leaked()
        except NotFusibleError as error:
            raise _not_fusible(str(error)) from error
        if leaked:
            raise _not_fusible("randomness outside torch's functions")

    def backward(self, pair: tuple[Tensor, Tensor | float]) -> None:
        """Adds the microbatch at hand."""
        assert self._microbatch is not None
        total, weight = pair
        sums = microbatch_sums(self._microbatch, total, weight, self._buffers.weighted(self._microbatch.num_samples))
        self._observer.loss(total.detach(), weight)
        factor = self._factor
        self._strategy.backward(self._microbatch, total * factor if factor != 1.0 else total, sums, self._last)

    @property
    def _factor(self) -> float:
        return self.state.loss_scale.factor(self._job.global_batch)


def _not_fusible(what: str) -> UserCodeError:
    return UserCodeError(
        given=f"a model that uses {what}",
        conflict="it cannot be told apart by grain where several grains share a forward",
        remedy="write Session(fuse=False): each batch is then one grain",
    )


def _no_backward(step: Step) -> UserCodeError:
    return UserCodeError(
        given=f"a batch of step {step.number} without step.backward(total, weight)",
        conflict="every batch belongs to the step's gradient",
        remedy="call step.backward(total, weight) once for each batch",
    )


def _not_iterated(step: Step) -> UserCodeError:
    return UserCodeError(
        given=f"step {step.number} was not iterated to its end",
        conflict="its batches belong to the training",
        remedy="write: for batch in step: ... step.backward(total, weight)",
    )
