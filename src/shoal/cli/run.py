"""The `shoal run` command: trains the requested model on this rank and writes the run directory's files."""

from __future__ import annotations

import contextlib
import json
import math
import platform
import time
import warnings
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shoal.checkpoint import weights_sha256
from shoal.checkpoint.keeper import RunState
from shoal.checkpoint.state import sha256_of
from shoal.cli.progress import Pace, choose_reporter
from shoal.cli.summary import conclude, introduce
from shoal.data.opened import opened
from shoal.distributed.agreement import together
from shoal.distributed.failures import as_shoal_error, to_json, user_error
from shoal.distributed.mesh import alone, open_mesh
from shoal.distributed.process_setup import prepare_process, versions
from shoal.distributed.worker_process import die_with_launcher, tell
from shoal.errors import ExitCode, JobMismatchError, ShoalError, StorageError
from shoal.hardware.values import kind_of
from shoal.launch.environment import Environment
from shoal.launch.signals import Signals
from shoal.planner.calibrate.comparison import MeasuredStep, beside
from shoal.plans.plan import Plan
from shoal.plans.toml import write as plan_text
from shoal.plans.unheeded import unheeded, warn_of
from shoal.runs.certificate import Certificate
from shoal.runs.directory import RunDirectory, read_json, write_file
from shoal.runs.job_file import LoadedJob, load
from shoal.runs.records import RunRecord, StepRecord
from shoal.runs.request import RunRequest, cores_here
from shoal.training.computation import MicrobatchPolicy
from shoal.training.engine import Engine, Options, build
from shoal.training.metering import Shares, StepMeter, blocks, describe, predicted
from shoal.training.preflight import admitted, shake_hands
from shoal.training.telemetry import RecordWriter
from shoal.training.trainer import Outcome, Surroundings

if TYPE_CHECKING:
    from shoal.training.parameter_server.members import Members


@dataclass
class _Course:
    """What is known of a run so far: enough for a result file however it ends."""

    steps: int = 0
    samples: int = 0
    loss: float | None = None
    digest: str | None = None
    resumed_from: int | None = None
    first_step_at: float | None = None
    started: bool = False
    concluded: bool = False
    certificate: str | None = None
    notes: tuple[str, ...] = ()
    recent: deque[MeasuredStep] = field(default_factory=lambda: deque(maxlen=_RECENT))
    peak_bytes: int | None = None
    crew: Members | None = None  # with servers, the other processes
    out: Path | None = None  # that of rank 0, where it took one

    def take(self, record: StepRecord) -> None:
        """Counts a finished step."""
        self.steps, self.samples, self.loss, self.digest = record.step, record.samples, record.loss, record.digest
        self.recent.append(MeasuredStep(record.seconds, record.spans))
        self.peak_bytes = int(record.ranks["memory_bytes"].max) if "memory_bytes" in record.ranks else None
        self.first_step_at = self.first_step_at or time.time()


_RECENT = 1000  # steps whose times are compared with the prediction


def run(request: RunRequest, environment: Environment, signals: Signals, *, claims: bool = False) -> ExitCode:
    """Trains and returns the exit code; errors are printed here, or handed to the launcher that started this rank.

    `claims`: rank 0 takes the run directory, which nobody has done.
    """
    die_with_launcher()
    course = _Course()
    error: ShoalError | None = None
    code = ExitCode.DONE
    held = contextlib.ExitStack()  # the lock, until the last file is written
    try:
        if environment.rank == 0 or not request.plan.serves:  # others may come when the run is under way
            request.check()
        code = _train(request, environment, signals, course, held if claims else None)
    except (Exception, SystemExit) as caught:
        error = user_error("a sys.exit()", caught) if isinstance(caught, SystemExit) else as_shoal_error(caught)
        code = error.exit_code
        _note_failure(request, environment, error, course)
    finally:
        held.close()
    tell(environment, code, error)
    return code


