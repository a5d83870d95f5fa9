"""Engine: construction of a run's parts on one rank, from a Job, a complete Plan and a Mesh."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shoal.checkpoint.initial import TakenWeights, take_weights
from shoal.checkpoint.keeper import Keeper, Trained
from shoal.checkpoint.places import RemotePlace
from shoal.checkpoint.run_state import RunState
from shoal.checkpoint.store import NewestMark, Store
from shoal.checkpoint.tensor_file import DTYPE_NAMES
from shoal.data.loader import Loader
from shoal.data.opened import loader_of, open_evaluations, opened, order_of, refuse_epochs, said_of
from shoal.data.order import Order
from shoal.data.source import MapSource, Opened, small_batch
from shoal.data.stream import no_lockstep
from shoal.distributed.agreement import collectively, together
from shoal.distributed.failures import user_error
from shoal.distributed.mesh import Mesh, alone
from shoal.distributed.own_collectives import own_collectives_refused
from shoal.distributed.process_setup import one_thread
from shoal.errors import JobError, ShoalError
from shoal.jobs.job import Job
from shoal.launch.supervise.child import look_in_child
from shoal.launch.supervise.heartbeat import Heartbeat
from shoal.numerics.batch_statistics import StepBuffers
from shoal.numerics.grain_randomness import seed_everything
from shoal.numerics.precision import LossScale, Precision
from shoal.numerics.python_state import clear_caches
from shoal.parallel.assemble import ModelSource, assemble, divide, mapped
from shoal.parallel.blocks.compiled import compile_blocks
from shoal.parallel.blocks.recompute import recompute
from shoal.parallel.model.adapters import adapted
from shoal.parallel.model.parameter_hooks import ParameterHooks, refuse_hooks
from shoal.parallel.model.sharded_model import ShardedModel
from shoal.parallel.model.wrappers import refuse_wrapped, unwrapped
from shoal.plans.grains import random_key
from shoal.plans.plan import ExecutionSection, Plan
from shoal.plans.resolve import CompletePlan, warn_of
from shoal.runs.generation import Fence
from shoal.runs.option_values import InitialWeights
from shoal.training.callbacks.base import Callback, RunFacts
from shoal.training.callbacks.calls import CallbackCalls
from shoal.training.loop.device_graph import refuse_uncapturable
from shoal.training.loop.replicas import ReplicaCheck
from shoal.training.loop.trainer import Trainer
from shoal.training.loop.training_parts import TrainingParts
from shoal.training.microbatch.evaluation import EvaluationSets, Evaluator
from shoal.training.microbatch.loss import LossComputer, LossPair
from shoal.training.microbatch.policy import MicrobatchPolicy
from shoal.training.microbatch.step import StepRunner
from shoal.training.observe.record_writer import RecordWriter
from shoal.training.observe.step_records import Surroundings
from shoal.training.observer import Observer
from shoal.training.setup.default_grains import outline, with_grains
from shoal.training.setup.lazy_modules import whole
from shoal.training.setup.memory_format_choice import agreed_format
from shoal.training.setup.one_copy_choice import CopyNeed, copy_need, is_small, need_here
from shoal.training.setup.preflight import compare_data, compare_models, judged
from shoal.training.setup.seeded_model import construct_twice, unlike_ranks
from shoal.training.step_clock import StepClock, StepListener
from shoal.training.update.job_optimizer import (
    Parameters,
    build_optimizer,
    refuse_on_parts,
    refuse_served,
    without_optimizer,
)
from shoal.training.update.optimizer_step import Stepper, Updater
from shoal.training.update.optimizer_trial import refuse_divided_steps

if TYPE_CHECKING:
    from shoal.parallel.pipeline.pipeline import Pipeline

# Maximum number of elements of a divided model for a look at the whole model in one process, and its time limit.
_MOST_WHOLE, _WHOLE_SECONDS = 1 << 22, 10.0
# Runs with at least this number of metrics report the metrics' cost.
_MANY_METRICS = 3
# Note for runs that did not request the shared copy.
_ONE_COPY = (
    "the ranks share one copy of the model and the optimizer's state; to give each its own, run with --plan and a copy "
    "of this run's plan.toml in which [memory] shared = false"
)


@dataclass(frozen=True, kw_only=True)
class Engine(TrainingParts):
    """Parts of a run on one rank."""

    num_train_samples: int | None
    notes: tuple[str, ...] = ()
    unseeded: tuple[str, ...] = ()  # the notes about initial values
    taken: TakenWeights | None = None  # initial weights from elsewhere, if any

    @property
    def num_parameters(self) -> int:
        """Number of elements of all parameters, each parameter once."""
        return sum(math.prod(shape) for shape in self.sharded_model.shapes().values())

    def load(self) -> tuple[RunState | None, list[str]]:
        """Load the newest intact checkpoint. Return its state and lines on damaged files. Collective: all ranks."""
        self.keeper.clean()  # not at a rollback, when a checkpoint may still be in transit
        return self.keeper.load(self.first_state().loss_scale)

    def rehearse(self) -> str | None:
        """Compute the first chunks of an evaluation, so that its errors appear before the first step.

        Skipped if blocks are compiled, since a rehearsal would compile them for another shape. Return a line for people
        if each of several metrics runs the model again, otherwise None. Collective: all ranks.
        """
        if self.plan.execution.compile != "none":
            return None
        calls: list[None] = []
        handle = self.model.register_forward_pre_hook(lambda model, args: calls.append(None))
        began = time.perf_counter()
        try:
            self.evaluator.rehearse(self.model)
        finally:
            handle.remove()
        self.strategy.rest()
        self.computer.look_seconds += time.perf_counter() - began
        count = len(calls) // max(1, len(self.job.evaluation_sets))
        if len(self.job.metrics) < _MANY_METRICS or count <= len(self.job.metrics):
            return None
        return (
            f"evaluation: the loss and each of {len(self.job.metrics)} metrics run the model again, {count} forwards "
            "for each batch"
        )

    def trainer(self, state: RunState | None, num_steps: int, around: Surroundings, records: RecordWriter) -> Trainer:
        """Return the trainer, which resumes from `state`, or starts at the first step if it is None."""
        self.introduce_callbacks(num_steps, around)
        return Trainer(self, around, state or self.first_state(), num_steps, records)

    def introduce_callbacks(self, num_steps: int, around: Surroundings) -> None:
        """Pass the facts about the run, which ends after `num_steps` steps, to the callbacks."""
        known = (self.job, self.plan, self.mesh.rank, self.plan.degrees.world_size, num_steps)
        facts = RunFacts(*known, around.out, around.settings, around.description)
        build, optimizer = functools.partial(make_model, self.job), self.updater.optimizer
        self.callbacks.begin(facts, self.sharded_model, optimizer, build, note=around.note, events=around.events)

    def first_state(self) -> RunState:
        """Return the state before the first step."""
        scale = LossScale.of(self.plan.precision.loss_scale, self.precision.compute)
        return RunState(loss_scale=scale, grains=self.job.grains)

    def close(self) -> None:
        """Stop threads and worker processes, and remove the strategy's hooks."""
        self.strategy.close()
        self.keeper.close()
        self.loader.close()


