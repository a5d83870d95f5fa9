"""Training of a run on one rank, with the files of the run directory: `result.json` is written at every kind of end."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import signal
import time
import warnings
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from traceback import clear_frames
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shoal.checkpoint.keeper import RunState
from shoal.checkpoint.places import RemotePlace
from shoal.checkpoint.state import sha256_of
from shoal.cli.run.console import Pace, choose_reporter, conclude, introduce
from shoal.cli.run.description import Lengths, accepted_changes, describe, fields_changed, same_settings
from shoal.cli.run.way_out import with_way_out
from shoal.data.source import opened
from shoal.distributed.failures import as_shoal_error, to_json
from shoal.distributed.mesh import Mesh, alone, decided_by_rank_0, open_mesh, together
from shoal.distributed.process_setup import as_rank, has_drawn_since_loading, prepare_process, seed_loading, versions
from shoal.errors import ExitCode, LaunchError, RunDirectoryError, ShoalError, StorageError
from shoal.hardware.detect import cores
from shoal.hardware.values import kind_of
from shoal.jobs.job import Job
from shoal.jobs.job_file import LoadedJob, load
from shoal.launch.environment import DIRECTORY_FILE, REPORT_FILE, Environment
from shoal.launch.signals import Signals
from shoal.launch.supervise.child import in_child
from shoal.launch.supervise.heartbeat import Heartbeat
from shoal.parallel.model.adapters.transformers import save_config
from shoal.parallel.model.sharded_model import whole_tensors
from shoal.planner.calibrate.comparison import MeasuredStep, beside
from shoal.plans.legal import idle
from shoal.plans.plan import Plan, plan_text
from shoal.plans.resolve import CompletePlan, Judged, unheeded, warn_of
from shoal.runs.attempts import AttemptLog, EffectiveTime, Events, StartUp, call_began_at, earlier_starts, mtbf_seconds
from shoal.runs.certificate import Certificate
from shoal.runs.directory import Fence, RunDirectory, guarded_files, read_json, unwritten, withdraw
from shoal.runs.options import Origin
from shoal.runs.record_blocks import WHOLE_STEPS
from shoal.runs.records import RunRecord, StepRecord
from shoal.runs.request import RunRequest, claim_directory
from shoal.runs.sound_values import RUNNING
from shoal.runs.source import write_source
from shoal.runs.step_trial import StepMode
from shoal.training.loop.step_modes import RunTrial
from shoal.training.loop.trainer import Outcome
from shoal.training.microbatch.policy import MicrobatchPolicy
from shoal.training.observe.metering import Shares, StepMeter, blocks, predicted
from shoal.training.observe.metering import describe as described_step
from shoal.training.observe.step_profile import StepProfile
from shoal.training.observe.step_records import RecordWriter, Surroundings
from shoal.training.setup.engine import Engine, Options, build
from shoal.training.setup.preflight import judged_for, shake_hands, with_judged_grains
from shoal.training.setup.step_choice import TrialRequest, open_trial

if TYPE_CHECKING:
    from shoal.training.parameter_server.members import Members


# Minimum time between two looks of rank 0 for a request to resize, so that they do not slow down short steps.
_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class _Call:
    request: RunRequest
    loaded: LoadedJob
    signals: Signals
    notes: tuple[str, ...] = ()
    why_grains: str = "as the job says"
    profile: StepProfile | None = None
    unlike: list[str] | None = None  # fields of the job that a resume's other settings change
    start_up: StartUp = field(kw_only=True)
    unprepared: bool = False


def run(request: RunRequest, environment: Environment, signals: Signals, *, unprepared: bool = False) -> ExitCode:
    """Train and return the exit code. Errors are printed here or passed to the launcher that started this rank.

    `unprepared`: whether no launcher of shoal has locked the run directory and warned of settings without effect.
    """
    # A rank's working copy is uploaded and removed while this process unwinds, so it must not exit at once.
    work = partial(_run, request, environment, signals, unprepared)
    return as_rank(environment, work, may_end_at_once=request.where.address is None)


def _run(request: RunRequest, environment: Environment, signals: Signals, unprepared: bool) -> ExitCode:
    """Train. Raises: a shoal error, whose traceback is stored in the run directory."""
    environment = replace(environment, shares_gpu=request.where.shares_gpu)
    directory = RunDirectory(request.where.out)
    start_up = StartUp(request.lost_at or request.started_at, clock=request.clock.now)
    start_up.ends("launch")
    with contextlib.ExitStack() as stack:  # holds the directory's lock until the last file is written
        try:
            stack.enter_context(guarded_files(request.course.private))
            stack.enter_context(_fenced(request, environment))
            prepare_process(request.what.plan.execution.exact, max(1, cores() // environment.local_world_size))
            unlike = _compared(request) if environment.rank == 0 else None  # before the job is loaded here
            seed_loading()
            try:
                own = replace(load(request.what.job), draws=request.what.job.by_value or has_drawn_since_loading())
                failure = None
            except (Exception, SystemExit) as caught:
                failure = as_shoal_error(caught)

            def loaded() -> LoadedJob:
                """Return the job or raise its error, which all ranks do together once they have met."""
                if failure is not None:
                    raise failure
                return own

            if request.what.plan.serves:
                return _serve(_Call(request, loaded(), signals, unlike=unlike, start_up=start_up), environment)
            if environment.world_size == 1:
                loaded()
            with open_mesh(environment, request.what.plan.layout) as mesh:
                whole = together(mesh, loaded)
                job, judged = whole.job, request.what.judged
                if judged is None:
                    if job.grains is None:  # choosing grains may read samples: open the data only once
                        job = together(mesh, partial(opened, job))
                    judged = decided_by_rank_0(mesh, Judged, partial(judged_for, request, job))
                whole = replace(whole, job=together(mesh, lambda: opened(with_judged_grains(judged, job))))
                if mesh.rank == 0:
                    _warn(whole.job, request, unprepared)
                shake_hands(mesh, whole, request)
                if unprepared:
                    out = decided_by_rank_0(mesh, Path, lambda: stack.enter_context(claim_directory(request)).folder)
                    if request.where.address is None:  # else each process has its own working copy
                        request = replace(request, where=replace(request.where, out=out))
                        directory = RunDirectory(out)
                        if DIRECTORY_FILE in os.environ:
                            Path(os.environ[DIRECTORY_FILE]).write_text(str(out), encoding="utf-8")
                    if mesh.rank == 0:
                        stack.callback(withdraw, out)
                    generation = decided_by_rank_0(mesh, int, lambda: request.begun().where.generation)
                    request = replace(request, where=replace(request.where, generation=generation))
                    stack.enter_context(_fenced(request, environment))
                about = (judged.notes, judged.why_grains)
                return _train(
                    mesh,
                    judged.plan,
                    _Call(request, whole, signals, *about, unlike=unlike, start_up=start_up, unprepared=unprepared),
                )
        except (Exception, SystemExit) as caught:
            request.where.fence.check()  # a paused process lost the others; report the reason
            error = as_shoal_error(caught)
            with contextlib.suppress(OSError):
                directory.keep_traceback(f"rank-{environment.rank}", error)
            if environment.world_size == 1 and REPORT_FILE not in os.environ:  # else the launcher asks the planner
                clear_frames(caught.__traceback__)  # which hold the model
                error = with_way_out(error, request)
            raise error from None


def _fenced(request: RunRequest, environment: Environment) -> AbstractContextManager[None]:
    """Return a context in which this process ends soon after a later generation starts.

    One process per host checks, less often on many hosts. The others lose their connection and then find the reason.
    """
    if environment.local_rank != 0:
        return contextlib.nullcontext()
    many = not environment.single_host
    return request.where.fence.watched(says=REPORT_FILE not in os.environ, seldom=many)


def _compared(request: RunRequest) -> list[str] | None:
    """Return the fields of the job that a resume's settings change; None if unknown or not needed."""
    saved = (
        read_json(RunDirectory(request.where.out).job, exactly=True)
        if request.course.resume and not request.course.accept_changes
        else None
    )
    if not saved or request.restarts or same_settings(request.what.job, saved):
        return None
    try:
        fields: list[str] | None = in_child(lambda: {"fields": fields_changed(request.what.job, saved)})["fields"]
    except LaunchError:  # the job raises, and loading it here will report that
        return None
    except SystemExit:  # a stop request ended the child: pass it on to the run
        os.kill(os.getpid(), signal.SIGTERM)
        return None
    return fields


