"""Start of a run or a verification without torch: from the options to the request, and to ranks on this host."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import platform
import re
import resource
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from shoal.cli.main import end_without_threads
from shoal.cli.options import RunOptions, TrainingOptions, VerifyOptions
from shoal.cli.run.choose_plan import ask_planner, with_layout, with_plan
from shoal.cli.run.submit import RunEnd, joined_request, started_on_host, submitted
from shoal.cli.run.way_out import with_way_out
from shoal.cli.script import refuse_script_options, verify_as_it_is
from shoal.errors import CommandError, ExitCode, LaunchError, PlanError, ShoalError, from_json, say_note
from shoal.hardware.detect import cores, killed_for_memory, visible_gpus
from shoal.jobs.job_file import JobRequest, parse_target, with_settings_of
from shoal.jobs.settings import is_below, setting_text, source_of, written
from shoal.launch.environment import INSIDE, REQUEST_FILE, Environment, inside_run
from shoal.launch.environments.detect import detected, has_launcher, restarts
from shoal.launch.signals import Signals, exiting, stop_signals
from shoal.launch.supervise.child import Child, OutputRelay, as_command, how_it_ended, in_child, no_answer, rank_lost
from shoal.launch.supervise.fork_server import ForkServer
from shoal.launch.supervise.ranks import LaunchEnd, LocalRun, launch
from shoal.launch.supervise.recovery import Recovery
from shoal.planner.calibrate.processes import faster
from shoal.plans import Plan
from shoal.plans.grains import FEW_GRAINS
from shoal.plans.plan import described, read_plan
from shoal.plans.resolve import STEPS, Wishes, apply_wishes, sets_step
from shoal.plans.rules import shown
from shoal.report.quantities import several
from shoal.runs.address import is_address, working_copy
from shoal.runs.attempts import Events
from shoal.runs.directory import DirectoryLock, RunDirectory, default_directory, guarded_files, read_json, withdraw
from shoal.runs.options import Course, Origin, course_of, declared, initial_weights, whole_number
from shoal.runs.request import RunRequest, What, Where, claim_directory, devices_here, dumped, loaded
from shoal.runs.sound_values import adapter
from shoal.runs.step_trial import read_trial

_RANGE = re.compile(r"(\d+):(\d+)")
_PROCESSES_A_CORE = 4  # of a plan file; more are another machine's, unless --devices names the number
# Engines whose launcher chooses the number when it knows the available devices.
ELASTIC = ("hosts", "slurm", "ray", "spark")


def range_of(options: RunOptions) -> tuple[int, int] | None:
    """Return the least and the most devices, or None if the options have no range. Raises: CommandError."""
    match = _RANGE.fullmatch(str(options.devices)) if options.devices is not None else None
    if match is None:
        return None
    given, least, most = f"--devices {options.devices}", int(match[1]), int(match[2])
    if not 1 <= least <= most:
        raise CommandError(given=given, conflict="the first is the least number, from 1", remedy="write --devices 4:16")
    if options.plan is not None:
        raise CommandError(
            given=f"{given} --plan {options.plan}",
            conflict="a plan is for one number of devices",
            remedy="leave --plan out: the planner makes one for what there is; or write a number",
        )
    return least, most


def with_number(options: RunOptions, environment: Environment | None) -> RunOptions:
    """Return the options with a number of devices or a plan. Raises: CommandError; LaunchError for too few devices."""
    limits = range_of(options)
    if limits is None:
        return replace(options, devices=whole_number("--devices", options.devices, 1))
    given, (least, most) = f"--devices {options.devices}", limits
    if environment is not None:
        size = environment.world_size
        if not least <= size <= most:
            raise LaunchError(
                given=f"{given}, and {size} processes by {environment.engine or 'a launcher'}",
                conflict=f"the number of processes is not within {options.devices}",
                remedy="start another number, or write other limits",
            )
        return replace(options, devices=size)
    engine = options.on.partition(":")[0]
    if engine in ELASTIC:
        return replace(options, devices=most)
    if engine != "local":
        raise CommandError(
            given=f"{given} --on {options.on}",
            conflict=f"{engine} is asked for one number of processes, and gives it",
            remedy=f"write a number; a range is for local, torchrun, {', '.join(ELASTIC)}",
        )
    num_gpus = visible_gpus()
    there, kind = (num_gpus, "GPUs") if num_gpus else (cores(), "cores")
    if there < least:
        raise LaunchError(
            given=given,
            conflict=f"this host has {there} {kind}",
            remedy=f"write --devices {there}, or start it where there are more",
        )
    most = min(most, there)
    if options.resume or options.resume_if_exists:
        say_note(f"{given} takes {most} processes: this host has {there} {kind}")
        return replace(options, devices=most)
    plan, _ = ask_planner(options, most, least)
    number = plan.num_processes if plan is not None else most
    why = f"the planner chose {described(plan)}" if plan is not None else "the planner has no plan that fits"
    say_note(f"{given} is {number} of {there} {kind} here: {why}")
    return (
        replace(options, devices=number) if plan is None or options.exact else replace(options, devices=None, plan=plan)
    )


_REQUEST, _RESULT = "look.json", "result.json"
_POLL_SECONDS = 0.05
_PROGRAM = "import sys, shoal.cli.run.start; shoal.cli.run.start.probe(sys.argv[1])"


def look_aside(request: RunRequest, folder: Path, signals: Signals, stream: TextIO | None) -> RunRequest:
    """Return the request with its plan completed by another interpreter that loads the job.

    A fork of a process that already uses torch may lack threads of OpenMP or autograd, or lose CUDA. If a signal
    requests a stop, the request is returned unchanged.
    Raises: LaunchError if that process dies; errors of job and plan.
    """
    (folder / _REQUEST).write_text(dumped(request), encoding="utf-8")
    relay = OutputRelay(stream) if stream is not None else None
    output = relay.writer if relay is not None else None
    child = Child([sys.executable, "-c", _PROGRAM, str(folder)], variables={INSIDE: "1"}, output=output, errors=output)
    try:
        while child.process.poll() is None and not signals.received:
            signals.wait(_POLL_SECONDS)
    finally:
        code = child.finish(0.0)
        if relay is not None:
            relay.close()
    if signals.received:
        return request
    try:
        result = json.loads((folder / _RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise no_answer(code) from None
    return _judged_request(request, result)


def probe(path: str) -> None:
    """Probe the job of the request in a folder, and write the result to the folder."""
    from shoal.training.setup.preflight import look

    folder = Path(path)
    result = look(loaded(RunRequest, (folder / _REQUEST).read_text(encoding="utf-8")))
    (folder / _RESULT).write_text(json.dumps(result), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # do not wait for threads that the job's code started


@contextlib.contextmanager
def claimed(request: RunRequest) -> Iterator[tuple[RunRequest, DirectoryLock]]:
    """Yield a request for ranks on this host, with its plan checked and its directory locked."""
    request = request.with_devices(devices_here()).with_own_sums()
    request.check_plan()
    with claim_directory(request) as lock:
        RunDirectory(lock.folder).end_resize()  # a leftover resize request belongs to another call
        # Nobody has tried another number of processes on a GPU that one process has just left.
        alone = request.what.plan.num_processes == 1 and visible_gpus() > 0
        try:
            resizable = not (request.what.plan.serves or alone)
            yield replace(request, where=replace(request.where, out=lock.folder, resizable=resizable)), lock
        finally:
            if lock.is_new:
                with contextlib.suppress(OSError):
                    RunDirectory(lock.folder).discard_failed_start()
            withdraw(lock.folder)


def _judged_request(request: RunRequest, result: dict[str, Any]) -> RunRequest:
    """Return the request completed by a probe of its job. Raises: the error of the probe, with its traceback stored."""
    if "error" not in result:
        return loaded(RunRequest, result["request"])
    error = from_json(result["error"])
    RunDirectory(request.where.out).keep_traceback("launcher", error)
    raise error


def trained(request: RunRequest, lock: DirectoryLock, signals: Signals, stream: TextIO | None = None) -> RunEnd:
    """Train with ranks on this host. If a rank is lost, all restart from the newest checkpoint.

    `stream`: destination of rank 0's output, default this process's output. The caller handles signals.
    """
    recovery = Recovery(request.course.max_restarts, RunDirectory(request.where.out))
    arguments, killed = ["run", request.what.job.target], 0  # processes that the kernel had killed at the newest start
    excused: dict[str, float] = {}  # phases that have taken longer than expected, at any start

    def launched(restarts: int, lost_at: float, server: ForkServer) -> LaunchEnd:
        nonlocal request, killed
        killed = killed_for_memory()
        request = request.again(restarts, request.clock.zero + lost_at) if lost_at else request
        request = request.begun("lost ranks" if lost_at else "")
        if not lost_at:
            RunDirectory(request.where.out).end_resize()  # after a loss, a pending resize request stays
        recovery.events.fence = request.where.fence
        plan = request.what.plan
        run = LocalRun(
            arguments,
            plan.num_processes,
            request.what.threads_per_process,
            request.where.out / "logs",
            request=dumped(request),
            # The workers of servers come last, and may be replaced if they die.
            replaceable=range(1 + plan.server.num_servers, plan.num_processes) if plan.serves else range(0),
            unsaved=recovery.unsaved_seconds,
            excused=excused,
            stream=stream,
            lock=lock.descriptor,
        )
        return launch(run, signals, server)

    while True:
        with contextlib.closing(ForkServer(arguments, request.what.threads_per_process)) as server:
            code, error = recovery.until_done(signals, functools.partial(launched, server=server))
        following = resized(request, code, signals)
        if error is not None:
            return RunEnd(
                code, with_way_out(error, request, killed=killed_for_memory() > killed), tuple(signals.received)
            )
        if following is None:
            return RunEnd(code, None, tuple(signals.received))
        request = following


def resized(request: RunRequest, code: int, signals: Signals) -> RunRequest | None:
    """Return the request that continues with the requested number of processes, or None if the run has ended.

    If the number does not fit the run, a note says why and the run continues with its previous number.
    """
    directory = RunDirectory(request.where.out)
    devices = directory.requested_devices() if code == ExitCode.PREEMPTED and not signals.received else None
    if devices is None:
        return None
    ended_at, before = request.clock.now(), request.what.plan.num_processes
    events = Events(directory.events, request.where.fence)
    try:
        following = request.resized(devices, ended_at)
    except ShoalError as error:
        say_note(f"not resized\n{error.render()}")
        return replace(request, course=replace(request.course, resume=True), lost_at=ended_at)
    step = int((read_json(directory.saved) or {}).get("step", 0))
    events.add("resized", after_step=step, processes=devices, done=f"from {before} to {devices} processes")
    say_note(f"the run continues with {several(devices, 'process')} in place of {before}, from step {step}")
    return following


def load_rank() -> None:
    """Load the modules that ranks need, in the process that ranks are forked from."""
    for name in ("shoal.cli.run.train", "shoal.distributed.collectives.shared_memory.all_reduce", "numpy.ma"):
        importlib.import_module(name)
    adapter(RunRequest)


def run(options: RunOptions) -> int:
    """Train in this process, as a rank of a launcher, or with ranks that are started here or on an engine."""
    environment = detected(os.environ)
    handed_over = os.environ.pop(REQUEST_FILE, None)
    if environment is not None and handed_over is not None:
        request = loaded(RunRequest, Path(handed_over).read_text(encoding="utf-8"))
        # A program that a launcher has started leaves the directory to its ranks.
        return _train(request, environment, Signals(impatient=False), unprepared=not request.where.generation)
    with guarded_files(options.private), at_address(options) as options:
        options = with_plan(options, environment)
        limits = range_of(options)
        options = with_number(options, environment)
        if options.verify and environment is not None:
            raise CommandError(
                given=f"--verify, in a process that {environment.engine or 'a launcher'} has started",
                conflict="a verification starts its own processes",
                remedy="call shoal verify before, and leave --verify out",
            )
        if options.verify and options.resume:
            raise CommandError(
                given="--verify --resume",
                conflict="--verify checks the first two steps, and a resumed run does not begin with them",
                remedy="leave one of them out",
            )
        # A number of processes in words is the user's own; a launcher has its own.
        unnumbered = options.plan if environment is None and options.devices is None else None
        if options.verify and not options.dry_run and unnumbered is not None and options.on == "local":
            refuse_other_machine(requested(options).what.plan, unnumbered)
        if (
            options.verify
            and not options.dry_run
            and verify(verification_of(options), options.no_source, checks_machine=False) != ExitCode.DONE
        ):
            raise CommandError(
                given=f"--verify of {options.job if isinstance(options.job, str) else options.job.target}",
                conflict="the two steps are not verified, as said above, and nothing is trained",
                remedy="mend what it names, or leave --verify out",
            )
        if options.dry_run or (environment is None and options.on != "local"):
            return submitted(options, requested(options), least=limits[0] if limits is not None else None)
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
        if environment is None:
            if (
                request.origin("layout") is Origin.DEFAULT
                and request.what.plan.num_processes == 1
                and not visible_gpus()
            ):
                note_processes(request, options.precision)
            return _run_here(request, unnumbered, has_verified=options.verify)
        if environment.num_to_start:
            return started_on_host(options, request, environment)
        request = joined_request(request, environment)
        signals = Signals(impatient=not has_launcher(os.environ))
        for name, text in environment.variables().items():  # jobs may read torchrun's variables on any engine
            os.environ.setdefault(name, text)
        return _train(request, environment, signals, unprepared=True)


def refuse_other_machine(plan: Plan, given: Plan | str) -> None:
    """Refuse a plan for GPUs, or for far more processes than cores, on a machine without GPU. Raises: PlanError."""
    if visible_gpus():
        return
    number, num_cores, made_for = plan.num_processes, cores(), plan.prediction
    for_gpus = made_for.get("device_kind") == "gpu"
    if not for_gpus and number <= _PROCESSES_A_CORE * num_cores:
        return
    name = given if isinstance(given, str) else "a plan"
    device = f", made for {made_for.get('cluster', made_for.get('device', 'GPUs'))}" if for_gpus else ""
    raise PlanError(
        given=f"--plan {name}: {several(number, 'process')}{device}",
        conflict=f"this machine has {several(num_cores, 'core')} and no GPU",
        remedy=f"write --layout data={min(num_cores, FEW_GRAINS)} in place of --plan for this machine; or add "
        f"--devices {number} to start {'it' if number == 1 else f'all {number}'} here all the same",
    )


def note_processes(request: RunRequest, precision: str | None) -> None:
    """Print a note if this machine's planner expects more of several processes than of the one of this run."""
    pays = faster(request.what.job, precision)
    if pays is not None and pays[0] <= cores():
        number, each = pays[0], several(cores() // pays[0], "thread")
        faster_by = f"{pays[1] - 1:.0%} faster than this run's one process"
        say_note(f"{number} processes of {each} are predicted to be {faster_by}: write --devices {number}")


def _run_here(request: RunRequest, unnumbered: Plan | str | None, *, has_verified: bool) -> int:
    """Train in a child process or with ranks on this host, and return the exit code. Raises: LaunchError.

    `unnumbered`: the given plan, where no option names its number of processes.
    `has_verified`: this process has computed with torch, whose threads a fork does not copy. So it trains alone itself.
    """
    allow_open_files(request.what.plan.num_processes)
    with claimed(request) as (request, lock):
        if unnumbered is not None:
            refuse_other_machine(request.what.plan, unnumbered)
        if request.what.plan.num_processes == 1:
            request, signals = request.begun(), Signals(impatient=has_verified)
            code, error = _trained_alone(request, signals, forks=not has_verified)
            if error is not None:
                return tell(request, error)
            following = resized(request, code, signals)  # a stop request has priority over a resize request
            if following is None:
                return code
            request = following
        for note in request.notes():
            say_note(note)
        try:
            request, signals = looked_at(request) if request.what.needs_look else request, Signals(impatient=False)
            with signals.handled():
                ended = trained(request, lock, signals)
        except ShoalError as error:
            return tell(request, error)
        return tell(request, ended.error, ended.code) if ended.error is not None else ended.code


def _trained_alone(request: RunRequest, signals: Signals, *, forks: bool) -> tuple[int, ShoalError | None]:
    """Train in a forked child, before torch is loaded. Return the exit code, and the error of a child that died."""
    killed, pid = killed_for_memory(), os.getpid()

    def work() -> int:
        with inside_run(os.environ):
            return _train(request, Environment(), signals)

    if not forks:
        return work(), None
    code, status = as_command(work, signals, end_without_threads)
    if code is not None:
        return code, None
    fenced = status == ExitCode.RANK_LOST and not request.where.fence.is_open  # the child has printed why
    if fenced or signals.twice:
        return int(ExitCode.INTERRUPTED if signals.twice else status), None
    error = rank_lost(
        f"the process that trained (a child of process {pid})",
        f"it {how_it_ended(status)} without a word",
        host=platform.node(),
    )
    events = Events(RunDirectory(request.where.out).events, request.where.fence)
    events.add("lost", error, noticed="the end of its process", done="the run ended")
    return int(ExitCode.RANK_LOST), with_way_out(error, request, killed=killed_for_memory() > killed)


def allow_open_files(num_processes: int) -> None:
    """Raise this process's limit of open files, which its ranks inherit. Raises: LaunchError if that is too few."""
    wanted = 32 + 8 * num_processes  # two ranks were seen to start with 32, and to fail with 28
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != most < wanted:
        raise LaunchError(
            given=f"{num_processes} {'process' if num_processes == 1 else 'processes'} that may open {most} files each",
            conflict=f"about {wanted} are needed, for sockets between ranks and files of the run",
            remedy="raise the limit: ulimit -n 65536",
        )
    if resource.RLIM_INFINITY != allowed < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


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


def verify(options: VerifyOptions, no_source: bool = False, *, checks_machine: bool = True) -> int:
    """Verify the run that `shoal run` would train with these options, or a training script as it is.

    `checks_machine`: refuse the plan file of another machine, which `shoal run` has done where its ranks are local.
    """
    if options.script is not None or options.job is None:
        with exiting(stop_signals(), ExitCode.INTERRUPTED):
            return verify_as_it_is(options)
    refuse_script_options("verify", options)
    same = {one.name: getattr(options, one.name) for one in declared(TrainingOptions)} | {
        "started_at": options.started_at
    }
    with (
        at_address(RunOptions(**same, no_telemetry=True, no_source=no_source)) as run_options,
        claimed(requested(run_options, suffix="-verify")) as (request, _),
    ):
        if checks_machine and isinstance(options.plan, str) and options.devices is None:  # not of --layout in words
            refuse_other_machine(request.what.plan, options.plan)
        from shoal.cli.verify import verify  # imports torch, which the child that probes the job also uses

        # Exit in order, so that the traces are removed.
        with exiting(stop_signals(), ExitCode.INTERRUPTED):
            try:
                with inside_run(os.environ):
                    return verify(looked_at(request), options.steps or 3)
            except ShoalError as error:
                tell(request, error)
                return int(ExitCode.USER)  # for any error, since 1 means that the run diverged


def verification_of(options: RunOptions) -> VerifyOptions:
    """Return the options for two steps of `shoal verify` before a run, in a directory beside the run's."""
    same = {one.name: getattr(options, one.name) for one in declared(TrainingOptions) if one.name != "out"}
    if options.layout is not None:
        devices = whole_number("--devices", options.devices, 1)
        same |= {"plan": with_layout(Plan(), options.layout, devices), "devices": None}
    out = f"{options.out.rstrip('/')}-verify" if options.out and options.address is None else None
    return VerifyOptions(**same, out=out, steps=2)


def _note_overridden_files(of_call: JobRequest, job: JobRequest, saved: Mapping[str, Any]) -> None:
    """Print a note for each setting of other configuration files that one of the resumed run overrides.

    `of_call`: the job of this call. `job`: the same with the run's settings. `saved`: job.json of the run.
    """
    if [one.sha256 for one in of_call.config] == [one["sha256"] for one in saved.get("config") or ()]:
        return
    of_files = {name: setting for name, setting in of_call.settings if source_of(setting)}
    for name, setting in job.settings:
        for below in (one for one in of_files if is_below(one, name)):
            if setting_text(name, setting) != setting_text(below, of_files[below]):
                say_note(
                    f"{written(below, of_files[below])} changes nothing: {written(name, setting)} of the run "
                    f"overrides files; to change it write --set {below}=VALUE"
                )


def requested(options: RunOptions, suffix: str = "") -> RunRequest:
    """Create the request from options. `suffix`: end of a default directory's name.

    Raises: CommandError, JobFileError, SettingError, PlanError.
    """
    job = parse_target(options.job, options.set, options.config)
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
    devices = whole_number("--devices", options.devices, 1)
    directory = RunDirectory(Path(options.out) if options.out else default_directory(name, options.resume))
    saved = read_json(directory.job, exactly=True) if options.resume else None
    if saved:
        of_call, job = job, with_settings_of(job, saved)
        _note_overridden_files(of_call, job, saved)
    course, origins = course_of(options, saved)
    step = course.step if course.step in STEPS else None
    given_turns = Path(options.step) if options.step is not None and options.step.endswith(".json") else None
    if given_turns is not None and options.resume:
        raise CommandError(
            given=f"--step {given_turns} --resume",
            conflict="a run that goes on has its own turns",
            remedy="leave --step out, or leave --resume out and give another --out",
        )
    if given_turns is not None and read_trial(given_turns.resolve()) is None:
        raise CommandError(
            given=f"--step {given_turns}",
            conflict="there is no such file",
            remedy="give the trial.json of a run, or write --step eager, say",
        )
    wishes = Wishes(devices, options.exact, options.precision, options.workers, options.max_microbatch, step)
    if options.plan:
        given = options.plan if isinstance(options.plan, Plan) else read_plan(Path(options.plan), named=True)
        origin = Origin.FILE
    elif options.resume and directory.plan.exists():
        given, origin = read_plan(directory.plan), Origin.RUN
    else:
        given, origin = Plan(), Origin.DEFAULT
    origins |= dict.fromkeys(("plan", *_OF_PLANS), origin)
    if options.layout is not None:
        given = with_layout(given, options.layout, devices)
        origins["layout"] = Origin.OPTION
    if devices is not None and origin is Origin.DEFAULT:
        origins["layout"] = Origin.OPTION
    if wishes.workers is not None:
        origins["data.workers"] = Origin.OPTION
    elif "workers" in given.data.model_fields_set:
        origins["data.workers"] = origin
    if origin is Origin.FILE:
        keys = {"execution.channels_last": "channels_last" in given.execution.model_fields_set}
        keys["execution.step"] = bool(sets_step(given))
        origins |= {key: Origin.FILE if is_set else Origin.DEFAULT for key, is_set in keys.items()}
    if origin is Origin.RUN and options.exact and not given.execution.exact:
        # The run chose these values itself, so exact mode chooses them again.
        chosen = {"channels_last": False} | ({"cuda_graph": False, "compile": "none"} if step is None else {})
        given = given.with_sections(batch={"grains_per_microbatch": 0}, execution=chosen)
    plan = with_shares(apply_wishes(given, wishes, from_file=origin is Origin.FILE), options.shares, origin)
    if origin is Origin.RUN and plan.layout != given.layout:
        origins["layout"] = Origin.OPTION
        say_note(f"the run's layout, {described(given)}, becomes {described(plan)}")
    if plan.serves:
        for one in declared(Course):
            if one.unserved and getattr(course, one.name):
                raise CommandError(
                    given=f"{one.flag} {getattr(course, one.name)} with servers (server.mode of the plan)",
                    conflict=f"workers compute parts of different steps at a time, so that {one.unserved}",
                    remedy=f'leave {one.flag} out, or train with server.mode = "none"',
                )
    what = What(job, plan, options.max_microbatch, weights, recorded_grains=(saved or {}).get("grains"))
    where = Where(
        directory.path,
        options.address,
        numbered=None if options.out or options.resume else name,
        shares_gpu=options.share_gpu,
    )
    return RunRequest(what, where, course, options.started_at, origins)


def with_shares(plan: Plan, shares: str | None, origin: Origin) -> Plan:
    """Return the plan with the shares of `--shares`. Raises: PlanError if a plan file has others."""
    if shares is None or (shares == "by-speed" and origin is Origin.RUN):
        return plan
    numbers = [] if shares in ("equal", "by-speed") else [int(number) for number in shares.split(",")]
    if origin is Origin.FILE and shares != "by-speed" and plan.layout.shares not in ((), tuple(numbers)):
        raise PlanError(
            given=f"--shares {shares}",
            conflict=f"the plan file has {shown(plan, 'layout.shares')}",
            remedy="leave --shares out, or leave layout.shares out of the file",
        )
    return plan if shares == "by-speed" else plan.with_sections(layout={"shares": numbers})


# Settings of a plan whose origin is that of the plan.
_OF_PLANS = ("layout", "execution.channels_last", "execution.step", "collectives.all_reduce", "memory.shared")


def looked_at(request: RunRequest) -> RunRequest:
    """Return the request with its plan completed by a child process that loads the job.

    Raises: errors of job and plan.
    """

    def work() -> dict[str, Any]:
        from shoal.training.setup.preflight import look

        with inside_run(os.environ):
            return look(request)

    return _judged_request(request, in_child(work))


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