@dataclass(frozen=True)
class Options:
    """Options of a run. Only `initial_weights` changes the results.

    `checkpoints`: the checkpoints' directory, None to write none. `keep_checkpoints`: maximum number of them, None for
    all. `saved`: file with the newest checkpoint's step. `fence`: right of the ranks' generation to write. `remote`:
    place of the checkpoints outside the directory. `eval_samples`: maximum number of samples in an evaluation, None for
    all. `take_workers`: a DataLoader's num_workers sets data.workers. `may_copy`: a job that needs copies ignores
    memory.shared = true. `chooses_format`: the engine chooses execution.channels_last. `heartbeat`: read by the
    launcher. `initial_weights`: replace the values from the job's model(). `callbacks`: the job's callbacks in a run,
    none in a verification or measurement. `bad_samples`: maximum number of unreadable samples to skip.
    `check_replicas`: number of steps between checks of replicas. `compares_replicas`: whether replicas are compared
    after the first steps and the last step. `mtbf_seconds`: mean time between losses of ranks, None if none was lost.
    `listener`: receives the steps' spans and microbatches. `checks_seed`: rank 0 constructs a small model twice, to
    detect initial values that do not follow from the job's seed. `drawn_at_import`: such values include tensors that
    were made before the call of model().
    """

    checkpoints: Path | None = None
    saved: Path | None = None
    fence: Fence = field(default_factory=Fence)
    remote: RemotePlace | None = None
    checkpoint_every: int | None = None
    keep_checkpoints: int | None = 3
    telemetry: bool = True
    eval_samples: int | None = None
    take_workers: bool = False
    may_copy: bool = False
    chooses_format: bool = False
    initial_weights: InitialWeights | None = None
    callbacks: Sequence[Callback] = ()
    observer: Observer = field(default_factory=Observer)
    listener: StepListener | None = None
    checks_seed: bool = False
    drawn_at_import: bool = True
    bad_samples: int = 0
    check_replicas: int | None = None
    compares_replicas: bool = True
    mtbf_seconds: float | None = None
    heartbeat: Heartbeat = field(default_factory=lambda: Heartbeat(None))