def _warn(job: Job, request: RunRequest, unprepared: bool) -> None:
    """Warn of settings without effect in the job and in this call's plan."""
    warn_of([*job.without_effect(), *job.doubtful()])
    if request.origin("plan") is not Origin.RUN:  # a stored plan was completed by its run
        if unprepared:
            warn_of(idle(request.what.plan))
        warn_of(unheeded(request.what.plan, job.num_grains, None if job.fuse else "Job(fuse=False)"))


def _train(mesh: Mesh, plan: CompletePlan, call: _Call) -> ExitCode:
    request = call.request
    if mesh.rank == 0 and plan.shards_model and plan.shard.offload and mesh.device.type == "cpu":
        warn_of(["shard.offload = true: no effect, since the ranks compute on the host already"])
    profile = None
    if request.course.trace is not None:
        profile = StepProfile(
            request.course.trace, mesh, RunDirectory(request.where.out).trace(str(request.course.trace))
        )
    options = replace(_options(request, call.loaded), listener=profile)
    call.start_up.ends("job")
    engine = build(call.loaded.job, plan, mesh, options)
    try:
        return _train_built(engine, replace(call, profile=profile))
    finally:
        if profile is not None:
            profile.close()
        engine.close()


def _options(request: RunRequest, loaded: LoadedJob) -> Options:
    directory, course = RunDirectory(request.where.out), request.course
    callbacks = tuple(loaded.job.callbacks)
    if course.track:
        from shoal.training.trackers.tracker import Tracker

        callbacks += tuple(map(Tracker, course.track))
    return Options(
        checkpoints=directory.checkpoints,
        saved=directory.saved,
        fence=request.where.fence,
        remote=RemotePlace(request.where.address) if request.where.address is not None else None,
        checkpoint_every=course.checkpoint_every,
        keep_checkpoints=course.keep_checkpoints if course.keep_checkpoints != "all" else None,
        telemetry=not course.no_telemetry,
        bad_samples=course.bad_samples or 0,
        check_replicas=course.check_replicas,
        mtbf_seconds=mtbf_seconds(directory.events, call_began_at(request), request.clock.now()),
        take_workers=request.origin("data.workers") is Origin.DEFAULT,
        may_copy=request.origin("memory.shared") is not Origin.FILE,
        initial_weights=request.what.initial_weights,
        checks_seed=not (request.course.resume or request.restarts or request.what.initial_weights),
        drawn_at_import=loaded.draws,
        callbacks=callbacks,
        meters=not course.no_telemetry,
        heartbeat=Heartbeat.joined(os.environ),
    )


