"""Command-line options: fields of frozen values, from which each command's parser is built.

This module imports nothing heavy, since `shoal --help` reads it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Container, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from shoal.errors import CommandError
from shoal.jobs.job_module import JobModule

if TYPE_CHECKING:
    from shoal.jobs.job_file import JobRequest, Setting
    from shoal.plans import Plan

T = TypeVar("T")


def _option(text: str, metavar: str | None = None, *flags: str, default: Any = None, **more: Any) -> Any:
    """Create a field with arguments for argparse. Without `flags`, the option has the field's name.

    `least`: the option is a whole number of at least this value.
    `between`: LEAST:MOST is also accepted.
    """
    told = {"flags": flags, "least": more.pop("least", None), "between": more.pop("between", False)}
    told["settings"] = {"help": text, **({"metavar": metavar} if metavar else {}), **more}
    return field(default=default, metadata=told)


def _job(**more: Any) -> Any:
    return _option("a Python file and its job function (default: job)", "JOBFILE[:FUNCTION]", "job", **more)


def _switch(text: str, default: bool | None = False) -> Any:
    return _option(text, default=default, action="store_true")


_PRECISION = ("fp32, bf16, bf16-pure or fp16", "P")
_SET = ("set a parameter of the job function", "K=V")
_SET_AS_RUN = ("set a parameter of the job function (default: as the run)", "K=V")


@dataclass(frozen=True)
class TrainingOptions:
    """Options that name a training and its devices."""

    job: str | JobRequest = _job(default=MISSING)  # noqa: RUF009  (a field, as the others)
    started_at: float = field(default_factory=time.time)  # start of the command; not an option
    plan: str | Plan | None = _option("a plan (TOML); what it leaves out is filled in", "FILE")  # noqa: RUF009
    devices: int | str | None = _option(
        "processes: one a GPU, or CPU processes (default: all GPUs, or 1)", "N", least=1
    )
    exact: bool | None = _switch("bit-identical on any number of devices", default=None)
    precision: str | None = _option(*_PRECISION)
    set: tuple[str | tuple[str, Setting], ...] = _option(*_SET, default=(), action="append")
    out: str | None = _option("output directory (default: runs/NAME or runs/NAME-verify)", "DIR")
    max_microbatch: int | None = _option("the most samples in one forward", "N", least=1)
    workers: int | None = _option("data-loading processes per rank (default: 0)", "N", least=0)


@dataclass(frozen=True)
class RunOptions(TrainingOptions):
    """Options of `shoal run`."""

    devices: int | str | None = _option(
        "processes: one a GPU, or CPU processes (default: all GPUs, or 1); 4:16 for what there is between the two",
        "N|LEAST:MOST",
        least=1,
        between=True,
    )
    steps: int | None = _option("end after step N; the schedule stays that of the job's own length", "N", least=1)
    resume: bool = _switch("go on from the newest good checkpoint in the run directory")
    resume_if_exists: bool = _switch("--resume where the run directory has a run, a new run where it has none")
    accept_changes: bool = _switch("with --resume: go on although the job was changed")
    checkpoint_every: int | None = _option("steps between checkpoints (default: about 1 %% of the time)", "N", least=1)
    evaluate_every: int | None = _option("steps between evaluations (default: after each epoch)", "N", least=1)
    keep_checkpoints: str | int | None = _option(
        "how many of the newest checkpoints are kept, or all (default: 3, or as the run that is resumed)", "N|all"
    )
    require_certificate: str | None = _option("train only what `shoal verify` has verified", "FILE")
    no_telemetry: bool = _switch("no spans and no step records")
    track: tuple[str, ...] = _option(
        "also log to tensorboard, mlflow, wandb or trackio, with a place after a colon; may be given several times",
        "T[:WHERE]",
        default=(),
        action="append",
    )
    trace: str | None = _option("write torch's profile of these steps, of all ranks, for Perfetto: 10-12", "STEPS")
    bad_samples: int | None = _option(
        "leave out up to N samples that cannot be read, and name them (default: 0, or as the run that is resumed)",
        "N",
        least=0,
    )
    check_replicas: int | None = _option(
        "compare the replicas of the model every N steps, and roll back where a bit has flipped", "N", least=1
    )
    max_restarts: int = _option(
        "starts of lost ranks in a row that bring no new step or checkpoint (default: 5; 0: a lost rank ends the run)",
        "N",
        default=5,
        least=0,
    )
    init_from: str | None = _option(
        "initial weights: a run, a checkpoint, a .safetensors or .pt file, or a Hugging Face model folder", "PATH"
    )
    init_allow: str | None = _option(
        "with --init-from: tensors that may differ: missing, unexpected, mismatched (default: none)", "KINDS"
    )
    init_rename: tuple[str, ...] = _option(
        "with --init-from: rename a prefix of names", "OLD=NEW", default=(), action="append"
    )
    on: str = _option(
        "where the ranks are started: local (default), or an engine of docs/engines, with its options after a colon",
        "ENGINE[:OPTIONS]",
        default="local",
    )
    dry_run: bool = _switch("print what would be started or submitted, and end")
    address: str | None = None  # of the run directory if `out` is a working copy; not an option


@dataclass(frozen=True)
class VerifyOptions(TrainingOptions):
    """Options of `shoal verify`."""

    steps: int = _option("steps to compare (default: 3)", "K", default=3, least=1)


@dataclass(frozen=True)
class PlanOptions:
    """Options of `shoal plan`."""

    job: str | None = _option(
        "a Python file and its job function (default: job), or a folder with a Hugging Face config.json",
        "JOBFILE[:FUNCTION]|hf:DIR",
        "job",
        nargs="?",
    )
    cluster: str = _option("8xH100, 4x8xA100, FILE.toml or here (default)", "C", default="here")
    aim: str = _option(
        "fastest (default); cheapest; deadline=2h: the cheapest that ends the whole job in 2 hours; "
        "efficiency=0.8: the fewest devices that keep 80%% of the best throughput per device; "
        "widest=0.8: the most devices that do",
        "A",
        default="fastest",
    )
    max_devices: int | None = _option("use at most N devices", "N", least=1)
    seq: int | None = _option("of hf:DIR, tokens of a sequence", "N", least=1)
    batch: int | None = _option("of hf:DIR, sequences or images of a step", "N", least=1)
    precision: str | None = _option(*_PRECISION)
    set: tuple[str | tuple[str, Setting], ...] = _option(*_SET, default=(), action="append")
    mtbf: str | float | None = _option("hours between failures of one device, on average", "HOURS")
    price: str | float | None = _option("US dollars of a device-hour (default: the catalogue's)", "DOLLARS")
    tokens: str | float | None = _option("the job's length in tokens, such as 1e12, for its time and cost", "N")
    samples: str | float | None = _option("the job's length in samples", "N")
    output: str | None = _option("write the plan, for shoal run --plan", "FILE", "-o", "--output")
    html: str | None = _option("write a page with the curve, the waterfalls and every reason", "FILE")
    learn: tuple[str, ...] | None = _option("correct the predictions by what these runs took", "RUNDIR", nargs="+")


_STEP = "last (default), best (where the job watches a metric), or the step that a checkpoint was taken after"
_RUN = "a run directory, or one checkpoint"


@dataclass(frozen=True)
class ExportOptions:
    """Options of `shoal export`."""

    run: str = _option(_RUN, "RUN", "run", default=MISSING)
    output: str | None = _option("a new folder (default: RUN/export)", "DIR", "-o", "--output")
    step: str = _option(_STEP, "STEP", default="last")
    ema: bool = _switch("the averaged weights of a run with the callback EMA")
    max_shard_size: str = _option("the most bytes in a file (default: 5GB)", "SIZE", default="5GB")
    dtype: str | None = _option(
        "convert floating-point tensors (default: as they were trained)", choices=["bfloat16", "float16", "float32"]
    )
    tokenizer: str | None = _option("copy the tokenizer's files from this folder", "DIR")


@dataclass(frozen=True)
class EvaluateOptions:
    """Options of `shoal evaluate`."""

    job: str | JobRequest = _job(default=MISSING)  # noqa: RUF009  (a field, as the others)
    run: str = _option(_RUN, "RUN", "run", default=MISSING)
    step: str = _option(_STEP, "STEP", default="last")
    ema: bool = _switch("the averaged weights of a run with the callback EMA")
    devices: int | None = _option("processes: one a GPU, or CPU processes (default: all GPUs, or 1)", "N", least=1)
    set: tuple[str | tuple[str, Setting], ...] = _option(*_SET_AS_RUN, default=(), action="append")
    json: bool = _switch("print one JSON object and nothing else")


@dataclass(frozen=True)
class DoctorOptions:
    """Options of `shoal doctor`."""

    run: str | None = _option("a run directory; without one this machine is examined", "RUN", "run", nargs="?")
    job: str | None = _option(
        "the run's job, which the planner is asked about and --try runs: a Python file and its job function",
        "JOBFILE[:FUNCTION]",
    )
    try_out: bool = _option(
        "run the three best remedies for some steps, beside the run as it is",
        None,
        "--try",
        default=False,
        action="store_true",
        dest="try_out",
    )
    steps: int | None = _option("with --try: steps of each trial", "N", least=10)
    hosts: str | None = _option(
        "try ports between these hosts, reached by ssh; its options after them", "A,B[ OPTIONS]"
    )
    folder: str = _option("where runs are written, for the trial of the disk (default: runs)", "DIR", default="runs")
    json: bool = _switch("print one JSON object and nothing else")


@dataclass(frozen=True)
class PredictOptions:
    """Options of `shoal predict`."""

    job: str | JobRequest = _job(default=MISSING)  # noqa: RUF009  (a field, as the others)
    run: str = _option(_RUN, "RUN", "run", default=MISSING)
    output: str | None = _option(
        "a new file, .npz or .safetensors (default: RUN/predictions.npz)", "FILE", "-o", "--output"
    )
    data: str | None = _option("eval (default), train, or the name of one of several evaluation sets", "NAME")
    step: str = _option(_STEP, "STEP", default="last")
    ema: bool = _switch("the averaged weights of a run with the callback EMA")
    devices: int | None = _option("processes, each with the whole model (default: 1)", "N", least=1)
    set: tuple[str | tuple[str, Setting], ...] = _option(*_SET_AS_RUN, default=(), action="append")


@dataclass(frozen=True)
class ReportOptions:
    """Options of `shoal report`."""

    runs: tuple[str, ...] = _option("a run directory; of several what differs", "RUN", "runs", default=(), nargs="+")
    output: str | None = _option(
        "the page (default: RUN/report.html; of several runs report.html)", "FILE", "-o", "--output"
    )
    json: bool = _switch("print the account as JSON and nothing else")


@dataclass(frozen=True)
class WatchOptions:
    """Options of `shoal watch`."""

    run: str = _option("a run directory, of a run on any host that shares it", "RUN", "run", default=MISSING)
    once: bool = _switch("show it once, for scripts")
    openmetrics: str | None = _option("also write its numbers for Prometheus, as OpenMetrics text", "FILE")


@dataclass(frozen=True)
class ResizeOptions:
    """Options of `shoal resize`."""

    run: str = _option("the directory of a run that trains now", "RUN", "run", default=MISSING)
    devices: int = _option("processes that it is to go on with", "N", "devices", default=MISSING, least=1)


@dataclass(frozen=True)
class BenchOptions:
    """Options of `shoal bench`."""

    what: str = _option(
        "machine (default): all that `shoal plan` reads; collectives: every all-reduce side by side, and what "
        "`auto` chooses by",
        None,
        "what",
        default="machine",
        nargs="?",
        choices=["machine", "collectives"],
    )
    sizes: str | None = _option("of collectives, in bytes (default: 1K to 256M)", "LIST")
    out: str | None = _option("write the cluster file here too (TOML)", "FILE", "-o", "--out")
    quick: bool = _switch("fewer sizes and samples, about 15 s")
    ranks: str | None = _option("the most processes at once (default: one a GPU, or one a core up to 8)", "N")


def _options(kind: Any) -> list[Field[Any]]:
    return [found for found in fields(kind) if found.metadata]


def add_options(parser: argparse.ArgumentParser, kind: Any) -> None:
    """Add the options of a kind to a parser, in order."""
    for option in _options(kind):
        flags = option.metadata["flags"] or (f"--{option.name.replace('_', '-')}",)
        default = None if option.default is MISSING else option.default
        default = list(default) if isinstance(default, tuple) else default  # a list, since argparse appends to it
        parser.add_argument(*flags, default=default, **option.metadata["settings"])


def options_of(kind: type[T], parsed: argparse.Namespace) -> T:
    """Convert parsed arguments to options. Raises: CommandError for an invalid whole number."""
    values = {}
    for name in option_names(kind):
        value = getattr(parsed, name)
        values[name] = tuple(value) if isinstance(value, list) else value
    return options_from(kind, values)


def arguments_of(options: Any, without: Container[str] = ()) -> list[str]:
    """Convert options to command-line words from which `options_of` makes the same options. Defaults are omitted.

    `without`: names to skip. Raises: CommandError for a value that cannot be written as a word.
    """
    words: list[str] = []
    if "job" in option_names(type(options)) and not isinstance(options.job, str):
        options = replace(options, **_job_by_name(options.job))
    for option in _options(type(options)):
        value, flags = getattr(options, option.name), option.metadata["flags"]
        if option.name in without or value == option.default:
            continue
        flag = flags[-1] if flags else f"--{option.name.replace('_', '-')}"
        if option.metadata["settings"].get("action") == "store_true":
            words += [flag] if value else []
            continue
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, tuple):  # a job's setting
                from shoal.jobs.job_file import setting_text  # imported late: pydantic

                one = f"{one[0]}={setting_text(*one)}"
            if not isinstance(one, str | int | float):
                raise CommandError(
                    given=f"{option.name}={one!r:.60}",
                    conflict="it is a value of this process, and another is to read it",
                    remedy="give the path of a file",
                )
            words += [f"{one}"] if not flag.startswith("-") else [flag, f"{one}"]
    return words


def _job_by_name(job: JobRequest) -> dict[str, Any]:
    """Return the options `job` and `set` from which another process finds a job function in a file.

    Raises: CommandError if the job is not in a file of its own.
    """
    if job.by_value or (job.handed is not None and job.module != JobModule.of_file(job.path)):
        raise CommandError(
            given="a job that is an object of this program",
            conflict="the ranks are started by an engine, on other hosts too, which do not have it",
            remedy='write the job function into a file of its own, and give its path: shoal.run("file.py:job", ...)',
        )
    return {"job": f"{job.target}:{job.function}" if job.function else job.target, "set": job.settings}


def option_names(kind: Any) -> tuple[str, ...]:
    """Return the names of a kind's options, in order."""
    return tuple(option.name for option in _options(kind))


def options_from(kind: type[T], values: Mapping[str, Any]) -> T:
    """Create options from values by name. Raises: CommandError as `options_of`."""
    checked = dict(values)
    for option in _options(kind):
        least = option.metadata["least"]
        between = option.metadata["between"] and ":" in str(checked.get(option.name))
        if least is not None and option.name in checked and not between:
            checked[option.name] = whole_number(option.name, checked[option.name], least)
    return kind(**checked)


def whole_number(name: str, text: Any, least: int) -> int | None:
    """Parse a whole number of at least `least` for an option. Raises: CommandError."""
    if text is None:
        return None
    try:
        value = least - 1 if isinstance(text, bool | float) else int(text)
    except (TypeError, ValueError):
        value = least - 1
    if value < least:
        flag = f"--{name.replace('_', '-')}"
        raise CommandError(
            given=f"{flag} {text}",
            conflict=f"{flag} takes a whole number of at least {least}",
            remedy=f"write {flag} 2, say",
        )
    return value