def build(job: Job, plan: CompletePlan, mesh: Mesh, options: Options) -> Engine:
    """Build the engine of a run. Raises: errors of the job's parts on any rank, on all ranks. Collective: all ranks."""
    precision = Precision.of(plan.precision, mesh.device, plan.execution.channels_last)
    job = together(mesh, lambda: with_grains(opened(job)))
    data: Opened = replace(job.train_data, bad_samples=options.bad_samples)
    together(mesh, lambda: _judge(data, plan, mesh))
    plan, notes = _with_workers(plan, data, options)
    seen: list[str] = []
    if options.checks_seed and plan.divides_model:
        seen = together(mesh, lambda: look_at_whole(job, plan, options) if mesh.rank == 0 else [])
    sharded_model, pipeline, unseeded = _hold(job, plan, mesh, precision, data, options=options)
    unseeded = (*unseeded, *seen)
    if options.chooses_format and not (plan.execution.exact or plan.divides_model):
        chosen = agreed_format(job, sharded_model, precision, data)
        plan = plan.with_format(channels_last=chosen.channels_last)
        precision, notes = replace(precision, channels_last=chosen.channels_last), (*notes, *chosen.notes)
    taken = _taken(options, sharded_model)
    model, divided = sharded_model.model, sharded_model.divided
    together(mesh, lambda: _refuse_dtypes(sharded_model))
    together(mesh, lambda: compile_blocks(model, plan, precision, pipeline))
    parameters = together(mesh, lambda: Parameters(model))
    optimizer = together(mesh, lambda: _optimizer(job, parameters, sharded_model, plan))
    together(mesh, lambda: _take_hooks(sharded_model, plan))  # the optimizer's function may have registered some
    left = without_optimizer([optimizer], parameters.named)
    plan, sharded_model, copied = _with_copies(plan, sharded_model, (job, optimizer), options)
    clock = StepClock(mesh.device, options.telemetry, options.heartbeat, options.listener)
    strategy = assemble(plan, sharded_model, parameters, job.num_grains, clock.mark)
    updates = _of_first_server(plan, parameters) if plan.serves else strategy.update_division.updates
    together(mesh, lambda: refuse_divided_steps(optimizer, job.optimizer, sharded_model, updates))
    # Before any checkpoint is loaded: the schedule multiplies the optimizer's own learning rates.
    stepper = Stepper(optimizer, job, exact=plan.execution.exact, captured=plan.execution.cuda_graph)
    updater = Updater(optimizer, job, options.observer, strategy, sharded_model, stepper=stepper)
    evaluate = pipeline.evaluate if pipeline is not None else None
    computed = {"divided": divided, "syncs_every_microbatch": strategy.syncs_every_microbatch, "evaluate": evaluate}
    evaluations, said = _evaluations(job, mesh, options, precision=precision, **computed)
    order = order_of(data, job, job.length, job.shuffle is not False)
    loader = together(mesh, lambda: _loader(job, plan, mesh, data, order))
    policy = MicrobatchPolicy.of(job, plan.batch.grains_per_microbatch)
    compiles = plan.execution.compile != "none"
    how: dict[str, Any] = {"cut": plan.shards_model, "exact": plan.execution.exact, "compiles": compiles}
    how["writing"] = sharded_model.division.writing
    how["gathers"] = plan.shards_model and plan.layout.tensor * plan.layout.context * plan.layout.pipeline == 1
    callbacks = together(mesh, lambda: CallbackCalls(options.callbacks, mesh))
    computer = LossComputer(job, model, precision, policy, evaluate, divided=divided, **how)
    computer.evaluation = None if compiles else functools.partial(evaluations.first_sums, model)
    shares, kept = plan.shares_memory, callbacks or None
    trained = Trained(sharded_model, optimizer, loader, strategy, callbacks=kept, has_one_copy=shares)
    return Engine(
        job=job,
        plan=plan,
        mesh=mesh,
        precision=precision,
        model=model,
        sharded_model=sharded_model,
        pipeline=pipeline,
        parameters=parameters,
        strategy=strategy,
        computer=computer,
        buffers=_buffers(job, plan, sharded_model, order if isinstance(data.source, MapSource) else None),
        updater=updater,
        loader=loader,
        order=order,
        evaluator=evaluations,
        keeper=_keeper(mesh, trained, options),
        replicas=_replica_check(mesh, sharded_model, updater, plan, options),
        callbacks=callbacks,
        clock=clock,
        observer=options.observer,
        num_train_samples=order.num_samples if isinstance(data.source, MapSource) else None,
        unseeded=unseeded,
        notes=(*notes, *unseeded, *said, *copied, *left, *_notes(data, mesh, options, shared=shares)),
        taken=taken,
    )


