"""Command-line options: fields of frozen values, from which each command's parser is built.

This module imports nothing heavy, since `shoal --help` reads it.
"""

from __future__ import annotations

import time
from dataclasses import MISSING, dataclass, field
from typing import TYPE_CHECKING, Any

from shoal.runs.options import Course, option, switch

if TYPE_CHECKING:
    from shoal.jobs.job_file import JobRequest
    from shoal.jobs.settings import Setting
    from shoal.plans import Plan

_JOB = ("take the job from this function of a Python file (default: job)", "JOBFILE[:FUNCTION]", "job")
_PRECISION = ("compute in fp32, bf16, bf16-pure, fp16 or fp8 (default: as the plan or the job says)", "P")
_SET = ("set a parameter of the job function, or a key below it: model.width=64", "K=V")
_CONFIG = ("read settings from a YAML, TOML or JSON file, below --set and later files", "FILE")
_SET_AS_RUN = ("set a parameter of the job function (default: as in the run)", "K=V")
_CPU = "run a script that is written for GPUs on processes of the CPU"
_BATCH = ("fill {batch} of a script with N, the samples of one process (default: 8)", "N")
_LAUNCHER: dict[str, Any] = {
    "text": "start the script as this launcher does (default: torchrun)",
    "default": "torchrun",
    "choices": ["torchrun", "accelerate", "deepspeed", "python"],
}
_JSON = "print one JSON object and nothing else"


@dataclass(frozen=True)
class TrainingOptions:
    """Options that name a training and its devices."""

    job: str | JobRequest = option(*_JOB, default=MISSING)
    started_at: float = field(default_factory=time.time)  # start of the command; not an option
    plan: str | Plan | None = option(
        "lay the run out as this TOML file says, or as the planner finds best (default: data parallel)", "FILE|auto"
    )
    devices: int | str | None = option(
        "use N processes, one a GPU or on the CPU (default: all GPUs, or 1)", "N", least=1
    )
    exact: bool | None = switch("compute the same bits on any number of devices, at some cost", default=None)
    precision: str | None = option(*_PRECISION)
    set: tuple[str | tuple[str, Setting], ...] = option(*_SET, default=(), action="append")
    config: tuple[str, ...] = option(*_CONFIG, default=(), action="append")
    out: str | None = option("write into this directory (default: runs/NAME; of verify, runs/NAME-verify)", "DIR")
    max_microbatch: int | None = option(
        "put at most N samples in one forward (default: as many as fit the plan)", "N", least=1
    )
    share_gpu: bool = switch("let several processes share a GPU, over Gloo and slowly, for tests")
    workers: int | None = option("load data with N processes per rank (default: 0)", "N", least=0)


@dataclass(frozen=True)
class RunOptions(Course, TrainingOptions):
    """Options of `shoal run`."""

    devices: int | str | None = option(
        "use N processes, as many as there are of LEAST to MOST, or as many as pay off (default: all GPUs, or 1)",
        "N|LEAST:MOST|auto",
        least=1,
        between=True,
    )
    layout: str | None = option("divide the run along these axes, in place of --plan: data=2,tensor=2", "AXIS=N,...")
    cluster: str | None = option(
        "plan for this cluster with --plan auto, as shoal plan does (default: this machine)", "C"
    )
    verify: bool = switch("verify two steps as shoal verify does before the run")
    on: str = option(
        "start the ranks here or on an engine, such as slurm:--time=60 (default: local)",
        "ENGINE[:OPTIONS]",
        default="local",
    )
    dry_run: bool = switch("print what would be started or submitted, and end")
    address: str | None = None  # of the run directory if `out` is a working copy; not an option


@dataclass(frozen=True)
class VerifyOptions(TrainingOptions):
    """Options of `shoal verify`."""

    job: str | JobRequest | None = option(*_JOB, nargs="?")  # type: ignore[assignment]
    plan: str | Plan | None = option("lay the ranks out as this TOML file says (default: data parallel)", "FILE")
    steps: int | None = option("compare K steps (default: 3; of a script, 10)", "K", least=1)
    script: str | None = option(
        "check this training script as it is, in place of a job: 'train.py --batch-size {batch}'", "COMMAND"
    )
    launcher: str = option(**_LAUNCHER)
    batch: int | None = option(*_BATCH, least=1)
    cpu: bool = switch(_CPU)
    keep: bool = switch("keep what was recorded of a script: inputs, gradients, weights")


