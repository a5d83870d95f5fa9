"""Session: parallel training for a user's own loop."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar, Unpack, overload

from torch import nn

from shoal.checkpoint.whole_optimizer import evaluated_weights
from shoal.data.source import (
    Opened,
    begun,
    in_its_order,
    open_data,
    open_evaluation,
    order_of,
    refuse_epochs,
)
from shoal.data.stream import loader_of
from shoal.distributed.mesh import decided_by_rank_0, open_mesh, together
from shoal.distributed.process_setup import prepare_process
from shoal.errors import JobError, PlanError
from shoal.jobs.job import Epochs, Job, Length
from shoal.launch.environment import Environment
from shoal.launch.environments.detect import joined
from shoal.numerics.precision import Precision
from shoal.parallel.assemble import mapped
from shoal.parallel.blocks.compiled import compile_blocks
from shoal.parallel.blocks.narrow_products import in_precision
from shoal.parallel.blocks.recompute import recompute
from shoal.plans import DEGREES, Plan
from shoal.plans.legal import ModelFacts, conflicts, idle, refuse
from shoal.plans.plan import degrees_in_use
from shoal.plans.resolve import CompletePlan, Judged, Wishes, apply_wishes, judge, unheeded, warn_of
from shoal.training.callbacks.ema import PREFIX
from shoal.training.microbatch.evaluation import Evaluator
from shoal.training.observe.trace.traces import Replay
from shoal.training.session.arguments import Prepared, Training, TrainingKeywords, missing_attribute
from shoal.training.session.loop import Loop, SessionStep
from shoal.training.session.passes import Base
from shoal.training.session.saving import Resumed, resumed
from shoal.training.setup.job_model import GrainsChoice, grains_of, lazy_names
from shoal.training.setup.preflight import compare_data, refuse_differences

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")


def _length(length: Any, epochs: Any, data: Opened) -> Length:
    """Return the training's length. Raises: JobError for an invalid length, two lengths, or epochs of a stream."""
    given = ", ".join(([] if length is None else [repr(length)]) + ([] if epochs is None else [f"epochs={epochs!r}"]))
    if length is not None and epochs is not None:
        raise _no_length(given, "a training has one length")
    goal = length if length is not None else Epochs(1 if epochs is None else epochs)
    count = getattr(goal, "count", None)
    if isinstance(count, bool) or not isinstance(count, int | float) or not count > 0:
        raise _no_length(given, "a length says what it counts, and is positive")
    given = f"session.steps({', '.join(['stream', given] if given else ['stream'])})"
    refuse_epochs(data, goal, given, "write session.steps(stream, shoal.Steps(1000)) or shoal.Samples(10**6)")
    return goal


def _no_length(given: str, conflict: str) -> JobError:
    return JobError(
        given=f"session.steps(dataset, {given})",
        conflict=conflict,
        remedy="write session.steps(dataset, epochs=3), shoal.Steps(1000) or shoal.Samples(10**6)",
    )


