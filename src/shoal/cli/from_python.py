"""Functions of the commands: `shoal.run`, `plan`, `export`, `evaluate` and `predict`, with the same options."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.finished_run import Run
from shoal.cli.hints import meant
from shoal.cli.notebook_progress import progress_stream
from shoal.cli.options import EvaluateOptions, ExportOptions, PlanOptions, PredictOptions, RunOptions
from shoal.cli.run.choose_plan import with_plan
from shoal.cli.run.start import at_address, claimed, look_aside, requested, trained
from shoal.cli.run.submit import RunEnd, is_worker, joined_request, submitted, trained_as_rank, trained_in_worker
from shoal.errors import CommandError, ExitCode, JobError, LaunchError, SettingError, say_note
from shoal.jobs.handed_job import hand_over_value
from shoal.jobs.job import Job
from shoal.jobs.job_file import JobRequest, called, parameters_of, with_config
from shoal.jobs.job_object import function_name, hand_over, is_job, place_of
from shoal.jobs.settings import Setting, settings_from, written
from shoal.launch.environment import INSIDE, LAUNCHER_PID, inside_run
from shoal.launch.environments.detect import detected, refuse_rank, restarts
from shoal.launch.signals import Signals
from shoal.launch.supervise.child import other_stream
from shoal.plans import Plan
from shoal.plans.resolve import warn_of
from shoal.runs.directory import RunDirectory, guarded_files, read_json
from shoal.runs.options import Option, Origin, declared, option_names, options_from
from shoal.runs.request import devices_here

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.checkpoint.store import Step
    from shoal.planner.answer.display import Answer
    from shoal.planner.search.search import Candidate

PathText = str | os.PathLike[str]
JobLike = PathText | Job | Callable[..., Any]


def run(
    job: JobLike,
    *,
    settings: Mapping[str, Any] | None = None,
    plan: PathText | Plan | Answer | Candidate | None = None,
    devices: int | None = None,
    exact: bool | None = None,
    precision: str | None = None,
    config: PathText | Sequence[PathText] = (),
    out: PathText | None = None,
    max_microbatch: int | None = None,
    share_gpu: bool = False,
    workers: int | None = None,
    steps: int | None = None,
    resume: bool = False,
    resume_if_exists: bool = False,
    accept_changes: bool = False,
    checkpoint_every: int | None = None,
    evaluate_every: int | None = None,
    keep_checkpoints: int | str | None = None,
    require_certificate: PathText | None = None,
    no_source: bool = False,
    private: bool = False,
    records: str | None = None,
    no_telemetry: bool = False,
    track: str | Sequence[str] = (),
    trace: str | int | None = None,
    bad_samples: int | None = None,
    check_replicas: int | None = None,
    max_restarts: int = 5,
    init_from: PathText | None = None,
    init_allow: str | None = None,
    init_rename: Mapping[str, str] | Sequence[str] = (),
    step: PathText | None = None,
    shares: str | None = None,
    layout: str | None = None,
    cluster: str | None = None,
    on: str = "local",
    **job_settings: Any,
) -> Run:
    """Train a job with ranks on this host or on an engine, and wait for the end; `shoal run` as a function.

    | argument | meaning |
    |---|---|
    | `job` | a job function, a `shoal.Job`, or "file.py:function" as for the command |
    | `settings` | parameters of the job function, which may also be given as keywords |
    | `plan` | a plan file, a `shoal.Plan`, an answer of `shoal.plan`, or "auto"; what it leaves out is filled in |
    | `devices` | number of processes, one a GPU or on the CPU; default: all GPUs, or 1 |
    | `exact` | compute the same bits on any number of devices, at some cost |
    | `precision` | compute in fp32, bf16, bf16-pure, fp16 or fp8 (default: as the plan or the job says) |
    | `config` | YAML, TOML or JSON files with settings; later ones, and settings, override earlier ones |
    | `out` | the run directory, or its address (s3://...); default: runs/NAME |
    | `max_microbatch` | put at most N samples in one forward (default: as many as fit the plan) |
    | `share_gpu` | let several processes share a GPU, over Gloo and slowly, for tests |
    | `workers` | load data with N processes per rank (default: 0) |
    | `steps` | end after step N of the same schedule (default: the job's length) |
    | `resume` | continue from the newest good checkpoint in the run directory |
    | `resume_if_exists` | resume from the newest good checkpoint if the directory has a run, else start one |
    | `accept_changes` | with resume: go on although the job was changed |
    | `checkpoint_every` | write a checkpoint every N steps (default: as often as costs 1 % of the time) |
    | `evaluate_every` | evaluate every N steps (default: after each epoch) |
    | `keep_checkpoints` | how many of the newest checkpoints are kept, or "all"; default: 3, or as the resumed run |
    | `require_certificate` | train only what this certificate of shoal verify covers |
    | `no_source` | do not record the git commit, uncommitted changes, packages and command line |
    | `private` | let only you read the run directory (mode 0700) |
    | `records` | "all": each step has a record; default: "blocks" beyond step 10,000, or as the resumed run |
    | `no_telemetry` | write no spans and no step records |
    | `track` | trackers that also get the records: "tensorboard", or "mlflow:runs.db" with a place |
    | `trace` | steps to profile for Perfetto, of all ranks: 10 or "10-12" |
    | `bad_samples` | skip up to so many samples that cannot be read, and name them; default: 0, or as the resumed run |
    | `check_replicas` | compare the model's replicas every so many steps, and roll back after a flipped bit |
    | `max_restarts` | most starts of lost ranks in a row that bring no new step; 0: a lost rank ends the run |
    | `init_from` | begin with weights of a run, a checkpoint, a .safetensors or .pt file, or a Hugging Face folder |
    | `init_allow` | for init_from: tensors that may differ, "missing,unexpected,mismatched"; default: none |
    | `init_rename` | for init_from: prefixes of names, old to new |
    | `step` | "eager", "graph", "compiled", "compiled-graph", or a trial.json; default: "auto", by a trial |
    | `shares` | "by-speed": ranks get grains in proportion to their measured speed; "2,1": by these numbers |
    | `layout` | divide the run along these axes, in place of --plan: data=2,tensor=2 |
    | `cluster` | plan for this cluster with --plan auto, as shoal plan does (default: this machine) |
    | `on` | where the ranks are started: "local", or an engine with its options, "slurm:--time=60" |

    Each rank is a new interpreter. cloudpickle passes a job that is in no file to the ranks. Under torchrun, each
    process of the program starts the one rank of its number. After an interrupt, a checkpoint is saved before the call
    raises KeyboardInterrupt or, for SIGTERM, SystemExit with code 75 (130 before the ranks start).
    Raises: the errors of the command; LaunchError inside a rank.
    """
    given = dict(locals())
    is_own = is_worker(os.environ) or INSIDE in os.environ or LAUNCHER_PID in os.environ
    launched = None if is_own or on != "local" else detected(os.environ)
    if launched is None or launched.num_to_start:
        launched = None
        if not is_worker(os.environ):
            refuse_rank(os.environ, "shoal.run")
    values = {one.name: _as_option(one, given[one.name]) for one in declared(RunOptions) if one.name in given}
    if plan is None or isinstance(plan, Plan | str | os.PathLike):
        values["plan"] = os.fspath(plan) if isinstance(plan, os.PathLike) else plan
    elif isinstance(getattr(plan, "plan", None), Plan):
        values["plan"] = plan.plan
    else:
        raise CommandError(
            given=f"plan={plan!r:.80}",
            conflict=f"a value of type {type(plan).__name__} is no plan",
            remedy='write plan="FILE.toml", a shoal.Plan, or an answer of shoal.plan',
        )
    of_job, signals = settings_of("shoal.run", RunOptions, given), Signals(impatient=False)
    # Handle signals before the folder exists: their default action would leave the job's pickle behind.
    with signals.handled(), tempfile.TemporaryDirectory(prefix="shoal-job-") as folder:
        options = options_from(RunOptions, values | target_of(job, of_job, values["config"], Path(folder)))
        with guarded_files(options.private), at_address(options) as options:
            options = options if is_worker(os.environ) else with_plan(options, launched)
            request = requested(options)
            if launched is not None:
                if options.out is not None and not options.resume:  # a launcher's restart resumes
                    request = request.restarted(restarts(os.environ))
                request = joined_request(request, launched)
                request, ended = trained_as_rank(request, launched, Path(folder), signals)
            elif is_worker(os.environ):
                if request.origin("max_restarts") is Origin.OPTION:
                    no_effect = (
                        "no effect in a worker of Ray Train, whose FailureConfig says how often workers start again"
                    )
                    warn_of([f"max_restarts={max_restarts}: {no_effect}"])
                ended = trained_in_worker(options, request, signals)
            elif on != "local":
                ended = RunEnd(submitted(options, request, signals), None, tuple(signals.received))
            else:
                with claimed(request) as (request, lock):
                    for note in request.notes():
                        say_note(note)
                    stream, shown = progress_stream(other_stream())
                    request = replace(request, shown_elsewhere=shown)
                    if request.what.needs_look and not signals.received:  # only that shows whether ranks can start
                        request = look_aside(request, Path(folder), signals, stream)
                    if signals.received:
                        ended = RunEnd(int(ExitCode.INTERRUPTED), None, tuple(signals.received))
                    else:
                        ended = trained(request, lock, signals, stream)
            files = RunDirectory(request.where.out, request.where.address)
            if ended.error is not None:
                if ended.error.traceback_text and files.errors.is_dir():
                    ended.error.add_note(f"traceback of the rank: {files.shown}/{files.errors.name}")
                raise ended.error
            # Without signals here, only the ranks received them.
            if ended.code in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED):
                step = (read_json(files.saved) or {}).get("step")
                goes_on = f"its checkpoint is of step {step}: resume=True, out={files.shown!r} goes on"
                message = f"the run was stopped; {goes_on if step else 'no checkpoint'}"
                if signal.SIGINT in ended.signals:
                    raise KeyboardInterrupt(message)
                print(message, file=sys.stderr)
                raise SystemExit(ended.code)
            if ended.code != ExitCode.DONE:  # an engine's code; the engine has printed the reason
                raise LaunchError(
                    given=f"shoal.run(..., out={files.shown!r})",
                    conflict=f"it ended with exit code {ended.code}",
                    remedy="read its output, and errors/ in the run directory",
                )
    finished = Run(request.where.address or request.where.out, job)
    finished._settings = request.what.job.settings  # with its secrets
    return finished


def plan(
    job: JobLike,
    *,
    settings: Mapping[str, Any] | None = None,
    config: PathText | Sequence[PathText] = (),
    cluster: str = "here",
    aim: str = "fastest",
    max_devices: int | None = None,
    seq: int | None = None,
    batch: int | None = None,
    precision: str | None = None,
    mtbf: float | str | None = None,
    price: float | str | None = None,
    tokens: float | str | None = None,
    samples: float | str | None = None,
    **job_settings: Any,
) -> Answer:
    """Search the best layout of a job on a cluster, with its costs and alternatives; `shoal plan` as a function.

    | argument | meaning |
    |---|---|
    | `job` | a job function, a `shoal.Job`, "file.py:function", or "hf:DIR" of a Hugging Face configuration |
    | `settings` | parameters of the job function, which may also be given as keywords |
    | `config` | YAML, TOML or JSON files with settings; later ones, and `settings`, override earlier ones |
    | `cluster` | "8xH100", "4x8xA100", "FILE.toml" or "here" |
    | `aim` | "fastest", "cheapest", "deadline=2h", "efficiency=0.8" or "widest=0.8" |
    | `max_devices` | maximum number of devices to use |
    | `seq`, `batch` | for "hf:DIR": tokens of a sequence; sequences or images of a step |
    | `precision` | "fp32", "bf16", "bf16-pure", "fp16" or "fp8" |
    | `mtbf` | mean hours between failures of one device |
    | `price` | US dollars per device-hour; default: from the catalogue |
    | `tokens`, `samples` | the job's length, for its time and cost |

    Nothing runs on the cluster. The job is loaded in this process.
    Raises: the errors of the command.
    """
    given = dict(locals())
    values = {one.name: _as_option(one, given[one.name]) for one in declared(PlanOptions) if one.name in given}
    of_job = settings_of("shoal.plan", PlanOptions, given)
    from shoal.cli.plan import answered  # torch

    if isinstance(job, str | os.PathLike):
        return answered(options_from(PlanOptions, values | target_of(job, of_job, values["config"], Path())))
    request = JobRequest(_short(place_of(job)), function_name(job), tuple(of_job.items()))
    request = with_config(request, values["config"])
    name = f"{request.path}:{request.function or 'job'}"
    with inside_run(os.environ):
        loaded, _ = called(job, request)
    return answered(options_from(PlanOptions, values | {"job": name}), (loaded, name))


def _as_option(option: Option, value: Any) -> Any:
    """Return a keyword's value in the form of the command's option."""
    if option.settings.get("action") == "append":
        if isinstance(value, Mapping):
            return tuple(f"{old}={new}" for old, new in value.items())
        several = (value,) if isinstance(value, str | os.PathLike) else value
        return tuple(os.fspath(one) if isinstance(one, os.PathLike) else one for one in several)
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def target_of(job: Any, settings: Mapping[str, Setting], config: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return the options `job`, `set` and `config` for a job given in Python."""
    if isinstance(job, str | os.PathLike):
        return {"job": os.fspath(job), "set": tuple(settings.items()), "config": config}
    place, name = _short(place_of(job)), function_name(job)
    request = with_config(JobRequest(place, name, tuple(settings.items()), hand_over(job, folder)), config)
    return {"job": request, "set": (), "config": ()}


def _short(path: Path) -> Path:
    """Return the path relative to the current folder if it is below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def settings_of(call: str, kind: type[Any], given: Mapping[str, Any]) -> dict[str, Setting]:
    """Return the settings of the job function.

    Raises: JobError if `job` is no job; CommandError for a keyword that is neither option nor parameter; SettingError.
    """
    job, named = given["job"], given["job_settings"]
    if isinstance(job, str | os.PathLike):
        known, where = parameters_of(os.fspath(job)), os.fspath(job)
    elif is_job(job):
        where, known = f"{place_of(job)}:{function_name(job) or 'job'}", []
        if callable(job):
            with contextlib.suppress(TypeError, ValueError):  # a callable implemented in C
                known = list(inspect.signature(job).parameters)
    else:
        raise JobError(
            given=f"{call}({job!r:.60}, ...)",
            conflict=f"a value of type {type(job).__name__} is no job",
            remedy='give a job function, a shoal.Job, or the path of a job file: "file.py:function"',
        )
    if isinstance(given["config"], Mapping):
        raise CommandError(
            given=f"{call}(..., config={given['config']!r:.60})",
            conflict="config= takes files",
            remedy="write settings= for a mapping",
        )
    options = [name for name in option_names(kind) if name not in ("job", "set")]
    wrong = [name for name in named if name not in known] if known or not isinstance(job, str | os.PathLike) else []
    if wrong:
        raise CommandError(
            given=f"{call}({', '.join(f'{name}={named[name]!r}' for name in wrong)})",
            conflict=f"{', '.join(wrong)} is no option of {call}, and no parameter of {where}",
            remedy=f"use one of its parameters ({', '.join(known) or 'none'}) or an option of help({call})"
            + "".join(meant(name, [*options, *known]) for name in wrong),
        )
    settings = settings_from(given["settings"] if given["settings"] is not None else {})
    for name, setting in settings_from(named).items():
        if repr(settings.setdefault(name, setting)) != repr(setting):  # repr, since 1 == True
            raise SettingError(
                given=f"settings: {written(name, settings[name])}, and {written(name, setting)}",
                conflict=f"{name} is set twice",
                remedy="write one of them",
            )
    return settings


RunLike = PathText | Run


def export(
    run: RunLike,
    output: PathText | None = None,
    *,
    step: Step = "last",
    ema: bool = False,
    max_shard_size: str | int = "5GB",
    dtype: str | None = None,
    tokenizer: PathText | None = None,
) -> Path:
    """Export a run's weights as safetensors in the Hugging Face layout, and return the folder; as `shoal export`.

    | argument | meaning |
    |---|---|
    | `run` | a run directory, one checkpoint, or a `shoal.Run` |
    | `output` | a new folder; default: RUN/export |
    | `step` | "last", "best", or the step of a checkpoint |
    | `ema` | use the averaged weights of a run with the callback EMA |
    | `max_shard_size` | maximum size of a file: "5GB" |
    | `dtype` | "bfloat16", "float16" or "float32", for floating-point tensors |
    | `tokenizer` | a folder from which the tokenizer's files are copied |

    Raises: the errors of the command.
    """
    from shoal.cli.export import exported  # torch

    if dtype not in (None, "bfloat16", "float16", "float32"):
        raise CommandError(
            given=f"dtype={dtype!r}",
            conflict="dtype takes 'bfloat16', 'float16' or 'float32'",
            remedy="write dtype='bfloat16', or leave it out for that of the training",
        )
    paths = {"output": output, "tokenizer": tokenizer}
    texts = {name: os.fspath(path) if path is not None else None for name, path in paths.items()}
    given = {"step": str(step), "ema": ema, "max_shard_size": str(max_shard_size), "dtype": dtype}
    return exported(options_from(ExportOptions, {"run": _path(run), **given, **texts}))[0]


def evaluate(
    job: JobLike,
    run: RunLike,
    *,
    settings: Mapping[str, Any] | None = None,
    config: PathText | Sequence[PathText] = (),
    step: Step = "last",
    ema: bool = False,
    devices: int | None = None,
    **job_settings: Any,
) -> dict[str, Any]:
    """Evaluate a job with a run's weights, and return {"metrics", "samples", "step", "run"}; as `shoal evaluate`.

    | argument | meaning |
    |---|---|
    | `job` | a job function, a `shoal.Job`, or "file.py:function" |
    | `run` | a run directory, one checkpoint, or a `shoal.Run` |
    | `settings` | parameters of the job function, also as keywords; default: the settings of the run |
    | `config` | YAML, TOML or JSON files with settings; later ones, and `settings`, override earlier ones |
    | `step` | "last", "best", or the step of a checkpoint |
    | `ema` | use the averaged weights of a run with the callback EMA |
    | `devices` | number of processes, one per GPU or on the CPU; default: all GPUs, or 1 |

    Each process is a new interpreter, as for `shoal.run`.
    Raises: the errors of the command; LaunchError inside a rank; KeyboardInterrupt.
    """
    given = dict(locals())
    refuse_rank(os.environ, "shoal.evaluate")
    signals = Signals(impatient=False)
    with signals.handled(), tempfile.TemporaryDirectory(prefix="shoal-job-") as folder:
        options = options_from(EvaluateOptions, _values("shoal.evaluate", EvaluateOptions, given, Path(folder)))
        from shoal.cli.trained_engine import evaluate_request, in_ranks, on_this_host  # torch

        result = Path(folder) / "result.json"
        with on_this_host(evaluate_request(options, result)) as request:
            ended = in_ranks(request, "evaluate", options.devices or devices_here(), signals, other_stream())
        _raise(ended.error, ended.code, signals)
        return read_json(result) or {}


def predict(
    job: JobLike,
    run: RunLike,
    *,
    data: Any = None,
    output: PathText | None = None,
    settings: Mapping[str, Any] | None = None,
    config: PathText | Sequence[PathText] = (),
    step: Step = "last",
    ema: bool = False,
    devices: int | None = None,
    **job_settings: Any,
) -> dict[str, Tensor]:
    """Return the outputs of a run's model by name, and `ids`, with one row per sample in the order of the data.

    | argument | meaning |
    |---|---|
    | `job` | a job function, a `shoal.Job`, or "file.py:function"; its `predict` defines the outputs |
    | `run` | a run directory, one checkpoint, or a `shoal.Run` |
    | `data` | a dataset of any kind that a job takes, "train", "eval" (default), or an evaluation set's name |
    | `output` | a new file, .npz or .safetensors, for the outputs |
    | `settings` | parameters of the job function, also as keywords; default: the settings of the run |
    | `config` | YAML, TOML or JSON files with settings; later ones, and `settings`, override earlier ones |
    | `step` | "last", "best", or the step of a checkpoint |
    | `ema` | use the averaged weights of a run with the callback EMA |
    | `devices` | number of processes, each with the whole model; default: 1 |

    Each process is a new interpreter, as for `shoal.run`. The command `shoal predict` only writes the file, of any
    size.
    Raises: the errors of the command; LaunchError inside a rank; KeyboardInterrupt.
    """
    given = dict(locals())
    refuse_rank(os.environ, "shoal.predict")
    signals = Signals(impatient=False)
    with signals.handled(), tempfile.TemporaryDirectory(prefix="shoal-job-") as folder:
        file = Path(folder) / "predictions.safetensors" if output is None else Path(output)
        values = _values("shoal.predict", PredictOptions, given, Path(folder))
        named = data if isinstance(data, str) else None
        options = options_from(PredictOptions, {**values, "output": os.fspath(file), "data": named})
        from shoal.cli.trained_engine import in_ranks, on_this_host, predict_request  # torch
        from shoal.training.microbatch.predictions import read

        request = predict_request(options, quiet=True)
        if data is not None and named is None:
            request = replace(request, handed=hand_over_value(data, Path(folder)))
        with on_this_host(request) as here:
            ended = in_ranks(here, "predict", options.devices or 1, signals, other_stream())
        _raise(ended.error, ended.code, signals)
        return read(file)


def _values(call: str, kind: Any, given: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the options of a call by name, with the job prepared for other processes."""
    values = {one.name: _as_option(one, given[one.name]) for one in declared(kind) if one.name in given}
    target = target_of(given["job"], settings_of(call, kind, given), values["config"], folder)
    return values | {"run": _path(given["run"]), "step": str(given["step"])} | target


def _path(run: RunLike) -> str:
    return os.fspath(run.out if isinstance(run, Run) else run)


def _raise(error: Exception | None, code: int, signals: Signals) -> None:
    """Raise the error of the processes, or KeyboardInterrupt or SystemExit if this process was stopped."""
    if signal.SIGINT in signals.received:
        raise KeyboardInterrupt
    if signals.received:
        sys.exit(int(ExitCode.INTERRUPTED))
    if error is not None:
        raise error
    if code != ExitCode.DONE:
        raise SystemExit(code)