@dataclass(frozen=True)
class PlanOptions:
    """Options of `shoal plan`."""

    job: str | None = option(
        "plan this function of a Python file (default: job), or a folder with a Hugging Face config.json",
        "JOBFILE[:FUNCTION]|hf:DIR",
        "job",
        nargs="?",
    )
    cluster: str = option("plan for 8xH100, 4x8xA100, FILE.toml or here (default: here)", "C", default="here")
    aim: str = option(
        "prefer the fastest, the cheapest, the cheapest that ends the job in time (deadline=2h), or the fewest or most "
        "devices that keep 80%% of the best throughput per device (efficiency=0.8, widest=0.8) (default: fastest)",
        "A",
        default="fastest",
    )
    max_devices: int | None = option("use at most N devices (default: all of the cluster)", "N", least=1)
    script: str | None = option(
        "plan this training script as it is, in place of a job: 'train.py --batch-size {batch}'", "COMMAND"
    )
    launcher: str = option(**_LAUNCHER)
    cpu: bool = switch(_CPU)
    seq: int | None = option("plan hf:DIR for sequences of N tokens", "N", least=1)
    batch: int | None = option(
        "plan hf:DIR for N sequences or images a step, or fill {batch} of a script with N (default: 8)", "N", least=1
    )
    precision: str | None = option(*_PRECISION)
    set: tuple[str | tuple[str, Setting], ...] = option(*_SET, default=(), action="append")
    config: tuple[str, ...] = option(*_CONFIG, default=(), action="append")
    mtbf: str | float | None = option(
        "expect a failure of a device each HOURS on average (default: no failures)", "HOURS"
    )
    price: str | float | None = option(
        "count DOLLARS (US) for a device-hour (default: the catalogue's price)", "DOLLARS"
    )
    tokens: str | float | None = option(
        "estimate time and cost of N tokens, such as 1e12 (default: the job's length)", "N"
    )
    samples: str | float | None = option("estimate time and cost of N samples (default: the job's length)", "N")
    output: str | None = option("write the plan to FILE, for shoal run --plan", "FILE", "-o", "--output")
    emit: str | None = option(
        "also write the best layout for accelerate, deepspeed, torchtitan, megatron, lightning or fsdp2 as its own "
        "configuration, into FILE or below the answer",
        "NAME[=FILE]",
    )
    html: str | None = option("write an HTML page with the curve, the waterfalls and every reason to FILE", "FILE")
    more: bool = switch("also print other layouts, the parts of a step and of memory, and assumptions")
    learn: tuple[str, ...] | None = option("correct later predictions by what these runs took", "RUNDIR", nargs="+")


@dataclass(frozen=True, kw_only=True)
class WeightsOptions:
    """Options that name the weights of a run."""

    run: str = option("read the weights of this run directory or checkpoint", "RUN", "run", default=MISSING)
    step: str = option(
        "take the checkpoint of this step, the last one, or the best by the job's metric (default: last)",
        "STEP",
        default="last",
    )
    ema: bool = switch("take the averaged weights of a run with the callback EMA")


@dataclass(frozen=True)
class ExportOptions(WeightsOptions):
    """Options of `shoal export`."""

    output: str | None = option("write into this new folder (default: RUN/export)", "DIR", "-o", "--output")
    max_shard_size: str = option("write at most SIZE bytes to a file (default: 5GB)", "SIZE", default="5GB")
    dtype: str | None = option(
        "convert floating-point tensors (default: as they were trained)", choices=["bfloat16", "float16", "float32"]
    )
    tokenizer: str | None = option("copy the tokenizer's files from this folder", "DIR")


@dataclass(frozen=True, kw_only=True)
class WeightsOfJobOptions(WeightsOptions):
    """Options that name a job and the weights of a run of it."""

    job: str | JobRequest = option(*_JOB, default=MISSING)
    set: tuple[str | tuple[str, Setting], ...] = option(*_SET_AS_RUN, default=(), action="append")
    config: tuple[str, ...] = option(*_CONFIG, default=(), action="append")


@dataclass(frozen=True)
class EvaluateOptions(WeightsOfJobOptions):
    """Options of `shoal evaluate`."""

    devices: int | None = option("use N processes, one a GPU or on the CPU (default: all GPUs, or 1)", "N", least=1)
    json: bool = switch(_JSON)