def _serve(call: _Call, environment: Environment) -> ExitCode:
    """Run this process's part of a run with parameter servers; the conductor trains."""
    from shoal.training.parameter_server.members import Members, identity, key_of
    from shoal.training.parameter_server.worker import take_part

    request, job = call.request, call.loaded.job
    key_of(environment)  # raises without shoal's launcher, which completes the plan
    assert request.what.judged is not None, "a request for servers is looked at"
    plan, job = request.what.judged.plan, with_judged_grains(request.what.judged, job)
    call = replace(call, notes=request.what.judged.notes, why_grains=request.what.judged.why_grains)
    if environment.rank == 0:
        _warn(job, request, unprepared=False)
    if take_part(job, plan, environment):
        return ExitCode.DONE
    with Members(environment, plan.server.num_servers, identity(job, plan)) as crew:
        options = replace(_options(request, call.loaded), take_workers=False, meters=False)
        call.start_up.ends("job")
        engine = build(job, plan, alone(torch.device("cpu")), options)
        try:
            return _train_built(engine, call, crew)
        finally:
            engine.close()


def _train_built(engine: Engine, call: _Call, crew: Members | None = None) -> ExitCode:
    mesh, request, directory = engine.mesh, call.request, RunDirectory(call.request.where.out)
    call.start_up.ends("build")
    loaded = replace(call.loaded, job=engine.job)  # the job with opened data
    saved = read_json(directory.job, exactly=True) if request.course.resume else None
    description = describe(loaded, engine, request, call.why_grains, saved)
    changes = decided_by_rank_0(
        mesh, list[str], lambda: accepted_changes(saved or {}, description, call.unlike, request.course.accept_changes)
    )

    certificate = together(mesh, lambda: _certified(request, loaded, engine.plan))
    description["certificate"] = certificate
    of_call = engine.initial_weights
    began: dict[str, Any] | None = of_call.to_json() if of_call is not None else (saved or {}).get("initial_weights")
    description["initial_weights"] = began
    engine.keeper.begin()  # the job matches the run: now take over its checkpoints
    state, complaints = engine.load() if request.course.resume else (None, [])
    if request.course.resume and state is None and began is not None and of_call is None:
        raise RunDirectoryError(
            given="--resume of a run without any checkpoint",
            conflict=f"it began with weights of {began['from']} (SHA-256 {began['sha256']}), which no checkpoint has",
            remedy=f"start anew with --init-from {began['from']} and another --out",
        )
    first = state.step if state else 0
    course = together(mesh, lambda: Lengths(saved or {}, engine, state, checked=not request.course.accept_changes))
    description["lengths"] = course.to_json()
    result = Result(engine, directory.result, request, certificate, first if request.course.resume else None, state)
    result.restarts, result.fence, result.call_began_at = request.restarts, request.where.fence, call_began_at(request)
    result.unwatched = call.unprepared
    num_steps = request.course.steps or engine.order.num_steps
    pace = Pace(first, num_steps, engine.plan.layout.world_size)
    reporter = choose_reporter(mesh.rank, pace, shown_elsewhere=request.shown_elsewhere)
    try:
        initial = of_call if state is None else None  # restarted ranks have the same options but a state
        for complaint in (*complaints, *changes, *course.lines(), *call.notes, *(initial.lines() if initial else ())):
            reporter.note(complaint)

        def write() -> None:
            if mesh.rank == 0:
                if not request.course.no_source:
                    write_source(directory.path, request.what.job.path.parent)
                directory.path.mkdir(parents=True, exist_ok=True)
                request.where.fence.write(directory.plan, plan_text(engine.plan))
                save_config(engine.model, directory.model, engine.sharded_model.shapes())
                request.where.fence.write(directory.job, json.dumps(description, indent=2) + "\n")
                engine.keeper.send()

        together(mesh, write)
        if initial is not None:  # saved, so that a resume does not need the source
            engine.keeper.save(engine.first_state(), wait=True)
        trial = open_trial(
            engine,
            TrialRequest(
                request.course.step or "auto",
                sets_step=request.origin("execution.step") is Origin.FILE,
                sets_format=request.origin("execution.channels_last") is Origin.FILE,
                covered=certificate is not None,
            ),
            description,
            directory=directory,
            fence=request.where.fence,
            first=first if request.course.resume else None,
            num_steps=num_steps,
        )
        try:
            introduce(reporter, engine, loaded, request, state.step if state else None, why_grains=call.why_grains)

            def on_step(record: StepRecord, slowest_rank: int) -> None:
                if request.lost_at is not None and result.first_step_at is None:
                    events.add("going_on", step=record.step, seconds=request.clock.now() - request.lost_at)
                result.take(record)
                reporter.step(record, slowest_rank)

            is_resized, next_look = False, 0.0 if mesh.rank == 0 and request.where.resizable else math.inf

            def stop_requested() -> bool:
                """Return True after a signal, and on rank 0 once another number of processes is requested."""
                nonlocal is_resized, next_look
                if call.signals.received:
                    return True
                now = time.monotonic()
                if not is_resized and now >= next_look:
                    is_resized, next_look = directory.requested_devices() is not None, now + _LOOK_SECONDS
                return is_resized

            events = Events(directory.events if mesh.rank == 0 else None, request.where.fence)
            about = (request.where.out, loaded.settings, description, request.course.evaluate_every, events)
            rebalances = request.course.shares == "by-speed"
            around = Surroundings(reporter.note, on_step, stop_requested, *about, rebalances=rebalances)
            if first < num_steps:
                said = engine.rehearse()
                if said is not None:
                    reporter.note(said)
            result.log = AttemptLog(
                directory.attempts if mesh.rank == 0 else None, request.clock.now, request.where.fence
            )
            call.start_up.ends("prepare")
            device = mesh.device.type
            result.log.began(
                request.lost_at or request.started_at,
                call.start_up.seconds,
                resumed_from=first if state else 0 if request.course.resume else None,
                restarts=request.restarts,
                num_steps=num_steps,
                world_size=engine.plan.layout.world_size,
                threads=torch.get_num_threads(),
                cores=cores(),
                evaluate_every=request.course.evaluate_every,
                checkpoint_every=request.course.checkpoint_every,
                host=platform.node(),
                device=torch.cuda.get_device_name(mesh.device) if device == "cuda" else device,
            )
            result.began_at = request.clock.now()
            records_file = directory.records if mesh.rank == 0 and not request.course.no_telemetry else None
            whole_steps = None if request.course.records == "all" else WHOLE_STEPS
            records = RecordWriter(records_file, result.log.undone, request.where.fence, whole_steps)
            with contextlib.closing(records):
                if call.profile is not None:
                    call.profile.attach(reporter.note)
                served = None
                if crew is None:
                    tried = trial if isinstance(trial, RunTrial) else None
                    outcome = engine.trainer(state, num_steps, around, records, tried).train()
                    if tried is None:
                        mode = StepMode.of(engine.plan)
                        outcome.trial = {"chosen": mode.name, "from_step": 1, "reason": trial}
                else:
                    from shoal.training.parameter_server.conductor import Conductor

                    conductor = Conductor(engine, around, state or engine.first_state(), num_steps, records, crew=crew)
                    outcome, served = conductor.train(), conductor.report()
                if call.profile is not None:
                    call.profile.conclude()
            record = result.of(outcome, num_steps, served)
        except (Exception, SystemExit) as caught:
            result.write_failed(as_shoal_error(caught))
            raise
        unwritten = result.write(record)
        unsaved = outcome.unsaved or unwritten
        conclude(reporter, record, request, loaded.function, told_to_stop=bool(call.signals.received))
        if unsaved is not None:
            raise unsaved
    finally:
        reporter.close()
    return ExitCode.PREEMPTED if outcome.status == "preempted" else ExitCode.DONE