def _train(
    request: RunRequest, environment: Environment, signals: Signals, course: _Course, held: contextlib.ExitStack | None
) -> ExitCode:
    threads = max(1, cores_here() // environment.local_world_size)
    prepare_process(request.plan.execution.exact, threads)
    loaded = load(request.job)
    plan, course.notes = admitted(loaded.job, request.plan, request.wishes.max_microbatch)
    if environment.rank == 0:
        warn_of(loaded.job.without_effect())
        if not request.plan_resumed:  # what a run keeps was completed by it
            warn_of(unheeded(request.plan, loaded.job.grains, None if loaded.job.fuse else "Job(fuse=False)"))
    if plan.serves:
        return _train_served(loaded, plan, request, environment, signals=signals, course=course)
    with open_mesh(environment, plan.degrees) as mesh:
        job = together(mesh, lambda: opened(loaded.job))
        loaded = replace(loaded, job=job)
        shake_hands(mesh, loaded, plan)
        if held is not None:
            lock = together(mesh, lambda: request.claim() if mesh.rank == 0 else None)
            held.callback(lock.release if lock is not None else lambda: None)
            course.out = Path(mesh.gather_json(str(lock.folder if lock is not None else request.out))[0])
            request = replace(request, out=course.out)
        if mesh.rank == 0 and plan.shards_model and plan.shard.offload and mesh.device.type == "cpu":
            warn_of(["shard.offload = true: no effect, since the ranks compute on the host already"])
        directory = RunDirectory(request.out)
        meter = StepMeter()
        options = Options(
            checkpoints=directory.checkpoints,
            checkpoint_every=request.checkpoint_every,
            telemetry=request.telemetry,
            take_workers=not request.says_workers,
            observer=meter,
        )
        engine = build(loaded.job, plan, mesh, options)
        try:
            if request.telemetry:
                wires = engine.pipeline.groups if engine.pipeline is not None else []
                meter.attach(engine.sharded_model, engine.updater.optimizer, engine.strategy, wires)
            return _train_built(engine, loaded, request, signals, course)
        finally:
            meter.close()
            engine.close()


def _train_served(
    loaded: LoadedJob,
    plan: Plan,
    request: RunRequest,
    environment: Environment,
    *,
    signals: Signals,
    course: _Course,
) -> ExitCode:
    """What this process is in a run whose parameters are kept by servers; the conductor trains."""
    from shoal.training.parameter_server.members import Members
    from shoal.training.parameter_server.part import take_part
    from shoal.training.parameter_server.peers import identity

    if take_part(loaded.job, plan, environment):
        return ExitCode.DONE
    with Members(environment, plan.server.num_servers, identity(loaded.job, plan)) as crew:
        options = Options(RunDirectory(request.out).checkpoints, request.checkpoint_every, request.telemetry)
        engine = build(loaded.job, plan, alone(torch.device("cpu")), options)
        try:
            course.crew = crew
            return _train_built(engine, loaded, request, signals, course)
        finally:
            engine.close()


def _train_built(engine: Engine, loaded: LoadedJob, request: RunRequest, signals: Signals, course: _Course) -> ExitCode:
    mesh, directory = engine.mesh, RunDirectory(request.out)
    loaded = replace(loaded, job=engine.job)  # with its data opened
    description = _describe(loaded, engine, request)
    saved = read_json(directory.job) if request.resume else None
    together(mesh, lambda: _refuse_other_job(saved, description) if saved else None)
    certificate = together(mesh, lambda: _certified(request, loaded, engine.plan))
    course.certificate = description["certificate"] = certificate
    state, complaints = engine.load() if request.resume else (None, [])
    course.resumed_from = state.step if state else (0 if request.resume else None)
    if state is not None:
        course.steps, course.samples, course.loss, course.digest = state.step, state.samples, state.loss, state.digest
    num_steps = request.steps or engine.order.num_steps
    pace = Pace(state.step if state else 0, num_steps, engine.plan.degrees.world_size)
    reporter = choose_reporter(mesh.rank, pace)
    try:
        for complaint in (*complaints, *course.notes):
            reporter.note(complaint)
        together(mesh, lambda: _begin(directory, engine.plan, description) if mesh.rank == 0 else None)
        course.started = True
        introduce(reporter, engine, loaded, request, state.step if state else None)

        def on_step(record: StepRecord, slowest_rank: int) -> None:
            course.take(record)
            reporter.step(record, slowest_rank)

        around = Surroundings(reporter.note, on_step, lambda: bool(signals.received))
        if (state.step if state else 0) < num_steps:
            engine.rehearse()
        records = RecordWriter(directory.records if mesh.rank == 0 and request.telemetry else None)
        outcome, served = _trained(engine, (state, num_steps), around, records, course.crew)
        predicted = {} if served is not None else engine.plan.prediction  # the planner knows no servers
        kind = kind_of(mesh.device.type)
        compared = beside(predicted, course.recent, course.peak_bytes, kind) if predicted.get("terms") else None
        result = replace(
            _result(engine, outcome, request, course),
            **_measured(engine, outcome),
            prediction=compared,
            server=served,
            ended_early=_ended_early(engine, outcome, num_steps),
        )
        unsaved = outcome.unsaved
        try:
            if mesh.rank == 0:
                write_file(directory.result, result.to_json())
        except OSError as error:
            unsaved = unsaved or StorageError(
                given=str(directory.result),
                conflict=f"it could not be written: {error}",
                remedy="mend the disk; --resume goes on from the newest checkpoint that is there",
            )
        course.concluded = True
        conclude(reporter, result, f"{request.job.path}:{loaded.function}", request.out)
        if unsaved is not None:
            raise unsaved
    finally:
        reporter.close()
    return ExitCode.PREEMPTED if outcome.status == "preempted" else ExitCode.DONE


def _trained(
    engine: Engine,
    course: tuple[RunState | None, int],
    around: Surroundings,
    records: RecordWriter,
    crew: Members | None,
) -> tuple[Outcome, dict[str, Any] | None]:
    """From a state up to a step: how it ended, and with a crew what came of its pushes."""
    state, num_steps = course
    if crew is None:
        return engine.trainer(state, num_steps, around, records).train(), None
    from shoal.training.parameter_server.conductor import Conductor

    state = state or engine.first_state()
    conductor = Conductor(engine.parts(state, num_steps, around, records), around, state, engine.plan, crew)
    return conductor.train(), conductor.report()


def _describe(loaded: LoadedJob, engine: Engine, request: RunRequest) -> dict[str, Any]:
    """job.json: what is trained, as far as numbers and names can say it."""
    shapes = [f"{name} {list(shape)}" for name, shape in engine.sharded_model.shapes().items()]
    return {
        "file": str(request.job.path),
        "function": loaded.function,
        "settings": loaded.settings,
        "given": dict(request.job.settings),
        "stop_after": request.steps,
        **loaded.job.describe(),
        "train_samples": engine.num_train_samples,
        "parameters": engine.num_parameters,
        "parameter_shapes_sha256": weights_sha256({"shapes": torch.tensor(list("\n".join(shapes).encode()))}),
        "versions": versions(),
    }


# A resume may change how long and what happens at a bad step; everything else is what was trained.
_MAY_CHANGE = ("file", "given", "stop_after", "length", "on_nonfinite", "versions", "certificate")


def _certified(request: RunRequest, loaded: LoadedJob, plan: Plan) -> str | None:
    """The SHA-256 of the certificate that was demanded. Raises: CertificateError where it is not of this run."""
    if request.certificate is None:
        return None
    certificate = Certificate.read(request.certificate)
    certificate.check(loaded.describe(), plan.to_mapping(), versions())
    return certificate.sha256


def _refuse_other_job(saved: dict[str, Any], now: dict[str, Any]) -> None:
    now = json.loads(json.dumps(now))
    differing = [name for name in now if name not in _MAY_CHANGE and saved.get(name) != now[name]]
    if differing:
        raise JobMismatchError(
            given="\n".join(f"{name} = {now[name]}" for name in differing),
            conflict="the run to resume has " + ", ".join(f"{name} = {saved.get(name)}" for name in differing),
            remedy="resume with the job and settings that the run began with, or start anew with another --out",
        )


def _begin(directory: RunDirectory, plan: Plan, description: dict[str, Any]) -> None:
    directory.path.mkdir(parents=True, exist_ok=True)
    write_file(directory.plan, plan_text(plan))
    write_file(directory.job, json.dumps(description, indent=2) + "\n")


def _result(engine: Engine, outcome: Outcome, request: RunRequest, course: _Course) -> RunRecord:
    seconds = np.array(outcome.step_seconds or [math.nan])
    median, p10, p90 = (float(np.percentile(seconds, q)) for q in (50, 10, 90))
    state = outcome.state
    return RunRecord(
        status="failed" if outcome.unsaved else outcome.status,
        error=_error_fields(outcome.unsaved, engine.mesh.rank) if outcome.unsaved else None,
        steps=state.step,
        samples=state.samples,
        world_size=engine.plan.degrees.world_size,
        train_loss=state.loss,
        metrics={k: v for k, v in outcome.metrics.items() if math.isfinite(v)},
        eval_samples=outcome.eval_samples,
        weights_sha256=sha256_of(whole for _, whole in engine.sharded_model.wholes(engine.sharded_model.state_dict())),
        sample_digest=state.digest,
        step_seconds={"median": median, "p10": p10, "p90": p90} if outcome.step_seconds else {},
        wall_seconds=time.time() - request.started_at,
        first_step_seconds=course.first_step_at - request.started_at if course.first_step_at else None,
        resumed_from=course.resumed_from,
        skipped_steps=state.skipped_steps,
        compression=engine.strategy.compression.to_json() if engine.strategy.compression is not None else None,
        certificate=course.certificate,
        computation=state.computation,
        versions=versions(),
    )


def _ended_early(engine: Engine, outcome: Outcome, num_steps: int) -> dict[str, int] | None:
    """What the run's length wanted of a stream and what it gave, where that is less; a dataset always has it."""
    wanted, state = engine.order.samples_before(num_steps), outcome.state
    if engine.num_train_samples is not None or outcome.status != "completed" or state.samples >= wanted:
        return None
    return {"steps": state.step, "wanted_steps": num_steps, "samples": state.samples, "wanted_samples": wanted}


def _measured(engine: Engine, outcome: Outcome) -> dict[str, Any]:
    """The blocks `traffic` and `memory` of the result. Collective: all ranks, a JSON gather."""
    meter, mesh = engine.observer, engine.mesh
    if not isinstance(meter, StepMeter) or not meter.attached:
        return {}
    found = meter.to_json()
    if found is not None:
        computation = MicrobatchPolicy.from_json(
            outcome.state.computation or {"grains_per_microbatch": 1, "buffers": ()}
        )
        grains = engine.order.grains(found["step"] - 1)
        shares = Shares(engine.job.grains, grains, computation.effective_grains, computation.buffers)
        try:
            step = describe(engine.sharded_model, engine.updater.optimizer, engine.plan, engine.precision, shares)
            found["predicted"] = predicted(_plan_at(engine, found["step"]), step, mesh.rank)
        except Exception as error:  # what formulas cannot say must not cost a finished run its result
            found["predicted"] = None
            warnings.warn(f"no prediction of traffic and memory: {error}", RuntimeWarning, stacklevel=2)
    return blocks(mesh.gather_json(found))


def _plan_at(engine: Engine, step: int) -> Plan:
    """The plan as a step sent by it: without its compression where that had ended."""
    compression = engine.strategy.compression
    ended = compression.fell_back if compression is not None else None
    return engine.plan.uncompressed if ended is not None and ended["step"] < step else engine.plan


def _note_failure(request: RunRequest, environment: Environment, error: ShoalError, course: _Course) -> None:
    """The traceback of this rank, and on rank 0 a result file; only where the run had begun."""
    if error.rank is None and environment.world_size > 1:
        error.rank = environment.rank
    directory = RunDirectory(course.out or request.out)
    with contextlib.suppress(OSError):
        if error.traceback_text:
            directory.errors.mkdir(exist_ok=True, parents=True)
            write_file(directory.errors / f"rank-{environment.rank}.txt", error.traceback_text)
        if environment.rank == 0 and course.started and not course.concluded:
            result = RunRecord(
                status="failed",
                steps=course.steps,
                samples=course.samples,
                world_size=environment.world_size,
                train_loss=course.loss,
                metrics={},
                eval_samples=0,
                weights_sha256=None,
                sample_digest=course.digest,
                step_seconds={},
                wall_seconds=time.time() - request.started_at,
                resumed_from=course.resumed_from,
                error=_error_fields(error, environment.rank),
                versions=versions(),
            )
            write_file(directory.result, result.to_json())


def _error_fields(error: ShoalError, rank: int) -> dict[str, Any]:
    return {k: v for k, v in to_json(error, rank, platform.node()).items() if k != "traceback"}
