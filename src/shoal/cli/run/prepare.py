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

from shoal.cli.options import RunOptions, VerifyOptions
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
from shoal.runs.option_values import initial_weights
from shoal.runs.options import Origin, course_of, whole_number
from shoal.runs.request import RunRequest, What, Where, loaded
from shoal.runs.sound_values import adapter


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
        request, environment = request.with_devices(environment.num_to_start, Origin.OPTION), None
    if environment is not None and environment.num_to_start:
        return started_on_host(options, request, environment)
    if environment is not None:
        world_size = environment.world_size
        request = request.with_devices(world_size, Origin.OPTION)
        if environment.single_host:
            request = request.with_own_sums()
        left_over = " (unset RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT where no launcher has started this process)"
        source = f"WORLD_SIZE={world_size}{left_over if world_size == 1 else ''}"
        refuse(other_world(request.what.plan, World(world_size, source)))
        signals = Signals(impatient=not has_launcher(os.environ))
        for name, text in environment.variables().items():  # jobs may read torchrun's variables on any engine
            os.environ.setdefault(name, text)
        return _train(request, environment, signals, unprepared=True)
    return _started_here(request)


def _started_here(request: RunRequest) -> int:
    """Train in this process or with ranks on this host, and return the exit code."""
    with claimed(request) as (request, lock):
        if request.what.plan.num_processes == 1:
            request, heard = request.begun(), Signals(impatient=True)
            with inside_run(os.environ):
                code = _train(request, Environment(), heard)
            following = resized(request, code, heard)  # a stop request has priority over a resize request
            if following is None:
                return code
            request = following  # this process is a launcher from now on
        tell_notes(request)
        try:
            request, signals = looked_at(request) if request.what.needs_look else request, Signals(impatient=False)
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
    job = options.job if isinstance(options.job, JobRequest) else parse_target(options.job, options.set)
    name = job.name + suffix
    if options.resume_if_exists and not options.resume:
        out = Path(options.out) if options.out else default_directory(name, True)
        options = replace(options, resume=RunDirectory(out).job.exists())
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
    for tracker in options.track:
        tracker.refuse_missing(f"--track {tracker}")
    weights = initial_weights(options.init_from, options.init_allow, options.init_rename)
    devices = whole_number("devices", options.devices, 1)
    wishes = Wishes(devices, options.exact, options.precision, options.workers, options.max_microbatch)
    directory = RunDirectory(Path(options.out) if options.out else default_directory(name, options.resume))
    saved = read_json(directory.job) if options.resume else None
    if saved:
        job = replace(job, settings=tuple({**saved.get("given", {}), **dict(job.settings)}.items()))
    course, origins = course_of(options, saved)
    if options.plan:
        given = options.plan if isinstance(options.plan, Plan) else read_plan(Path(options.plan))
        origin = Origin.FILE
    elif options.resume and directory.plan.exists():
        given, origin = read_plan(directory.plan), Origin.RUN
    else:
        given, origin = Plan(), Origin.DEFAULT
    origins |= dict.fromkeys(("plan", *_OF_PLANS), origin)
    if devices is not None and origin is Origin.DEFAULT:
        origins["layout"] = Origin.OPTION
    if wishes.workers is not None:
        origins["data.workers"] = Origin.OPTION
    elif "workers" in given.data.model_fields_set:
        origins["data.workers"] = origin
    if origin is Origin.RUN and options.exact and not given.execution.exact:
        # The run chose these values itself, so exact mode chooses them again.
        given = given.with_sections(batch={"grains_per_microbatch": 0}, execution={"channels_last": False})
    plan = apply_wishes(given, wishes, from_file=origin is Origin.FILE)
    if origin is Origin.RUN and plan.layout != given.layout:
        print(f"note: the run's layout, {described(given)}, becomes {described(plan)}", file=sys.stderr)
    if plan.serves:
        parts = "workers compute parts of different steps at a time, so that"
        if course.trace is not None:
            raise CommandError(
                given=f"--trace {course.trace} with servers (server.mode of the plan)",
                conflict=f"{parts} a step has no beginning of its own",
                remedy='leave --trace out, or trace the job with server.mode = "none"',
            )
        if course.bad_samples:
            raise CommandError(
                given=f"--bad-samples {course.bad_samples} with servers (server.mode of the plan)",
                conflict=f"{parts} there is no step before which all learn of a bad sample",
                remedy='leave --bad-samples out, or train with server.mode = "none"',
            )
    what = What(job, plan, options.max_microbatch, weights, recorded_grains=(saved or {}).get("grains"))
    where = Where(directory.path, options.address, numbered=None if options.out or options.resume else name)
    return RunRequest(what, where, course, options.started_at, origins)


# Settings of a plan whose origin is that of the plan.
_OF_PLANS = ("layout", "execution.channels_last", "collectives.all_reduce", "memory.shared")


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
    errors = RunDirectory(request.where.out).errors
    print(error.render(), file=sys.stderr)
    if error.traceback_text and error.traceback_file is None and errors.is_dir():
        print(f"  traceback:      {errors}", file=sys.stderr)
    return int(error.exit_code) if code is None else code


def _train(request: RunRequest, environment: Environment, signals: Signals, *, unprepared: bool = False) -> int:
    """Train in this process, with signals recorded in `signals`. Return the exit code."""
    with signals.handled():  # before the import of torch, which takes seconds
        from shoal.cli.run.train import run

        return run(request, environment, signals, unprepared=unprepared)