def look_at_whole(job: Job, plan: CompletePlan, options: Options) -> list[str]:
    """Raise the JobError that a run of one process would raise before its first step, if the model is small.

    A rank of a divided model sees the state of its own part, and computes no gradient alone. So a child process builds
    the whole model and looks at it. Other errors of the child are left to the run. Return what the look says of initial
    values, and of a loss that is no sum over grains.
    """
    if plan.execution.compile != "none" or not isinstance(job.train_data.source, MapSource):
        return []

    def work() -> dict[str, Any]:
        notes: list[str] = []
        model = outline(job)
        if model is None or sum(p.numel() for p in model.parameters()) > _MOST_WHOLE:
            return {}
        torch.set_num_threads(1)  # a forked child has no OpenMP threads
        exact = Plan(execution=ExecutionSection(exact=plan.execution.exact))
        own = Options(telemetry=False, checks_seed=True, drawn_at_import=options.drawn_at_import)
        try:
            with own_collectives_refused("the model or loss"):  # the child has the ranks' process group, too
                one = build(job, judged(job, exact).plan, alone(torch.device("cpu")), own)
                one.rehearse()
                runner = StepRunner(one, one.loader, notes.append)
                runner.probe.before_step(runner.fetch(0))
        except JobError as error:
            return {"refusal": {"given": error.given, "conflict": error.conflict, "remedy": error.remedy}}
        return {"notes": [*one.unseeded, *(note for note in notes if note.startswith("grain by grain"))]}

    seen = look_in_child(work, _WHOLE_SECONDS) or {}
    if "refusal" in seen:
        raise JobError(**seen["refusal"])
    return list(seen.get("notes", ()))


def _buffers(job: Job, plan: CompletePlan, sharded_model: ShardedModel, order: Order | None) -> StepBuffers:
    """Return the buffers that a step may change. `order`: set if the grains of each step are known ahead."""
    found = StepBuffers(
        sharded_model.model,
        sharded_model.counts_buffer,
        declared=job.buffers,
        slots=plan.layout.data * plan.layout.shard,
        last_grain=(lambda step: order.grains(step)[-1].index) if order is not None else None,
    )
    found.move(sharded_model.mesh.data_rank)
    return found


def _notes(data: Opened, mesh: Mesh, options: Options, *, shared: bool) -> Iterator[str]:
    if options.bad_samples and not isinstance(data.source, MapSource):
        yield f"--bad-samples {options.bad_samples}: no effect, since a stream has no other sample for the place"
    if options.mtbf_seconds is not None and options.checkpoint_every is None:
        yield f"a rank was lost every {options.mtbf_seconds:.0f} s: checkpoints come as often as that makes worth while"
    if options.check_replicas and shared and mesh.layout.data > 1:
        yield f"--check-replicas {options.check_replicas}: no effect, since the ranks share one copy of the model"
    if options.check_replicas and mesh.layout.data == 1:
        yield f"--check-replicas {options.check_replicas}: no effect, since no two ranks have the same of the model"


def _replica_check(
    mesh: Mesh, sharded_model: ShardedModel, updater: Updater, plan: Plan, options: Options
) -> ReplicaCheck:
    repeats = plan.execution.exact or mesh.device.type == "cpu"
    one_copy = plan.shares_memory or not options.compares_replicas
    return ReplicaCheck(mesh, sharded_model, updater, options.check_replicas, repeats=repeats, one_copy=one_copy)


def _optimizer(job: Job, parameters: Parameters, sharded_model: ShardedModel, plan: Plan) -> torch.optim.Optimizer:
    optimizer = build_optimizer(job.optimizer, parameters)
    refuse_on_parts(optimizer, sharded_model)
    if plan.serves:
        refuse_served(optimizer)
    return optimizer


