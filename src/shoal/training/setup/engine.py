"""Engine: construction of a run's parts on one rank, from a Job, a complete Plan and a Mesh."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shoal.checkpoint.initial import TakenWeights, take_weights
from shoal.checkpoint.keeper import Keeper, RunState, Trained
from shoal.checkpoint.places import RemotePlace
from shoal.checkpoint.store import NewestMark, Store
from shoal.checkpoint.tensor_file import DTYPE_NAMES
from shoal.checkpoint.whole_optimizer import parts
from shoal.data.loader import Loader, no_lockstep
from shoal.data.source import MapSource, Opened, open_evaluations, opened, order_of, refuse_epochs, said_of, small_batch
from shoal.data.stream import loader_of
from shoal.distributed.mesh import Mesh, alone, collectively, together
from shoal.distributed.own_collectives import own_collectives_refused
from shoal.errors import JobError, PlanError
from shoal.jobs.job import Job
from shoal.launch.supervise.child import look_in_child
from shoal.launch.supervise.heartbeat import Heartbeat
from shoal.numerics.batch_statistics import StepBuffers
from shoal.numerics.outputs import evaluated_functions, microbatch_loss
from shoal.numerics.precision import LossScale, Precision
from shoal.numerics.python_state import clear_caches
from shoal.parallel.assemble import ModelSource, assemble, divide, mapped
from shoal.parallel.blocks.compiled import compile_blocks
from shoal.parallel.blocks.narrow_products import in_precision
from shoal.parallel.blocks.recompute import recompute
from shoal.parallel.data.sparse_rows import shared_tables, sparse_parameters, why_dense
from shoal.parallel.model.adapters.quantized import notes_on
from shoal.parallel.model.parameter_hooks import ParameterHooks, refuse_hooks
from shoal.parallel.model.sharded_model import ShardedModel
from shoal.plans.grains import random_key
from shoal.plans.legal import conflicts, refuse
from shoal.plans.plan import ExecutionSection, Plan
from shoal.plans.resolve import CompletePlan, warn_of
from shoal.runs.directory import Fence
from shoal.runs.options import InitialWeights
from shoal.training.callbacks.base import Callback, RunFacts
from shoal.training.callbacks.calls import CallbackCalls
from shoal.training.loop.captured_step import RECORDERS, refuse_uncapturable
from shoal.training.loop.replicas import ReplicaCheck
from shoal.training.loop.step_modes import RunTrial
from shoal.training.loop.trainer import Trainer, TrainingParts
from shoal.training.microbatch.evaluation import EvaluationSets, Evaluator
from shoal.training.microbatch.global_norm import GlobalNorm
from shoal.training.microbatch.loss_pair import LossPair
from shoal.training.microbatch.policy import MicrobatchPolicy
from shoal.training.microbatch.step import LossComputer, StepRunner
from shoal.training.observe.metering import StepMeter, optimizer_shape
from shoal.training.observe.step_records import RecordWriter, Surroundings
from shoal.training.observer import Observer, StepClock, StepListener
from shoal.training.setup.choices import choose
from shoal.training.setup.job_model import construct_twice, make_model, outline, seeded_model, unlike_ranks, with_grains
from shoal.training.setup.memory_check import refuse_too_large
from shoal.training.setup.preflight import compare_data, compare_models, facts_of_job, judged
from shoal.training.update.closure import needs_closure
from shoal.training.update.job_optimizer import (
    Parameters,
    build_optimizer,
    refuse_served,
    refuse_sparse,
    unsuited,
    without_optimizer,
)
from shoal.training.update.matrix_owners import MatrixOwners
from shoal.training.update.optimizer_step import Stepper, Updater
from shoal.training.update.optimizer_trial import needing_whole, refuse_divided_steps

if TYPE_CHECKING:
    from shoal.parallel.pipeline.pipeline import Pipeline

# Maximum number of elements of a divided model for a look at the whole model in one process, and its time limit.
_MOST_WHOLE, _WHOLE_SECONDS = 1 << 22, 10.0
# Bytes of a table with sparse gradients whose dense state is worth a note.
_LARGE_TABLE = 1 << 28
# Runs with at least this number of metrics report the metrics' cost.
_MANY_METRICS = 3


@dataclass(frozen=True, kw_only=True)
class Engine(TrainingParts):
    """Parts of a run on one rank."""

    num_train_samples: int | None
    notes: tuple[str, ...] = ()
    unseeded: tuple[str, ...] = ()  # the notes about initial values
    initial_weights: TakenWeights | None = None  # from elsewhere, if any

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

        Return a line for people if each of several metrics runs the model again, otherwise None. Collective: all ranks.
        """
        calls: list[None] = []
        handle = self.model.register_forward_pre_hook(lambda model, args: calls.append(None))
        began = time.perf_counter()
        try:
            with self.computer.regions.disabled():
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
            "for each batch. A function may return several: metrics={('a', 'b'): function}"
        )

    def trainer(
        self,
        state: RunState | None,
        num_steps: int,
        around: Surroundings,
        records: RecordWriter,
        trial: RunTrial | None = None,
    ) -> Trainer:
        """Return the trainer, which resumes from `state`, or starts at the first step if it is None."""
        self.introduce_callbacks(num_steps, around)
        return Trainer(self, around, state or self.first_state(), num_steps, records, trial=trial)

    def introduce_callbacks(self, num_steps: int, around: Surroundings) -> None:
        """Pass the facts about the run, which ends after `num_steps` steps, to the callbacks."""
        known = (self.job, self.plan, self.mesh.rank, self.plan.layout.world_size, num_steps)
        facts = RunFacts(*known, around.out, around.settings, around.description)
        build, optimizer = functools.partial(make_model, self.job), self.updater.optimizer
        self.callbacks.begin(facts, self.sharded_model, optimizer, build, note=around.note, events=around.events)

    def first_state(self) -> RunState:
        """Return the state before the first step."""
        scale = LossScale.of(self.plan.precision.loss_scale, self.precision.compute)
        return RunState(loss_scale=scale, grains=self.job.grains)

    def close(self) -> None:
        """Stop threads and worker processes, and remove the hooks of the meter and the strategy."""
        if isinstance(self.observer, StepMeter):
            self.observer.close()
        self.strategy.close()
        self.keeper.close()
        self.loader.close()