def _certified(request: RunRequest, loaded: LoadedJob, plan: Plan) -> str | None:
    """Return the SHA-256 of the required certificate. Raises: CertificateError if it does not cover this run."""
    if request.course.require_certificate is None:
        return None
    certificate = Certificate.read(Path(request.course.require_certificate))
    certificate.check(loaded.describe(), plan.to_mapping(), versions())
    return certificate.sha256


_RECENT = 1000  # number of steps to compare with the prediction


@dataclass
class Result:
    """Result of this call, updated with each step. `last`: the last finished step, or the state of a checkpoint."""

    engine: Engine
    path: Path
    request: RunRequest
    certificate: str | None
    resumed_from: int | None
    last: RunState | StepRecord | None
    first_step_at: float | None = None
    recent: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=_RECENT))
    peak_bytes: int | None = None
    restarts: int = 0
    fence: Fence = field(default_factory=Fence)
    log: AttemptLog = field(default_factory=lambda: AttemptLog(None))
    trained_at: float | None = None
    after: dict[str, float] = field(default_factory=dict)
    began_at: float | None = None  # start of training in this attempt
    call_began_at: float | None = None  # differs from the request's after an engine's restart
    unwatched: bool = False  # whether no launcher of shoal notices the end of this process
    effective: EffectiveTime = field(init=False)

    def __post_init__(self) -> None:
        self.effective = EffectiveTime(self.resumed_from or 0)

    def take(self, record: StepRecord) -> None:
        """Count a finished step."""
        self.last = record
        self.effective.take(record)
        self.recent.append(record)
        self.peak_bytes = int(record.ranks["memory_bytes"].max) if "memory_bytes" in record.ranks else None
        if self.first_step_at is None:
            self.first_step_at = self.request.clock.now()
            if self.unwatched:
                self._write_so_far(RUNNING)

    def of(self, outcome: Outcome, num_steps: int, served: dict[str, Any] | None) -> RunRecord:
        """Return the record of a training that ended normally, up to `num_steps`.

        Collective: all ranks.
        """
        self.trained_at, self.after = self.request.clock.now(), outcome.after
        engine, state = self.engine, outcome.state
        seconds = np.array(outcome.step_seconds or [math.nan])
        median, p10, p90 = (float(np.percentile(seconds, q)) for q in (50, 10, 90))
        # The planner does not support servers. A mode that a trial has chosen has no prediction.
        predicted = {} if served is not None else (outcome.plan or engine.plan).prediction
        compression = engine.strategy.compression
        early, wanted = None, engine.order.samples_before(num_steps)
        is_stream = engine.num_train_samples is None
        if is_stream and outcome.status == "completed" and not outcome.ended_by and state.samples < wanted:
            early = {"steps": state.step, "wanted_steps": num_steps}
            early |= {"samples": state.samples, "wanted_samples": wanted}
        record = RunRecord(
            status="failed" if outcome.unsaved else outcome.status,
            error=_error_fields(outcome.unsaved, engine.mesh.rank) if outcome.unsaved else None,
            steps=state.step,
            samples=state.samples,
            world_size=engine.plan.layout.world_size,
            train_loss=state.loss,
            metrics={k: v if math.isfinite(v) else None for k, v in outcome.metrics.items()},
            eval_samples=outcome.eval_samples,
            best=state.best,
            weights_sha256=sha256_of(
                whole for _, whole in whole_tensors(engine.sharded_model, engine.sharded_model.state_dict())
            ),
            sample_digest=state.digest,
            step_seconds={"median": median, "p10": p10, "p90": p90} if outcome.step_seconds else {},
            wall_seconds=self.request.clock.now() - self.request.started_at,
            first_step_seconds=self.first_step_at - self.request.started_at if self.first_step_at else None,
            look_seconds=round(engine.computer.look_seconds, 6),
            compile_seconds=round(regions.seconds, 3) if (regions := engine.computer.regions).names else None,
            compile_cuts=sorted(engine.computer.regions.cuts) or None,
            resumed_from=self.resumed_from,
            restarts=self.restarts,
            ettr=self.ettr(),
            skipped_steps=state.skipped_steps,
            compression={"scheme": compression.scheme, "fell_back": compression.fell_back} if compression else None,
            certificate=self.certificate,
            computation=state.computation,
            versions=versions(),
            server=served,
            ended_early=early,
            ended_by=outcome.ended_by,
            trial=outcome.trial,
        )
        kind = kind_of(engine.mesh.device.type)
        steps = map(MeasuredStep.of, self.recent)
        compared = beside(predicted, steps, self.peak_bytes, kind) if predicted.get("terms") else None
        return replace(record, prediction=compared, **_measured(engine, outcome))

    def ettr(self) -> float | None:
        """Return the effective training time ratio of this call, from the first step of its first start; on rank 0."""
        if self.engine.mesh.rank != 0 or self.began_at is None:
            return None
        began_at, seconds = self.began_at, self.effective.seconds + self.after.get("evaluation", 0.0)
        if self.restarts:
            files = RunDirectory(self.path.parent)
            since = self.call_began_at or self.request.started_at
            first, earlier_seconds = earlier_starts(files.attempts, files.records, since, self.resumed_from or 0)
            began_at, seconds = min(began_at, first or began_at), seconds + earlier_seconds
        whole = (self.trained_at or self.request.clock.now()) - began_at
        return round(min(1.0, seconds / whole), 6) if whole > 0.0 and seconds > 0.0 else None

    def write(self, record: RunRecord) -> StorageError | None:
        """Write the file on rank 0. Return the error if that fails."""
        try:
            if self.engine.mesh.rank == 0:
                self.fence.write(self.path, record.to_json())
                if record.status == RUNNING:
                    return None
                trained_at, writer = self.trained_at or self.request.clock.now(), self.engine.keeper.writer
                writing = writer.mean_cpu_seconds() if writer is not None else None
                self.log.ended(record.status, record.steps, trained_at, self.after, checkpoint_cpu=writing)
        except OSError as error:
            return unwritten(self.path, error)
        return None

    def write_failed(self, error: ShoalError) -> None:
        """Write the file of a training that failed, on rank 0, if possible."""
        self._write_so_far("failed", _error_fields(error, self.engine.mesh.rank))

    def _write_so_far(self, status: str, error: dict[str, Any] | None = None) -> None:
        at = self.last or RunState()
        self.write(
            RunRecord(
                status=status,
                steps=at.step,
                samples=at.samples,
                world_size=self.engine.plan.layout.world_size,
                train_loss=at.loss,
                sample_digest=at.digest if self.last else None,
                wall_seconds=self.request.clock.now() - self.request.started_at,
                resumed_from=self.resumed_from,
                restarts=self.restarts,
                ettr=self.ettr(),
                error=error,
                versions=versions(),
            )
        )