def _of_first_server(plan: Plan, parameters: Parameters) -> Callable[[nn.Parameter], bool]:
    """Return a predicate for parameters that the first parameter server updates."""
    from shoal.parallel.data.pushed import divide_parameters

    sizes = {name: p.nbytes for name, p in parameters.named}
    names = set(divide_parameters(sizes, plan.server.num_servers)[0])
    own = {id(p) for name, p in parameters.named if name in names}
    return lambda parameter: id(parameter) in own


def _take_hooks(sharded_model: ShardedModel, plan: Plan) -> None:
    sharded_model.hooks.take(sharded_model.model)
    refuse_hooks(sharded_model.hooks, sharded_model.division.parts, plan)


def _with_copies(
    plan: CompletePlan, sharded_model: ShardedModel, made: tuple[Job, torch.optim.Optimizer], options: Options
) -> tuple[CompletePlan, ShardedModel, list[str]]:
    """Give each rank a copy of the parameters if a shared copy cannot work. Return the plan, the model and notes.

    Raises: JobError if the user requests a shared copy that the job does not allow.
    Collective: all ranks, JSON gathers if the plan shares one copy.
    """
    if not plan.shares_memory:
        return plan, sharded_model, []
    mesh, model, (job, optimizer) = sharded_model.mesh, sharded_model.model, made
    lacking = need_here()
    need = lacking or copy_need(model, optimizer, job.callbacks, [*sharded_model.hooks.by_name])
    # The plan may come from another machine.
    if not options.may_copy and not any(mesh.gather_json(lacking is not None)):
        together(mesh, lambda: need.refuse() if need is not None else None)
        return plan, sharded_model, []
    if need is None and options.check_replicas:
        need = CopyNeed("--check-replicas", "it compares the copies")
    told = mesh.gather_json([None if need is None else f"{need.what}: {need.why}", is_small(model)])
    why = next((why for why, _ in told if why is not None), None)
    if why is None and not any(small for _, small in told):
        return plan, sharded_model, [_ONE_COPY]
    # No note about a small model, unless the user's plan requests the shared copy.
    is_untold = why is None or (told[0][1] and options.may_copy)
    notes = [] if is_untold else [f"each rank has a copy of the model and the optimizer's state: {why}"]
    return plan.with_copies, ShardedModel(mesh, model, hooks=sharded_model.hooks), notes


def _evaluations(job: Job, mesh: Mesh, options: Options, **how: Any) -> tuple[EvaluationSets, list[str]]:
    """Build the evaluation of the job's sets, with notes. `how`: arguments of an Evaluator. Collective: all ranks."""
    data = together(mesh, lambda: open_evaluations(job))
    how |= {"most_samples": options.eval_samples, "heartbeat": options.heartbeat}
    functions = {"loss": job.loss, **job.metrics}
    by_name = {
        name: Evaluator(job, mesh, data=own, metrics=functions, name=said_of(name), **how) for name, own in data.items()
    }
    return EvaluationSets(by_name), [note for own in data.values() for note in own.notes]


def _keeper(mesh: Mesh, trained: Trained, options: Options) -> Keeper:
    folder = options.checkpoints
    mark = NewestMark(options.saved, options.fence)
    own = (options.keep_checkpoints, mark, options.fence, options.remote)
    store = Store(folder, *own) if folder is not None else None
    return Keeper(mesh, store, trained, options.checkpoint_every, options.mtbf_seconds)


def _judge(data: Opened, plan: Plan, mesh: Mesh) -> None:
    """Check the data against the plan, and warn about settings without effect. Raises: PlanError."""
    source = data.source
    if plan.execution.cuda_graph:
        refuse_uncapturable(mesh.device, mapped=isinstance(source, MapSource))
    if not isinstance(source, MapSource):
        if plan.shards_model:
            raise no_lockstep()
        reason = "a stream is read by the rank itself"
        idle = f"data.workers = {plan.data.workers}: no effect, since {reason}" if plan.data.workers else ""
    elif plan.execution.channels_last and mesh.rank == 0:
        leaves = tree_leaves(small_batch(source, data.collate, data.bad_samples))
        pictured = any(isinstance(leaf, torch.Tensor) and leaf.ndim == 4 for leaf in leaves)
        reason = "no input is a batch of images, [batch, channels, height, width]"
        idle = "" if pictured else f"execution.channels_last = true: no effect, since {reason}"
    else:
        return
    if idle and mesh.rank == 0:
        warn_of([idle])


class _ModelOfRank(NamedTuple):
    model: ShardedModel
    pipeline: Pipeline | None = None
    notes: tuple[str, ...] = ()  # about the origin of its initial values