class Session:
    """Parallel training for a loop of your own, on one process or on many under torchrun.

    Use a Session as a context manager, or call `close`. Other keyword arguments are fields of `Training`.

    Args:
        plan: the layout; None: the default plan over all processes.
        exact: override of the plan's `execution.exact`.
        precision: override of the plan's precision.

    Attributes:
        rank: this process's rank. Print on rank 0.
        world_size: number of processes that train together.
        device: the torch.device of batches and prepared models.

    Raises: JobError, PlanError, LaunchError as `shoal run` does.
    """

    def __init__(
        self,
        plan: Plan | None = None,
        *,
        exact: bool | None = None,
        precision: str | None = None,
        **training: Unpack[TrainingKeywords],
    ) -> None:
        if plan is not None and not isinstance(plan, Plan):
            raise PlanError(
                given=f"Session({plan!r:.60})",
                conflict="the first argument of a Session is its plan",
                remedy="write shoal.Session(shoal.Plan(), global_batch=256), or leave the plan out",
            )
        self.training = Training.given(training)
        self._job = self.training.job()
        self._says_workers = plan is not None and "workers" in plan.data.model_fields_set
        environment = joined(os.environ) or Environment()
        wishes = Wishes(devices=None if plan else environment.world_size, exact=exact, precision=precision)
        plan = apply_wishes(plan or Plan(), wishes, from_file=False)
        self.replay = Replay.from_variables(os.environ)
        refuse(conflicts(plan))
        if environment.rank == 0 and not self.replay:
            warn_of(idle(plan))
            warn_of(self._job.without_effect())
        if self.replay and self.replay.of is not None:  # a replay runs the same loop on one process
            plan = plan.with_sections(layout={**dict.fromkeys(DEGREES, 1), "shares": []}, shard={"sizes": []})
        if self.replay:  # compressed sums differ from the sums of one process
            plan = plan.uncompressed
        if plan.serves:
            raise PlanError(
                given=f'a Session with server.mode = "{plan.server.mode}"',
                conflict="a loop of your own updates the parameters itself, which servers would do",
                remedy='use shoal run with a job file, or server.mode = "none"',
            )
        if plan.execution.cuda_graph:
            raise PlanError(
                given="a Session with execution.cuda_graph = true",
                conflict="a loop of your own runs between the forward and the update, and a replay has no place for it",
                remedy="use execution.cuda_graph = false; or a Job and shoal run",
            )
        if plan.divides_model:
            degrees = ", ".join(degrees_in_use(plan.layout))
            raise PlanError(
                given=f"a Session with {degrees}"
                + (f", shard.level = {plan.shard.level!r}" if plan.shards_model else ""),
                conflict="a Session is given a model and an optimizer that are whole, and each rank of it keeps them "
                "so: each forward of a divided model is a collective, and your loop may call the model on one rank "
                "alone",
                remedy='use data, memory.shared = true on the CPUs of one host, or shard with shard.level = "optimizer"'
                "; or a Job and shoal run, which divide the model",
            )
        prepare_process(plan.execution.exact, num_threads=None)
        with contextlib.ExitStack() as opened:
            self.mesh = opened.enter_context(open_mesh(environment, plan.layout))
            hooks = {"callbacks": [type(callback).__name__ for callback in self.training.callbacks]}
            refuse_differences(self.mesh, {"plan": plan.to_mapping(), "job": self._job.describe()} | hooks)
            self.plan = plan
            self._judged = None if self._job.grains is None else self._judge(self._job)
            self._exit = opened.pop_all()
        self.rank, self.world_size, self.device = self.mesh.rank, self.mesh.world_size, self.mesh.device
        self._precision = Precision.of(self.plan.precision, self.mesh.device, self.plan.execution.channels_last)
        self._prepared = Prepared()
        self._loop: Loop | None = None
        self._steps: weakref.ReferenceType[Generator[SessionStep]] | None = None

    def _judge(self, job: Job) -> CompletePlan:
        """Judge the plan for a job with a known number of grains, and add the plan's process groups to the mesh.

        Raises: PlanError.
        Collective: all ranks.
        """
        requested, facts = self.plan, ModelFacts(job.num_grains, job.grain_size)  # the layout does not divide the model
        if self.mesh.rank == 0 and not self.replay:
            warn_of(unheeded(requested, job.num_grains, None if job.fuse else "fuse=False"))
        judged = decided_by_rank_0(self.mesh, Judged, lambda: judge(requested, facts)).plan
        self.plan, self._job, self.mesh = judged, job, mapped(judged, self.mesh)
        return judged

    def __getattr__(self, name: str) -> Any:
        raise missing_attribute(name)

    @property
    def samples(self) -> int:
        """Number of samples in all finished steps, including steps before a resume."""
        return self._loop.boundary.state.samples if self._loop is not None else 0

    @overload
    def prepare(self, only: A, /) -> A: ...

    @overload
    def prepare(self, first: A, second: B, /) -> tuple[A, B]: ...

    @overload
    def prepare(self, first: A, second: B, third: C, /) -> tuple[A, B, C]: ...

    @overload
    def prepare(self, *objects: Any) -> Any: ...

    def prepare(self, *objects: Any) -> Any:
        """Prepare models, optimizers and torch schedulers, and return the same objects, as one object or a tuple.

        Models move to their device in the plan's dtype, with rank 0's values on every rank. Step schedulers yourself,
        as in plain torch.
        Raises: JobError for other objects, with advice.
        """
        if self._steps is not None:
            raise JobError(
                given="session.prepare() after session.steps()",
                conflict="what is trained is divided among the ranks before the first step",
                remedy="prepare everything first; freeze what comes later with requires_grad, or add a param group",
            )
        lazy = next(filter(None, map(lazy_names, objects)), None)
        if lazy:
            raise JobError(
                given=f"a model with lazy modules: {', '.join(lazy[:8])}",
                conflict="they have no shape yet, and an optimizer made of them steps nothing",
                remedy="call the model once with a small batch, then make the optimizer and call prepare()",
            )
        prepared, models = self._prepared.take(objects)
        for model in models:
            in_precision(model.to(self.mesh.device), self._precision)
            self.mesh.broadcast([t.detach() for t in (*model.parameters(), *model.buffers())])
            if any(p.requires_grad for p in model.parameters()):
                recompute(model, self.plan.memory.recompute)
                compile_blocks(model, self.plan, self._precision)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def steps(
        self, dataset: Any, length: Length | None = None, *, epochs: float | None = None
    ) -> Iterator[SessionStep]:
        """Yield the steps of a training on a dataset or a stream; iterate each step for this rank's batches.

        If one rank leaves the loop (a break, an exception), the other ranks raise a PeerError at their next step. All
        ranks save the last finished step.
        Raises: on every rank, if a batch of any rank cannot be read or computed by shoal.
        """
        if self._steps is not None:
            raise JobError(
                given="session.steps() a second time",
                conflict="a Session is one training: its order, schedule and checkpoints go on through all epochs",
                remedy="write one loop over session.steps(dataset, epochs=N); step.epoch tells which it is in",
            )
        self._prepared.check()
        if self.mesh.rank == 0:
            warn_of(self._prepared.without_optimizer())
        how = self.training.collate, self.training.global_batch, self.training.shuffle
        data = together(self.mesh, lambda: begun(open_data("dataset", dataset, *how, sampler=self._job.sampler)))
        self._job = together(self.mesh, lambda: in_its_order("dataset", data, self._job))
        refuse_differences(self.mesh, {"job": self._job.describe()})  # also the sampler of a DataLoader
        compare_data(self.mesh, data.source, max(data.workers or 0, self.plan.data.workers))
        before = decided_by_rank_0(
            self.mesh, Resumed, lambda: Resumed() if self.replay else resumed(self.training, self._job)
        )
        if self._judged is None:
            self._job = replace(self._job, grains=before.grains)
            chosen = decided_by_rank_0(
                self.mesh, GrainsChoice, lambda: grains_of(self._job, self._prepared.root(), data)
            )
            self._judged = self._judge(replace(self._job, grains=chosen.num_grains))
        base = Base(
            mesh=self.mesh,
            plan=self._judged,
            older=before.older,
            precision=self._precision,
            training=self.training,
            job=self._job,
            replay=self.replay,
        )
        if self.mesh.rank == 0:
            warn_of(data.notes)
        goal = _length(length, epochs, data)
        order = order_of(data, self._job, goal)
        workers = self.plan.data.workers if data.workers is None or self._says_workers else data.workers
        loader = together(self.mesh, lambda: loader_of(data, order, self.mesh, workers))
        self._loop = Loop(base, self._prepared, loader, order)
        steps = self._loop.run()
        self._steps = weakref.ref(steps)
        return steps

    def evaluate(
        self, dataset: Any, metrics: Mapping[Any, Callable[[Any, Any], Any]], model: nn.Module | None = None
    ) -> tuple[dict[str, float], int]:
        """Return each metric's sum over its count, with every sample counted once, and the number of samples.

        With the callback EMA, `ema_NAME` is the metric of the averaged weights. Callbacks get the result when the body
        of the current step ends.
        `model`: the model to evaluate; required if several are prepared.
        Raises: JobError.
        Collective: all ranks.
        """
        models = self._prepared.models
        if model is None and len(models) != 1:
            raise JobError(
                given=f"session.evaluate() with {len(models)} prepared models",
                conflict="a metric is called with one",
                remedy="write session.evaluate(dataset, metrics, model=generator)"
                if models
                else "write first: model, optimizer = session.prepare(model, optimizer)",
            )
        self._insist()
        data = together(self.mesh, lambda: open_evaluation("dataset", dataset, self.training.collate))
        if self.mesh.rank == 0:
            warn_of(data.notes)
        evaluator = Evaluator(self._job, self.mesh, self._precision, data, metrics)
        with contextlib.ExitStack() as weights:
            for optimizer in self._prepared.optimizers:
                weights.enter_context(evaluated_weights(optimizer))
            values, count = evaluator.evaluate(models[0] if model is None else model)
        boundary = self._loop.boundary if self._loop is not None and count else None
        average = boundary.callbacks.average if boundary is not None and boundary.has_started else None
        if average is not None:
            with average.in_place():
                averaged, _ = evaluator.evaluate(models[0] if model is None else model)
            values |= {f"{PREFIX}{name}": value for name, value in averaged.items()}
        if boundary is not None:
            boundary.evaluated(values)
        return values, count

    def close(self) -> None:
        """Save a loop that was left, and end the process group. Raises: KeyboardInterrupt after Ctrl-C in the loop."""
        self.__exit__(None, None, None)

    def _insist(self, error: BaseException | None = None) -> None:
        """Raise the exception of a requested stop, if the loop is over and could not raise it."""
        if self._loop is not None and self._loop.boundary.is_closed:
            self._loop.boundary.stop_requests.insist(error)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            steps = self._steps() if self._steps is not None else None
            if self._loop is not None:
                self._loop.boundary.error = self._loop.boundary.error or error
            if steps is not None:
                steps.close()
            if self._loop is not None:
                self._loop.close()
                if isinstance(error, Exception):  # a loop that it left was closed before, as if by a break
                    self._loop.boundary.records.failed()
                self._loop.boundary.conclude()
        finally:
            self._exit.close()
            if self._loop is not None:
                self._loop.boundary.error = None  # its traceback keeps the frames of the loop, with their tensors
        self._insist(error)