def _error_fields(error: ShoalError, rank: int) -> dict[str, Any]:
    return {k: v for k, v in to_json(error, rank, platform.node()).items() if k != "traceback"}


def _measured(engine: Engine, outcome: Outcome) -> dict[str, Any]:
    """Return the entries `traffic` and `memory` of the result.

    Collective: all ranks, a JSON gather.
    """
    meter, mesh = engine.observer, engine.mesh
    if not isinstance(meter, StepMeter) or not meter.attached:
        return {}
    measurement = meter.to_json()
    if measurement is not None:
        computation = MicrobatchPolicy.from_json(
            outcome.state.computation or {"grains_per_microbatch": 1, "buffers": ()}
        )
        grains = engine.order.grains(measurement["step"] - 1)
        shares = Shares(engine.job.num_grains, grains, computation.effective_grains, engine.buffers.num_values)
        try:
            step = described_step(engine.sharded_model, engine.updater.optimizer, engine.plan, engine.precision, shares)
            compression = engine.strategy.compression
            ended = compression.fell_back if compression is not None else None
            is_compressed = ended is None or ended["step"] >= measurement["step"]
            plan = engine.plan if is_compressed else engine.plan.uncompressed
            measurement["predicted"] = predicted(plan, step, mesh.rank)
        except Exception as error:  # a failed prediction must not cost a finished run its result
            measurement["predicted"] = None
            warnings.warn(f"no prediction of traffic and memory: {error}", RuntimeWarning, stacklevel=2)
    return blocks(mesh.gather_json(measurement))