def _hold(job: Job, plan: Plan, mesh: Mesh, precision: Precision, data: Opened, *, options: Options) -> _ModelOfRank:
    """Build the model, or this rank's part of it, with the job's initial values. Collective: all ranks."""
    compare_data(mesh, data.source, plan.data.workers)
    if plan.divides_model:
        key = random_key(job.seed, "initial values")
        pair = LossPair(job.loss, precision)
        batch = functools.partial(small_batch, data.source, data.collate, data.bad_samples)
        made = ModelSource(functools.partial(make_model, job), key, job.loss, pair, batch)
        held = collectively(mesh, True, lambda: divide(made, plan, mesh, precision))
        clear_caches({"model": job.model, "loss": job.loss})  # model() and proofs have filled them
        return _ModelOfRank(*held)
    mesh = mapped(plan, mesh)
    make = functools.partial(seeded_model, job)
    checks = options.checks_seed and mesh.rank == 0
    model, notes = together(mesh, lambda: construct_twice(make, options.drawn_at_import) if checks else (make(), ()))
    model = together(mesh, lambda: precision.apply(model.to(precision.device)))
    hooks = ParameterHooks(model)
    together(mesh, lambda: recompute(model, plan.memory.recompute))
    compare_models(mesh, model)
    unlike = unlike_ranks(mesh, model) if options.checks_seed else []
    mesh.broadcast([t.detach() for t in (*model.parameters(), *model.buffers())])
    whole_model = ShardedModel(mesh, model, divides_state=plan.divides_state, hooks=hooks)
    return _ModelOfRank(whole_model, notes=tuple(notes or unlike))


def _taken(options: Options, sharded_model: ShardedModel) -> TakenWeights | None:
    """Load initial weights from elsewhere, before other code, such as an optimizer, copies the parameters."""
    wanted = options.initial_weights
    return take_weights(wanted, sharded_model) if wanted is not None else None


def _refuse_dtypes(sharded_model: ShardedModel) -> None:
    """Refuse parameters and buffers of a dtype that checkpoints and traces cannot store. Raises: JobError."""
    named = ((name, t.dtype) for name, (_, t) in sharded_model.tensors().items())
    found = next(((name, dtype) for name, dtype in named if dtype not in DTYPE_NAMES), None)
    if found is not None:
        raise JobError(
            given=f"{found[0]} in {str(found[1]).removeprefix('torch.')}",
            conflict="safetensors, the format of checkpoints, has no such dtype",
            remedy="use another, as complex64, or of complex128 its torch.view_as_real in float64",
        )


def build_model(job: Job, precision: Precision) -> nn.Module:
    """Build the job's model from the seed, on the device in the plan's dtype. Raises: as `make_model`."""
    return precision.apply(seeded_model(job).to(precision.device))


def seeded_model(job: Job) -> nn.Module:
    """Build the job's model with initial values from the seed. Raises: as `make_model`."""
    seed_everything(random_key(job.seed, "initial values"))
    return make_model(job)


def make_model(job: Job) -> nn.Module:
    """Build the job's model on one thread, so that its bits are always identical. Raises: UserCodeError, JobError."""
    try:
        with one_thread(), unwrapped():
            model = adapted(job.model())
    except ShoalError:
        raise
    except Exception as error:
        raise user_error("model()", error) from error
    if not isinstance(model, nn.Module):
        raise JobError(
            given=f"model() returned {type(model).__name__}",
            conflict="the engine trains a torch.nn.Module",
            remedy="return the module",
        )
    refuse_wrapped(model)
    with one_thread():
        return whole(model, job)


def _with_workers(plan: CompletePlan, data: Opened, options: Options) -> tuple[CompletePlan, tuple[str, ...]]:
    """Return the plan with a DataLoader's number of workers, unless the user set one, and notes on the data."""
    wanted, have = data.workers, plan.data.workers
    if wanted is None or wanted == have or not isinstance(data.source, MapSource):
        return plan, data.notes
    if options.take_workers and not plan.serves:
        return plan.with_workers(wanted), data.notes
    said = f"train_data: num_workers={wanted} has no effect: the plan has data.workers = {have}"
    return plan, (*data.notes, said)


def _loader(job: Job, plan: Plan, mesh: Mesh, data: Opened, order: Order) -> Loader:
    given = f"length={job.length} with a stream as train_data"
    refuse_epochs(data, job.length, given, "write length=shoal.Steps(...) or shoal.Samples(...)")
    return loader_of(data, order, mesh, plan.data.workers)
