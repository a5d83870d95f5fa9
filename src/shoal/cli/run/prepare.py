"""Preparation of a run or a verification without torch: creates the request from the options and starts the ranks."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.cli.options import RunOptions, VerifyOptions, whole_number
from shoal.cli.run.device_range import range_of, with_number
from shoal.cli.run.start import claimed, judged_request, resized, tell_notes, trained
from shoal.cli.run.submit import started_on_host, submitted
from shoal.errors import CommandError, ExitCode, ShoalError
from shoal.jobs.job_file import JobRequest, parse_target
from shoal.launch.environment import REQUEST_FILE, Environment, inside_run
from shoal.launch.environments.detect import detected, has_launcher, restarts
from shoal.launch.signals import Signals, exiting, stop_signals
from shoal.plans import Plan
from shoal.plans.legal import World, other_world, refuse
from shoal.plans.plan import described, read_plan
from shoal.plans.resolve import Wishes, apply_wishes
from shoal.runs.address import is_address, working_copy
from shoal.runs.directory import RunDirectory, default_directory, read_json
from shoal.runs.initial_weights import initial_weights
from shoal.runs.request import RunRequest, loaded
from shoal.runs.sound_values import adapter
from shoal.runs.trace_steps import TraceSteps
from shoal.runs.tracking import TrackerName


def load_rank() -> None:
    """Load the modules that ranks need, in the process that ranks are forked from."""
    for name in ("shoal.cli.run.train", "shoal.distributed.collectives.shared_memory.all_reduce", "numpy.ma"):
        importlib.import_module(name)
    adapter(RunRequest)


def run(options: RunOptions) -> int:
    """Train in this process, as a rank of a launcher, or with ranks that are started here or on an engine."""
    if REQUEST_FILE in os.environ:
        return _run(options)
    with at_address(options) as options:
        return _run(options)


@contextlib.contextmanager
def at_address(options: RunOptions) -> Iterator[RunOptions]:
    """Yield the options, with a working copy of the run directory if it is at an address.

    Raises: as `working_copy`.
    """
    if options.out is None or not is_address(options.out):
        yield options
        return
    with working_copy(options.out, fetched=not options.dry_run) as out:
        yield replace(options, out=str(out), address=options.out)


def _run(options: RunOptions) -> int:
    environment = detected(os.environ)
    handed_over = os.environ.pop(REQUEST_FILE, None)
    if environment is not None and handed_over is not None:
        request = loaded(RunRequest, Path(handed_over).read_text(encoding="utf-8"))
        return _train(request, environment, Signals(impatient=False))
    limits = range_of(options)
    options = with_number(options, environment)
    if options.dry_run or (environment is None and options.on != "local"):
        return submitted(options, requested(options), least=limits.least if limits is not None else None)
    if environment is not None and options.on != "local":
        raise CommandError(
            given=f"--on {options.on}, in a process that {environment.engine or 'a launcher'} has started as rank "
            f"{environment.rank} of {environment.world_size}",
            conflict="ranks are started once: by that engine, or by --on",
            remedy="leave --on out; or call it where no engine has set its variables: env -u NAME ...",
        )
    request = requested(options)
    if options.out is not None and not options.resume:  # an engine's restart resumes
        request = request.restarted(restarts(os.environ))
    if environment is not None and environment.num_to_start and environment.num_hosts == 1:
        request, environment = request.with_devices(environment.num_to_start), None
    if environment is not None and environment.num_to_start:
        return started_on_host(options, request, environment)
    if environment is not None:
        world_size = environment.world_size
        request = request.with_devices(world_size)
        if environment.single_host:
            request = request.with_own_sums()
        left_over = " (unset RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT where no launcher has started this process)"
        source = f"WORLD_SIZE={world_size}{left_over if world_size == 1 else ''}"
        refuse(other_world(request.plan, World(world_size, source)))
        for name, text in environment.variables().items():  # jobs may read torchrun's variables on any engine
            os.environ.setdefault(name, text)
        return _train(request, environment, Signals(impatient=not has_launcher(os.environ)), unprepared=True)
    return _started_here(request)


def _started_here(request: RunRequest) -> int:
    """Train in this process or with ranks on this host, and return the exit code."""
    with claimed(request) as (request, lock):
        if request.plan.num_processes == 1:
            request, heard = request.begun(), Signals(impatient=True)
            with inside_run(os.environ):
                code = _train(request, Environment(), heard)
            following = resized(request, code, heard)  # a stop request has priority over a resize request
            if following is None:
                return code
            request = following  # this process is a launcher from now on
        tell_notes(request)
        try:
            request, signals = looked_at(request) if request.needs_look else request, Signals(impatient=False)
            with signals.handled():
                ended = trained(request, lock, signals)
        except ShoalError as error:
            return tell(request, error)
        return tell(request, ended.error, ended.code) if ended.error is not None else ended.code


def verify(options: VerifyOptions) -> int:
    """Verify the run that `shoal run` would train with these options."""
    with (
        at_address(RunOptions(**vars(options), no_telemetry=True)) as asked,
        claimed(requested(asked, suffix="-verify")) as (request, _),
    ):
        from shoal.cli.verify import verify  # imports torch, which the child that probes the job also uses

        # Exit in order, so that the traces are removed.
        with exiting(stop_signals(), ExitCode.INTERRUPTED):
            try:
                with inside_run(os.environ):
                    return verify(looked_at(request), options.steps)
            except ShoalError as error:
                tell(request, error)
                return int(ExitCode.USER)  # for any error, since 1 means that the run diverged


def requested(options: RunOptions, suffix: str = "") -> RunRequest:
    """Create the request from options. `suffix`: end of a default directory's name.

    Raises: CommandError, JobFileError, SettingError, PlanError.
    """
    options = _going_on(options, suffix)
    devices = whole_number("devices", options.devices, 1)
    wishes = Wishes(devices, options.exact, options.precision, options.workers, options.max_microbatch)
    steps = options.steps
    job = options.job if isinstance(options.job, JobRequest) else parse_target(options.job, options.set)
    name = job.name + suffix
    out = Path(options.out) if options.out else default_directory(name, options.resume)
    kept = RunDirectory(out)
    _refuse_with_resume(options)
    trackers = tuple(_tracker(text) for text in options.track)
    weights = initial_weights(options.init_from, options.init_allow, options.init_rename)
    if options.resume:
        job, steps = _resumed(kept, job, steps)
    resumed_plan = options.resume and not options.plan and kept.plan.exists()
    plan = read_plan(kept.plan) if resumed_plan else _plan_of(options.plan)
    says_workers = wishes.workers is not None or "workers" in plan.data.model_fields_set
    if resumed_plan and options.exact and not plan.execution.exact:
        # The run chose these values itself, so exact mode chooses them again.
        plan = plan.with_sections(batch={"grains_per_microbatch": 0}, execution={"channels_last": False})
    asked = apply_wishes(plan, wishes, from_file=bool(options.plan))
    if resumed_plan and asked.layout != plan.layout:
        print(f"note: the run's layout, {described(plan)}, becomes {described(asked)}", file=sys.stderr)
    return RunRequest(
        job=job,
        plan=asked,
        wishes=wishes,
        out=out,
        started_at=options.started_at,
        plan_from_file=bool(options.plan) or resumed_plan,
        resume=options.resume,
        accept_changes=options.accept_changes,
        steps=steps,
        max_restarts=options.max_restarts,
        checkpoint_every=options.checkpoint_every,
        keep_checkpoints=_num_kept(options.keep_checkpoints, kept if options.resume else None),
        telemetry=not options.no_telemetry,
        certificate=Path(options.require_certificate) if options.require_certificate else None,
        says_workers=says_workers,
        plan_resumed=resumed_plan,
        initial_weights=weights,
        trackers=trackers,
        trace=_trace(options.trace, asked),
        evaluate_every=_as_before("evaluate_every", options, kept),
        bad_samples=_bad_samples(options, kept, asked),
        check_replicas=_as_before("check_replicas", options, kept),
        numbered=None if options.out or options.resume else name,
        address=options.address,
        recorded_grains=(read_json(kept.job) or {}).get("grains") if options.resume else None,
    )


def _refuse_with_resume(options: RunOptions) -> None:
    """Reject options that only a resumed run, or only a new run, can have. Raises: CommandError."""
    if options.accept_changes and not options.resume:
        raise CommandError(
            given="--accept-changes", conflict="only a resumed run has a job to differ from", remedy="add --resume"
        )
    if options.resume and options.init_from:
        raise CommandError(
            given=f"--init-from {options.init_from} --resume",
            conflict="a run that goes on has its own weights",
            remedy="leave --init-from out, or leave --resume out and give another --out",
        )


def _as_before(name: str, options: RunOptions, kept: RunDirectory) -> int | None:
    """Return a number from the options, or from the resumed run if the options do not set it.

    The evaluation interval affects early stopping, and the number of bad samples affects which samples are skipped.
    """
    given: int | None = getattr(options, name)
    if given is not None or not options.resume:
        return given
    found = (read_json(kept.job) or {}).get(name)
    return found if isinstance(found, int) else None


def _bad_samples(options: RunOptions, kept: RunDirectory, plan: Plan) -> int:
    """Return the maximum number of samples to skip. Raises: CommandError with servers."""
    found = _as_before("bad_samples", options, kept) or 0
    if found and plan.serves:
        raise CommandError(
            given=f"--bad-samples {found} with servers (server.mode of the plan)",
            conflict="workers compute parts of different steps at a time, so that there is no step before which all "
            "learn of a bad sample",
            remedy='leave --bad-samples out, or train with server.mode = "none"',
        )
    return found


def _num_kept(text: str | int | None, resumed: RunDirectory | None) -> int | None:
    """Return the number of checkpoints to keep (None: all), by default as in the resumed run. Raises: CommandError."""
    if text is None:
        text = ((read_json(resumed.job) if resumed is not None else None) or {}).get("keep_checkpoints", 3)
    if text == "all":
        return None
    if not isinstance(text, bool | float) and str(text).isdecimal() and int(text) >= 1:
        return int(text)
    raise CommandError(
        given=f"--keep-checkpoints {text}",
        conflict="--keep-checkpoints takes a whole number of at least 1, or all",
        remedy="write --keep-checkpoints 3, say",
    )


def _going_on(options: RunOptions, suffix: str) -> RunOptions:
    """Return the options with --resume-if-exists resolved for the run directory."""
    if not options.resume_if_exists or options.resume:
        return options
    job = options.job if isinstance(options.job, JobRequest) else parse_target(options.job, options.set)
    out = Path(options.out) if options.out else default_directory(job.name + suffix, True)
    return replace(options, resume=RunDirectory(out).job.exists())


def _trace(text: str | None, plan: Plan) -> TraceSteps | None:
    """Parse the steps to trace. Raises: CommandError for invalid text, or with servers."""
    steps = TraceSteps.parse(text) if text is not None else None
    if steps is not None and plan.serves:
        raise CommandError(
            given=f"--trace {steps} with servers (server.mode of the plan)",
            conflict="workers compute parts of different steps at a time, so that a step has no beginning of its own",
            remedy='leave --trace out, or trace the job with server.mode = "none"',
        )
    return steps


def _tracker(text: str) -> TrackerName:
    found = TrackerName.parse(text, f"--track {text}")
    found.refuse_missing(f"--track {text}")
    return found


def _plan_of(given: str | Plan | None) -> Plan:
    return given if isinstance(given, Plan) else read_plan(Path(given)) if given else Plan()


def _resumed(directory: RunDirectory, job: JobRequest, steps: int | None) -> tuple[JobRequest, int | None]:
    """Return the job with the resumed run's settings, and its last step, as defaults of this call."""
    saved = read_json(directory.job)
    if not saved:
        return job, steps
    settings = {**saved.get("given", {}), **dict(job.settings)}
    return replace(job, settings=tuple(settings.items())), steps if steps is not None else saved.get("stop_after")


def looked_at(request: RunRequest) -> RunRequest:
    """Return the request with its plan completed by a child process that loads the job.

    Raises: errors of job and plan.
    """
    from shoal.launch.supervise.child import in_child

    def work() -> dict[str, Any]:
        from shoal.training.setup.preflight import look

        with inside_run(os.environ):
            return look(request)

    return judged_request(request, in_child(work))


def tell(request: RunRequest, error: ShoalError, code: int | None = None) -> int:
    """Print an error and the location of its traceback. Return the exit code."""
    errors = RunDirectory(request.out).errors
    print(error.render(), file=sys.stderr)
    if error.traceback_text and error.traceback_file is None and errors.is_dir():
        print(f"  traceback:      {errors}", file=sys.stderr)
    return int(error.exit_code) if code is None else code


def _train(request: RunRequest, environment: Environment, signals: Signals, *, unprepared: bool = False) -> int:
    """Train in this process, with signals recorded in `signals`. Return the exit code."""
    with signals.handled():  # before the import of torch, which takes seconds
        from shoal.cli.run.train import run

        return run(request, environment, signals, unprepared=unprepared)