@dataclass(frozen=True)
class Options:
    """Options of a run. Only `initial_weights` changes the results.

    `checkpoints`: the checkpoints' directory, None to write none. `keep_checkpoints`: maximum number of them, None
    for all. `saved`: file with the newest checkpoint's step. `fence`: right of the ranks' generation to write.
    `remote`: place of the checkpoints outside the directory. `eval_samples`: maximum number of samples in an
    evaluation, None for all. `take_workers`: a DataLoader's num_workers sets data.workers. `may_copy`: a job that
    needs copies ignores memory.shared = true. `heartbeat`: read by the launcher. `initial_weights`: replace the
    values from the job's model(). `callbacks`: the job's callbacks in a run, none in a verification or measurement.
    `bad_samples`: maximum number of unreadable samples to skip. `check_replicas`: number of steps between checks of
    replicas. `compares_replicas`: whether replicas are compared after the first steps and the last step.
    `mtbf_seconds`: mean time between losses of ranks, None if none was lost. `meters`: the engine measures traffic
    and memory of the first steps, and ignores `observer`. `listener`: receives the steps' spans and microbatches.
    `checks_seed`: rank 0 constructs a small model twice, to detect initial values that do not follow from the job's
    seed. `drawn_at_import`: such values include tensors that were made before the call of model().
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
    initial_weights: InitialWeights | None = None
    callbacks: Sequence[Callback] = ()
    observer: Observer = field(default_factory=Observer)
    meters: bool = False
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

    # 1. Data.
    def open_data() -> tuple[Job, Opened]:
        ready = opened(job)
        if ready.grains is None:
            ready = with_grains(ready)
        data = replace(ready.train_data, bad_samples=options.bad_samples)
        _check_data(ready, data, plan, mesh)
        return ready, data

    job, data = together(mesh, open_data)
    if job.outputs is not None or job.batch_norm == "batch":  # also of plans that were judged without their job
        refuse(conflicts(plan, facts_of_job(job)))
    mapped_source = data.source if isinstance(data.source, MapSource) else None
    workers = plan.data.workers  # this rank's proposal
    if options.take_workers and not plan.serves and mapped_source is not None and data.workers is not None:
        workers = data.workers
    seen: list[str] = []
    if options.checks_seed and plan.divides_model:
        seen = together(mesh, lambda: look_at_whole(job, plan, options) if mesh.rank == 0 else [])
    compare_data(mesh, data.source, workers)

    # 2. Model and optimizer.
    precision = Precision.of(plan.precision, mesh.device, plan.execution.channels_last)
    sharded_model, pipeline, unseeded = _build_model(job, plan, mesh, precision, data, options=options)
    unseeded = (*unseeded, *seen)
    model, divided = sharded_model.model, sharded_model.divided
    # Before other code, such as an optimizer, copies the parameters.
    initial = options.initial_weights
    initial_weights = take_weights(initial, sharded_model) if initial is not None else None
    parameters, optimizer = together(mesh, lambda: _build_optimizer(job, plan, sharded_model))
    if needs_closure(optimizer):
        refuse(conflicts(plan, replace(facts_of_job(job), has_closure=True)))
    clock = StepClock(mesh.device, options.telemetry, options.heartbeat, options.listener)
    matrix_owners = None
    if divided and mesh.layout.shard * mesh.layout.tensor * mesh.layout.expert > 1:
        whole = together(mesh, lambda: needing_whole(optimizer, job.optimizer, sharded_model))
        together(mesh, lambda: _refuse_whole_experts(optimizer, set(whole) & sharded_model.division.experts))
        if names := set().union(*mesh.gather_json(whole)):
            matrix_owners = MatrixOwners(sharded_model, names, clock.mark)
            optimizer = matrix_owners.build(job.optimizer)

    # 3. Choices: the complete plan of this run.
    requested = plan
    plan, notes, copies_notes = choose(
        requested,
        job,
        sharded_model,
        optimizer,
        data=data,
        workers=workers,
        may_copy=options.may_copy,
        checks_replicas=bool(options.check_replicas),
    )
    if requested.shares_memory and not plan.shares_memory:
        sharded_model = ShardedModel(sharded_model.mesh, model, hooks=sharded_model.hooks)

    # 4. Step: strategy, update and loss.
    exact = plan.execution.exact
    sparse, dense_for = sparse_parameters(model), why_dense(plan)
    if sparse and plan.execution.compile != "none":
        raise PlanError(
            given=f'execution.compile = "{plan.execution.compile}" with {next(iter(sparse))}, whose gradient is sparse',
            conflict="torch compiles no backward with a sparse gradient",
            remedy="write --step eager, or build the embedding with sparse=False",
        )
    regions = together(mesh, lambda: compile_blocks(model, plan, precision, pipeline, job.loss))
    regions.notice = clock.heartbeat.forget
    tables = sparse if dense_for is None else {}
    together(mesh, lambda: refuse_sparse(optimizer, parameters.named, tables, dense_for if sparse else None))
    strategy = assemble(plan, sharded_model, parameters, job.num_grains, clock.mark, sparse=list(tables.values()))
    updated = {id(p) for p in parameters if strategy.update_division.updates(p)}
    if plan.serves:  # what the first parameter server updates
        from shoal.parallel.data.pushed import divide_parameters

        names = set(divide_parameters({name: p.nbytes for name, p in parameters.named}, plan.server.num_servers)[0])
        updated = {id(p) for name, p in parameters.named if name in names}

    def check_states() -> None:
        refuse_divided_steps(optimizer, job.optimizer, sharded_model, lambda p: id(p) in updated)
        refuse_too_large(plan, strategy, parameters, optimizer, mesh.device)

    together(mesh, check_states)
    # Before any checkpoint is loaded: the schedule multiplies the optimizer's own learning rates.
    observer = StepMeter() if options.meters else options.observer
    stepper = Stepper(optimizer, job, exact=exact, narrow=mesh.device.type in RECORDERS and not exact)
    updater = Updater(optimizer, job, observer, strategy, sharded_model, stepper=stepper, matrix_owners=matrix_owners)
    order = order_of(data, job, job.length)
    if job.sampler is not None and job.sampler.unequal and (plan.layout.pipeline > 1 or plan.serves):
        raise JobError(
            given="sampler=shoal.TokenBudget(...), and a plan with pipeline stages or servers",
            conflict="their microbatches have equal numbers of samples",
            remedy="use another layout, or shoal.ByLength(lengths) with a global_batch",
        )
    buffers = StepBuffers(
        model,
        sharded_model.counts_buffer,
        declared=job.buffers,
        slots=plan.layout.data * plan.layout.shard,
        slot=sharded_model.mesh.data_rank,
        # Only with mapped data the grains of each step are known ahead.
        last_grain=(lambda step: order.grains(step)[-1].index) if mapped_source is not None else None,
    )
    evaluate = pipeline.evaluate if pipeline is not None else None
    computer = LossComputer(
        job,
        model,
        precision,
        MicrobatchPolicy.of(job, plan.batch.grains_per_microbatch),
        evaluate,
        divided=divided,
        cut=plan.shards_model,
        exact=exact,
        regions=regions,
        writing=sharded_model.division.writing,
        gathers=plan.shards_model and plan.layout.tensor * plan.layout.context * plan.layout.pipeline == 1,
        norm=GlobalNorm(mesh) if job.batch_norm == "batch" and mesh.world_size > 1 else None,
    )

    # 5. Around the step: evaluation, reading, callbacks, checkpoints.
    evaluation_data = together(mesh, lambda: open_evaluations(job))
    evaluator = EvaluationSets(
        {
            name: Evaluator(
                job,
                mesh,
                precision,
                own,
                evaluated_functions(job),
                name=said_of(name),
                divided=divided,
                syncs_every_microbatch=strategy.syncs_every_microbatch,
                evaluate=evaluate,
                most_samples=options.eval_samples,
                heartbeat=options.heartbeat,
            )
            for name, own in evaluation_data.items()
        }
    )
    computer.evaluation = functools.partial(evaluator.first_sums, model)

    def open_loader() -> Loader:
        given = f"length={job.length} with a stream as train_data"
        refuse_epochs(data, job.length, given, "write length=shoal.Steps(...) or shoal.Samples(...)")
        return loader_of(data, order, mesh, plan.data.workers)

    loader = together(mesh, open_loader)
    callbacks = together(mesh, lambda: CallbackCalls(options.callbacks, mesh))
    shares = plan.shares_memory
    trained = Trained(
        sharded_model,
        optimizer,
        loader,
        strategy,
        callbacks=callbacks.for_checkpoints if callbacks else None,
        has_one_copy=shares,
    )
    mark, store = NewestMark(options.saved, options.fence), None
    if options.checkpoints is not None:
        store = Store(options.checkpoints, options.keep_checkpoints, mark, options.fence, options.remote)
    notes = (
        *notes,
        *unseeded,
        *(note for own in evaluation_data.values() for note in own.notes),
        *copies_notes,
        *without_optimizer([optimizer], parameters.named),
        *(f"{name}: its gradient is dense in spite of sparse=True, with {dense_for}" for name in sparse if dense_for),
        *shared_tables(model, sparse),
        *_notes_on_tables(tables, optimizer),
        *notes_on(model),
        *unsuited(optimizer, model),
        *(
            ["the gradient is clipped in each evaluation of LBFGS, whose line search expects that of the loss"]
            if isinstance(optimizer, torch.optim.LBFGS) and (job.clip_norm is not None or job.clip_value is not None)
            else ()
        ),
    )
    # Options that have no effect, or another one.
    if options.bad_samples and mapped_source is None:
        notes += (f"--bad-samples {options.bad_samples}: no effect, since a stream has no other sample for the place",)
    if options.mtbf_seconds is not None and options.checkpoint_every is None:
        often = "checkpoints come as often as that makes worth while"
        notes += (f"a rank was lost every {options.mtbf_seconds:.0f} s: {often}",)
    if options.check_replicas and (shares or mesh.layout.data == 1):
        one_copy = "the ranks share one copy of the model"
        why = one_copy if mesh.layout.data > 1 else "no two ranks have the same of the model"
        notes += (f"--check-replicas {options.check_replicas}: no effect, since {why}",)
    engine = Engine(
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
        buffers=buffers,
        updater=updater,
        loader=loader,
        order=order,
        evaluator=evaluator,
        keeper=Keeper(mesh, store, trained, options.checkpoint_every, options.mtbf_seconds),
        replicas=ReplicaCheck(
            mesh,
            sharded_model,
            updater,
            options.check_replicas,
            repeats=exact or mesh.device.type == "cpu",
            one_copy=shares or not options.compares_replicas,
            divides_experts=strategy.update_division.divides_experts,
        ),
        callbacks=callbacks,
        clock=clock,
        observer=observer,
        num_train_samples=order.num_samples if mapped_source is not None else None,
        unseeded=unseeded,
        notes=notes,
        initial_weights=initial_weights,
    )
    if isinstance(observer, StepMeter) and options.meters:
        stage_groups = pipeline.messages.groups if pipeline is not None else []
        observer.attach(sharded_model, optimizer, strategy, stage_groups)
    return engine


def _build_optimizer(job: Job, plan: Plan, sharded_model: ShardedModel) -> tuple[Parameters, torch.optim.Optimizer]:
    """Return the trainable parameters and their optimizer.

    Raises: JobError for what checkpoints, the layout or the servers of the plan cannot have.
    """
    for name, (_, tensor) in sharded_model.tensors().items():
        if tensor.dtype not in DTYPE_NAMES:
            raise JobError(
                given=f"{name} in {str(tensor.dtype).removeprefix('torch.')}",
                conflict="safetensors, the format of checkpoints, has no such dtype",
                remedy="use another dtype, for example complex64; or store complex128 values as "
                "torch.view_as_real(...), in float64",
            )
    parameters = Parameters(sharded_model.model)
    optimizer = build_optimizer(job.optimizer, parameters)
    if plan.serves:
        refuse_served(optimizer)
    sharded_model.hooks.take(sharded_model.model)  # the optimizer's function may have registered some
    refuse_hooks(sharded_model.hooks, sharded_model.division.parts, plan)
    return parameters, optimizer


def _refuse_whole_experts(optimizer: torch.optim.Optimizer, names: set[str]) -> None:
    """Raise JobError for an optimizer that needs whole parameters of divided experts."""
    if names:
        raise JobError(
            given=f"optimizer {type(optimizer).__name__}, with layout.expert above 1",
            conflict=f"its step needs the whole of {min(names)}, of which each rank has some experts",
            remedy="use layout.expert = 1, or an optimizer that updates each element by itself",
        )


def _notes_on_tables(tables: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> list[str]:
    """Return a note on each large table with sparse gradients: the bytes that are dense all the same."""
    notes = []
    for name, table in tables.items():
        owner = next((o for o in parts(optimizer).values() for g in o.param_groups if table in set(g["params"])), None)
        state = optimizer_shape(owner) if owner is not None else None
        if table.nbytes >= _LARGE_TABLE:
            states = f" and {state.tensors * table.nbytes / 1e9:.1f} GB of dense optimizer state" if state else ""
            notes.append(
                f"{name} {list(table.shape)}: {table.nbytes / 1e9:.1f} GB{states} on each process; its gradients grow "
                "with the rows that a step touches"
            )
    return notes


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


def _check_data(job: Job, data: Opened, plan: Plan, mesh: Mesh) -> None:
    """Check the data against the plan, and warn about settings without effect. Raises: PlanError."""
    source = data.source
    if plan.execution.cuda_graph:
        refuse_uncapturable(mesh.device, mapped=isinstance(source, MapSource))
    if not isinstance(source, MapSource):
        meets = plan.shards_model or plan.layout.expert > 1
        if meets or (job.batch_norm == "batch" and mesh.world_size > 1):
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


def _build_model(
    job: Job, plan: Plan, mesh: Mesh, precision: Precision, data: Opened, *, options: Options
) -> _ModelOfRank:
    """Build the model, or this rank's part of it, with the job's initial values. Collective: all ranks."""
    if plan.divides_model:
        key = random_key(job.seed, "initial values")
        pair = LossPair(microbatch_loss(job), precision)
        batch = functools.partial(small_batch, data.source, data.collate, data.bad_samples)
        source = ModelSource(functools.partial(make_model, job), key, job.loss, pair, batch, options.checks_seed)
        divided = collectively(mesh, True, lambda: divide(source, plan, mesh, precision))
        clear_caches({"model": job.model, "loss": job.loss})  # model() and proofs have filled them
        return _ModelOfRank(*divided)
    make = functools.partial(seeded_model, job)
    checks = options.checks_seed and mesh.rank == 0
    model, notes = together(mesh, lambda: construct_twice(make, options.drawn_at_import) if checks else (make(), ()))
    mesh = mapped(plan, mesh)
    model = together(mesh, lambda: in_precision(model.to(precision.device), precision))
    hooks = ParameterHooks(model)
    together(mesh, lambda: recompute(model, plan.memory.recompute))
    compare_models(mesh, model)
    unlike = unlike_ranks(mesh, model) if options.checks_seed else []
    mesh.broadcast([t.detach() for t in (*model.parameters(), *model.buffers())])
    whole_model = ShardedModel(mesh, model, divides_state=plan.num_owners > 1, hooks=hooks)
    return _ModelOfRank(whole_model, notes=tuple(notes or unlike))