@dataclass(frozen=True)
class DoctorOptions:
    """Options of `shoal doctor`."""

    run: str | None = option("examine this run directory (default: this machine)", "RUN", "run", nargs="?")
    job: str | None = option("ask the planner about the run's job, and run it with --try", "JOBFILE[:FUNCTION]")
    set: tuple[str | tuple[str, Setting], ...] = option(*_SET_AS_RUN, default=(), action="append")
    try_out: bool = option(
        "run the three best remedies for some steps, beside the run as it is",
        None,
        "--try",
        default=False,
        action="store_true",
        dest="try_out",
    )
    steps: int | None = option(
        "train N steps in each trial of --try (default: 40, or more for rare events), or of a script (20)",
        "N",
        least=10,
    )
    script: str | None = option(
        "examine this training script as it is, in place of a run: 'train.py --batch-size {batch}'", "COMMAND"
    )
    devices: int | str | None = option("run a script on N processes (default: all GPUs, or 2)", "N", least=1)
    launcher: str = option(**_LAUNCHER)
    batch: int | None = option(*_BATCH, least=1)
    cpu: bool = switch(_CPU)
    out: str | None = option(
        "write doctor.json and the output of a script's ranks here (default: runs/NAME-doctor)", "DIR"
    )
    hosts: str | None = option(
        "try ports between these hosts over ssh, with options of ssh behind them", "A,B[ OPTIONS]"
    )
    folder: str = option("try the disk of this folder (default: runs)", "DIR", default="runs")
    json: bool = switch(_JSON)


@dataclass(frozen=True)
class PredictOptions(WeightsOfJobOptions):
    """Options of `shoal predict`."""

    output: str | None = option(
        "write this new file, .npz or .safetensors (default: RUN/predictions.npz)", "FILE", "-o", "--output"
    )
    data: str | None = option(
        "predict eval, train or one of several evaluation sets by its name (default: eval)", "NAME"
    )
    devices: int | None = option("use N processes, each with the whole model (default: 1)", "N", least=1)


@dataclass(frozen=True)
class ReportOptions:
    """Options of `shoal report`."""

    runs: tuple[str, ...] = option(
        "read this run directory; a page of several shows what differs", "RUN", "runs", default=(), nargs="+"
    )
    output: str | None = option(
        "write the page to FILE (default: RUN/report.html; of several runs, report.html)", "FILE", "-o", "--output"
    )
    json: bool = switch("print the account as JSON and nothing else")


@dataclass(frozen=True)
class RunsOptions:
    """Options of `shoal runs`."""

    words: tuple[str, ...] = option(
        "list or prune a folder of runs (default: list runs), or compare, show, delete or reproduce runs",
        "WORD",
        "words",
        default=(),
        nargs="*",
    )
    sort: str | None = option(
        "order the list by a column: name, began, state, steps, loss, best, time or size; -loss has the largest first "
        "(default: name)",
        "COLUMN",
    )
    filter: tuple[str, ...] = option(
        "list only runs with this value of a column or setting, such as state=failed; may be repeated",
        "NAME=VALUE",
        default=(),
        action="append",
    )
    keep_best: int | None = option("keep the N best runs when pruning", "N", least=1)
    metric: str | None = option(
        "compare runs by this metric when pruning (default: the metric that the jobs watch)", "NAME:min|max"
    )
    yes: bool = switch("delete without a question")
    json: bool = switch("print JSON and nothing else")


@dataclass(frozen=True)
class WatchOptions:
    """Options of `shoal watch`."""

    run: str = option(
        "show the run of this directory, on any host that shares the directory", "RUN", "run", default=MISSING
    )
    once: bool = switch("show the run once, for scripts")
    openmetrics: str | None = option("also write its numbers for Prometheus to FILE, as OpenMetrics text", "FILE")


@dataclass(frozen=True)
class ResizeOptions:
    """Options of `shoal resize`."""

    run: str = option("resize the run that trains in this directory", "RUN", "run", default=MISSING)
    devices: int = option("continue with N processes", "N", "devices", default=MISSING, least=1)


@dataclass(frozen=True)
class BenchOptions:
    """Options of `shoal bench`."""

    what: str = option(
        "measure all that shoal plan reads, or every all-reduce side by side (default: machine)",
        None,
        "what",
        default="machine",
        nargs="?",
        choices=["machine", "collectives"],
    )
    sizes: str | None = option("measure collectives of these sizes in bytes (default: 1K to 256M)", "LIST")
    out: str | None = option("write the cluster file to FILE too, as TOML", "FILE", "-o", "--out")
    quick: bool = switch("measure fewer sizes and samples, in about 15 s")
    ranks: str | None = option("measure at most N processes at once (default: one a GPU, or one a core up to 8)", "N")
