"""Command-line options: fields of frozen values, from which each command's parser is built.

This module imports nothing heavy, since `shoal --help` reads it.
"""

from __future__ import annotations

import time
from dataclasses import MISSING, dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from shoal.runs.options import Course, option, switch

if TYPE_CHECKING:
    from shoal.jobs.job_file import JobRequest
    from shoal.jobs.settings import Setting
    from shoal.plans import Plan

T = TypeVar("T")


def _job(**more: Any) -> Any:
    return option(
        "take the job from this function of a Python file (default: job)", "JOBFILE[:FUNCTION]", "job", **more
    )


def _launcher(page: str, **more: Any) -> Any:
    return option(
        "start the script as this launcher does (default: torchrun)",
        default="torchrun",
        choices=["torchrun", "accelerate", "deepspeed", "python"],
        page=page,
        refused="another name; a job",
        **more,
    )


_PRECISION = ("compute in fp32, bf16, bf16-pure or fp16 (default: as the plan or the job says)", "P")
_SET = ("set a parameter of the job function, or a key below it: model.width=64", "K=V")
_CONFIG = ("read settings from a YAML, TOML or JSON file, below --set and later files", "FILE")
_SET_AS_RUN = ("set a parameter of the job function (default: as the run)", "K=V")
_PATH = "PathText | None"
_CPU = "run a script that is written for GPUs on processes of the CPU"


@dataclass(frozen=True)
class TrainingOptions:
    """Options that name a training and its devices."""

    job: str | JobRequest = _job(  # noqa: RUF009  (a field, as the others)
        default=MISSING,
        keyword="JobLike",
        page="a Python file and its function",
        refused="no such file or function, a file that raises",
    )
    started_at: float = field(default_factory=time.time)  # start of the command; not an option
    plan: str | Plan | None = option(  # noqa: RUF009
        "lay the run out as this TOML file says, or as the planner finds best (default: data parallel)",
        "FILE|auto",
        keyword="PathText | Plan | Answer | Candidate | None",
        call='a plan file, a `shoal.Plan`, an answer of `shoal.plan`, or "auto"; what it leaves out is filled in',
        page="a plan as TOML; `auto`: [the planner's best](plan.md#one-command)",
        refused="unknown keys, wrong values, all at once",
    )
    devices: int | str | None = option(
        "use N processes, one a GPU or on the CPU (default: all GPUs, or 1)", "N", least=1
    )
    exact: bool | None = switch(
        "compute the same bits on any number of devices, at some cost",
        default=None,
        page="over the plan's `execution.exact`",
        refused="as `execution.exact`",
    )
    precision: str | None = option(
        *_PRECISION,
        page="`fp32`, `bf16`, `bf16-pure`, `fp16`; over the plan's section. Unset, on a GPU with tensor cores, float32 "
        "[as torch computes it](how-to/large-models.md#precision-on-a-gpu)",
        refused="an unknown name",
    )
    set: tuple[str | tuple[str, Setting], ...] = option(
        *_SET,
        default=(),
        action="append",
        keyword=None,
        page="a parameter of the job function",
        refused="unknown names, wrong types, two values of one; with `--resume` other values, but of "
        "[the length](fine-tuning.md)",
    )
    config: tuple[str, ...] = option(
        *_CONFIG,
        default=(),
        action="append",
        keyword="PathText | Sequence[PathText]",
        call="YAML, TOML or JSON files with settings; later ones, and settings, override earlier ones",
        page="a YAML, TOML or JSON file with [settings](jobs.md#settings); `--set` and later files override it",
        refused="another kind of file, a key that is there twice, names and types as for `--set`",
    )
    out: str | None = option(
        "write into this directory (default: runs/NAME or runs/NAME-verify)",
        "DIR",
        keyword=_PATH,
        call="the run directory, or its address (s3://...); default: runs/NAME",
        page="the run directory, or [an address](engines/addresses.md) such as `s3://bucket/run`; without it "
        "`runs/NAME`, then `runs/NAME-2`",
        refused="one that holds a run, without `--resume`; an address that nothing reaches",
    )
    max_microbatch: int | None = option(
        "put at most N samples in one forward (default: as many as fit the plan)",
        "N",
        least=1,
        page="the most samples in one forward, in whole grains",
        refused="fewer than a grain has",
    )
    share_gpu: bool = switch(
        "let several processes share a GPU, over Gloo and slowly, for tests",
        page="processes share the GPUs, for tests: their collectives go [through the host](verify.md#on-one-gpu), "
        "over Gloo",
        refused="a CUDA graph; a plan of the planner, or a range of devices; noted: no GPU",
    )
    workers: int | None = option(
        "load data with N processes per rank (default: 0)",
        "N",
        least=0,
        page="over the plan's `data.workers`",
        refused="as `data.workers`",
    )


@dataclass(frozen=True)
class RunOptions(Course, TrainingOptions):
    """Options of `shoal run`."""

    devices: int | str | None = option(
        "use N processes, as many as there are of LEAST to MOST, or as many as pay off (default: all GPUs, or 1)",
        "N|LEAST:MOST|auto",
        least=1,
        between=True,
        call="number of processes, one a GPU or on the CPU; default: all GPUs, or 1",
        keyword="int | None",
        page="processes, along the data axis; `4:16` takes [as many as there "
        "are](engines/index.md#as-many-as-there-are) between the two; `auto`: as many as pay off; "
        "with `--resume` of a divided run, along its own axes",
        refused="another number than a plan or a launcher has, or than there are; a range with a plan; noted: another "
        "layout than the run's",
    )
    layout: str | None = option(
        "divide the run along these axes, in place of --plan: data=2,tensor=2",
        "AXIS=N,...",
        page="the plan's degrees, in place of `--plan`: `data=2,tensor=2`",
        refused="an unknown axis; `--plan` beside it",
    )
    cluster: str | None = option(
        "plan for this cluster with --plan auto, as shoal plan does (default: this machine)",
        "C",
        page="with `--plan auto`: the cluster that is planned for, as for `shoal plan`; without it this machine, or "
        "the hosts of `--on hosts:`",
        refused="without `--plan auto` or `--devices auto`; an unknown name; without `--on` or `--dry-run`, devices "
        "that are not here",
    )
    verify: bool = switch(
        "verify two steps as shoal verify does before the run",
        keyword=None,
        page="before the run, two steps of it are [verified](verify.md), in `DIR-verify` or `runs/NAME-verify`",
        refused="a divergence",
    )
    on: str = option(
        "start the ranks here or on an engine, such as slurm:--time=60 (default: local)",
        "ENGINE[:OPTIONS]",
        default="local",
        call='where the ranks are started: "local", or an engine with its options, "slurm:--time=60"',
        page="where ranks start: `local`, or an engine with its options after a colon",
        refused="another name; options that the engine does not take",
    )
    dry_run: bool = switch(
        "print what would be started or submitted, and end",
        keyword=None,
        page="prints what would be started or submitted, and ends",
    )
    address: str | None = None  # of the run directory if `out` is a working copy; not an option


@dataclass(frozen=True)
class VerifyOptions(TrainingOptions):
    """Options of `shoal verify`."""

    job: str | JobRequest | None = _job(  # type: ignore[assignment]  # noqa: RUF009  (a field, as the others)
        default=None, nargs="?", page="a Python file and its function", refused="no such file, a file that raises"
    )
    steps: int | None = option(
        "compare K steps (default: 3, of a script 10)", "K", least=1, page="steps; without it 3, of a script 10"
    )
    script: str | None = option(
        "check this training script as it is, in place of a job: 'train.py --batch-size {batch}'",
        "COMMAND",
        page="[a training script](scripts.md) and its arguments, in place of a job; `{batch}` and `{devices}` are "
        "filled in",
        refused="a job beside it; options that only a job has; a script that is not there",
    )
    launcher: str = _launcher(
        "of a script: whose environment its processes get; `python`: the script starts them itself"
    )
    batch: int | None = option(
        "fill {batch} of a script with N, the samples of one process (default: 8)",
        "N",
        least=1,
        page="of a script: what `{batch}` is filled with; without it 8",
        refused="0; a job",
    )
    cpu: bool = switch(
        _CPU,
        page="of a script that is [written for GPUs](scripts.md#on-a-machine-without-gpus): it runs on processes of "
        "the CPU",
        refused="a job; CUDA graphs, GPU kernels",
    )
    keep: bool = switch(
        "keep what was recorded of a script: inputs, gradients, weights",
        page="of a script: the recorded tensors stay in `DIR/tensors`",
        refused="a job",
    )


@dataclass(frozen=True)
class PlanOptions:
    """Options of `shoal plan`."""

    job: str | None = option(
        "plan this function of a Python file (default: job), or a folder with a Hugging Face config.json",
        "JOBFILE[:FUNCTION]|hf:DIR",
        "job",
        nargs="?",
        page="a Python file and its function, or `hf:DIR` with a `config.json`",
        refused="no such file or function, a file that raises; no configuration, an unknown architecture",
    )
    cluster: str = option(
        "plan for 8xH100, 4x8xA100, FILE.toml or here (default: here)",
        "C",
        default="here",
        page="a name of the catalogue, a TOML file, or here",
        refused="an unknown name",
    )
    aim: str = option(
        "prefer the fastest, the cheapest, the cheapest that ends the job in time (deadline=2h), or the fewest or most "
        "devices that keep 80%% of the best throughput per device (efficiency=0.8, widest=0.8) (default: fastest)",
        "A",
        default="fastest",
        page="which plan is [best](plan.md#aims)",
        refused="an unknown aim",
    )
    max_devices: int | None = option(
        "use at most N devices (default: all of the cluster)", "N", least=1, page="no more devices", refused="0"
    )
    script: str | None = option(
        "plan this training script as it is, in place of a job: 'train.py --batch-size {batch}'",
        "COMMAND",
        keyword=None,
        page="[a training script](plan.md#a-script) and its arguments, in place of a job",
        refused="a job beside it; options that only a job has; a script that is not there",
    )
    launcher: str = _launcher("as for `shoal verify`", keyword=None)
    cpu: bool = switch(_CPU, keyword=None, page="as for `shoal verify`", refused="a job")
    seq: int | None = option(
        "plan hf:DIR for sequences of N tokens",
        "N",
        least=1,
        page="of `hf:DIR`, tokens of a sequence",
        refused="a job file; 0",
    )
    batch: int | None = option(
        "plan hf:DIR for N sequences or images a step, or fill {batch} of a script with N (default: 8)",
        "N",
        least=1,
        page="of `hf:DIR`, sequences or images of a step; of a script, what `{batch}` is filled with",
        refused="a job file; 0",
    )
    precision: str | None = option(*_PRECISION, page="as for `shoal run`")
    set: tuple[str | tuple[str, Setting], ...] = option(*_SET, default=(), action="append", page="as for `shoal run`")
    config: tuple[str, ...] = option(*_CONFIG, default=(), action="append", page="as for `shoal run`")
    mtbf: str | float | None = option(
        "expect a failure of a device each HOURS on average (default: no failures)",
        "HOURS",
        page="hours between failures of a device",
        refused="0",
    )
    price: str | float | None = option(
        "count DOLLARS (US) for a device-hour (default: the catalogue's price)",
        "DOLLARS",
        page="US dollars of a device-hour, over the catalogue's",
        refused="0",
    )
    tokens: str | float | None = option(
        "estimate time and cost of N tokens, such as 1e12 (default: the job's length)",
        "N",
        page="the job's length in tokens",
        refused="0; samples that are no tokens",
    )
    samples: str | float | None = option(
        "estimate time and cost of N samples (default: the job's length)", "N", refused="0; `--tokens` beside it"
    )
    output: str | None = option(
        "write the plan to FILE, for shoal run --plan",
        "FILE",
        "-o",
        "--output",
        page="writes the plan",
        refused="a folder",
    )
    emit: str | None = option(
        "also write the best layout for accelerate, deepspeed, torchtitan, megatron, lightning or fsdp2 as its own "
        "configuration, into FILE or below the answer",
        "NAME[=FILE]",
        page="also plans for another framework, and writes [its configuration](plan.md#other-frameworks): "
        "`accelerate`, `deepspeed`, `torchtitan`, `megatron`, `lightning`, `fsdp2`",
        refused="another name; a folder; no layout of its that fits",
    )
    html: str | None = option(
        "write an HTML page with the curve, the waterfalls and every reason to FILE",
        "FILE",
        page="writes a page",
        refused="a folder",
    )
    more: bool = switch(
        "also other layouts, the parts of a step and of memory, assumptions",
        page="also prints other layouts, the parts of a step and of memory, what would change it, and assumptions",
    )
    learn: tuple[str, ...] | None = option(
        "correct later predictions by what these runs took",
        "RUNDIR",
        nargs="+",
        page="corrects predictions by these runs",
        refused="any other option, a job",
    )


_STEP = "take the checkpoint of this step, the last one, or the best by the job's metric (default: last)"
_RUN = "read the weights of this run directory or checkpoint"


@dataclass(frozen=True)
class ExportOptions:
    """Options of `shoal export`."""

    run: str = option(_RUN, "RUN", "run", default=MISSING, refused="no checkpoint; a damaged one, by name")
    output: str | None = option(
        "write into this new folder (default: RUN/export)",
        "DIR",
        "-o",
        "--output",
        page="a new folder; without it `RUN/export`",
        refused="one that has files",
    )
    step: str = option(
        _STEP, "STEP", default="last", page="`last`, `best`, or the step of a checkpoint", refused="a step without one"
    )
    ema: bool = switch(
        "take the averaged weights of a run with the callback EMA",
        page="the averaged weights of a run with `shoal.EMA`",
        refused="a run without",
    )
    max_shard_size: str = option(
        "write at most SIZE bytes to a file (default: 5GB)",
        "SIZE",
        default="5GB",
        page="the most bytes in a file; GB is 10⁹, GiB 2³⁰",
        refused="what is no size",
    )
    dtype: str | None = option(
        "convert floating-point tensors (default: as they were trained)",
        choices=["bfloat16", "float16", "float32"],
        page="`bfloat16`, `float16` or `float32`, for floating-point tensors",
        refused="another",
    )
    tokenizer: str | None = option(
        "copy the tokenizer's files from this folder",
        "DIR",
        page="copies the tokenizer's files from a folder",
        refused="a folder without any",
    )


@dataclass(frozen=True)
class EvaluateOptions:
    """Options of `shoal evaluate`."""

    job: str | JobRequest = _job(default=MISSING, page="as for `shoal run`", refused="another model, no `eval_data`")  # noqa: RUF009  (a field, as the others)
    run: str = option(_RUN, "RUN", "run", default=MISSING, page="as for `shoal export`")
    step: str = option(_STEP, "STEP", default="last", page="as for `shoal export`")
    ema: bool = switch("take the averaged weights of a run with the callback EMA", page="as for `shoal export`")
    devices: int | None = option(
        "use N processes, one a GPU or on the CPU (default: all GPUs, or 1)",
        "N",
        least=1,
        page="processes, along the axes of the run",
        refused="more data ranks than grains",
    )
    set: tuple[str | tuple[str, Setting], ...] = option(
        *_SET_AS_RUN, default=(), action="append", page="as for `shoal run`; others as the run's"
    )
    config: tuple[str, ...] = option(*_CONFIG, default=(), action="append", page="as for `shoal run`")
    json: bool = switch("print one JSON object and nothing else", page="prints one JSON object")


@dataclass(frozen=True)
class DoctorOptions:
    """Options of `shoal doctor`."""

    run: str | None = option(
        "examine this run directory (default: this machine)",
        "RUN",
        "run",
        nargs="?",
        page="a run directory; without one this machine is examined ([doctor](doctor.md))",
        refused="one where no run began, or with records of fewer than four steps",
    )
    job: str | None = option(
        "ask the planner about the run's job, and run it with --try",
        "JOBFILE[:FUNCTION]",
        page="the run's job, a Python file and its function: the planner is asked about it, and `--try` runs it",
        refused="without a run",
    )
    set: tuple[str | tuple[str, Setting], ...] = option(
        *_SET_AS_RUN,
        default=(),
        action="append",
        page="as for `shoal run`; others as the run's",
        refused="without `--job`",
    )
    try_out: bool = option(
        "run the three best remedies for some steps, beside the run as it is",
        None,
        "--try",
        default=False,
        action="store_true",
        dest="try_out",
        page="runs the three best remedies for some steps, beside the run as it is",
        refused="without a run, without `--job`, where the job does not run",
    )
    steps: int | None = option(
        "train N steps in each trial of --try (default: 40, or more for rare events), or of a script (20)",
        "N",
        least=10,
        page="with `--try`: steps of each trial (40, or three evaluations or checkpoints, or two of rarer ones; 400 "
        "at most); of a script 20",
        refused="fewer than 10; without a run or a script",
    )
    script: str | None = option(
        "examine this training script as it is, in place of a run: 'train.py --batch-size {batch}'",
        "COMMAND",
        page="[a training script](doctor.md#a-script) and its arguments, in place of a run",
        refused="a run beside it; options that only a run has; a script that is not there",
    )
    devices: int | str | None = option(
        "run a script on N processes (default: all GPUs, or 2)",
        "N",
        least=1,
        page="of a script: its processes; without it all GPUs, or 2",
        refused="0; without a script",
    )
    launcher: str = _launcher("as for `shoal verify`")
    batch: int | None = option(
        "fill {batch} of a script with N, the samples of one process (default: 8)",
        "N",
        least=1,
        page="as for `shoal verify`",
        refused="0; without a script",
    )
    cpu: bool = switch(_CPU, page="as for `shoal verify`: these are times of the CPU", refused="without a script")
    out: str | None = option(
        "write doctor.json and the output of a script's ranks here (default: runs/NAME-doctor)",
        "DIR",
        page="of a script: the directory of `doctor.json`; without it `runs/NAME-doctor`",
        refused="one that holds a run; without a script",
    )
    hosts: str | None = option(
        "try ports between these hosts over ssh, with options of ssh behind them",
        "A,B[ OPTIONS]",
        page="tries ports between these hosts, which ssh reaches; options of ssh behind them",
        refused="fewer than two, one twice, with a run, a host that ssh or shoal does not start on",
    )
    folder: str = option(
        "try the disk of this folder (default: runs)",
        "DIR",
        default="runs",
        page="where runs are written, for the trial of the disk",
    )
    json: bool = switch("print one JSON object and nothing else", page="prints one JSON object")


@dataclass(frozen=True)
class PredictOptions:
    """Options of `shoal predict`."""

    job: str | JobRequest = _job(default=MISSING, page="as for `shoal run`", refused="another model")  # noqa: RUF009  (a field, as the others)
    run: str = option(_RUN, "RUN", "run", default=MISSING, page="as for `shoal export`")
    output: str | None = option(
        "write this new file, .npz or .safetensors (default: RUN/predictions.npz)",
        "FILE",
        "-o",
        "--output",
        page="a new file, `.npz` or `.safetensors`; without it `RUN/predictions.npz`",
        refused="one that is there; another kind",
    )
    data: str | None = option(
        "predict eval, train or one of several evaluation sets by its name (default: eval)",
        "NAME",
        page="`eval`, `train`, or one of several evaluation sets",
        refused="what the job has not",
    )
    step: str = option(_STEP, "STEP", default="last", page="as for `shoal export`")
    ema: bool = switch("take the averaged weights of a run with the callback EMA", page="as for `shoal export`")
    devices: int | None = option(
        "use N processes, each with the whole model (default: 1)",
        "N",
        least=1,
        page="processes, each with the whole model; by default 1",
        refused="more than the job has grains",
    )
    set: tuple[str | tuple[str, Setting], ...] = option(
        *_SET_AS_RUN, default=(), action="append", page="as for `shoal run`; others as the run's"
    )
    config: tuple[str, ...] = option(*_CONFIG, default=(), action="append", page="as for `shoal run`")


@dataclass(frozen=True)
class ReportOptions:
    """Options of `shoal report`."""

    runs: tuple[str, ...] = option(
        "read this run directory; of several the page says what differs",
        "RUN",
        "runs",
        default=(),
        nargs="+",
        page="run directories",
        refused="one where no run began",
    )
    output: str | None = option(
        "write the page to FILE (default: RUN/report.html, of several runs report.html)",
        "FILE",
        "-o",
        "--output",
        page="the page; without it `RUN/report.html`, of several runs `report.html`",
        refused="a file that cannot be written",
    )
    json: bool = switch(
        "print the account as JSON and nothing else", page="prints the account as JSON and nothing else"
    )


@dataclass(frozen=True)
class RunsOptions:
    """Options of `shoal runs`."""

    words: tuple[str, ...] = option(
        "list or prune a folder of runs (default: list runs), or compare, show, delete or reproduce runs",
        "WORD",
        "words",
        default=(),
        nargs="*",
        page="`list` (default) or `prune` and a folder; `compare`, `show`, `delete` or `reproduce` and runs",
        refused="a run that is none, that trains, or behind a link",
    )
    sort: str | None = option(
        "order the list by a column: name, began, state, steps, loss, best, time or size; -loss has the largest first "
        "(default: name)",
        "COLUMN",
        page="order of the list by a column; `--sort=-loss` for the largest first",
        refused="no column",
    )
    filter: tuple[str, ...] = option(
        "list only runs with this value of a column or setting, such as state=failed; may be repeated",
        "NAME=VALUE",
        default=(),
        action="append",
        page="only runs with this value of a column or setting",
        refused="a name that no run has",
    )
    keep_best: int | None = option(
        "keep the N best runs, for prune", "N", least=1, page="with `prune`: how many runs stay", refused="0"
    )
    metric: str | None = option(
        "compare runs by this metric, for prune (default: the metric that the jobs watch)",
        "NAME:min|max",
        page="with `prune`: what is best; by default the metric that the jobs watch",
        refused="neither `min` nor `max`",
    )
    yes: bool = switch("delete without a question", page="deletes without a question")
    json: bool = switch("print JSON and nothing else", page="prints JSON and nothing else")


@dataclass(frozen=True)
class WatchOptions:
    """Options of `shoal watch`."""

    run: str = option(
        "show the run of this directory, on any host that shares the directory",
        "RUN",
        "run",
        default=MISSING,
        page="a run directory",
        refused="one where no run began",
    )
    once: bool = switch("show the run once, for scripts", page="shows it once")
    openmetrics: str | None = option(
        "also write its numbers for Prometheus to FILE, as OpenMetrics text",
        "FILE",
        page="also writes its numbers for Prometheus",
        refused="a file that cannot be written",
    )


@dataclass(frozen=True)
class ResizeOptions:
    """Options of `shoal resize`."""

    run: str = option(
        "resize the run in this directory, which trains now",
        "RUN",
        "run",
        default=MISSING,
        page="the directory of a run that trains",
        refused="one where no run began, or none trains now",
    )
    devices: int = option(
        "continue with N processes",
        "N",
        "devices",
        default=MISSING,
        least=1,
        page="processes that it continues with",
        refused="more than the job's grains or the GPUs; parts of a replica; ranks of an engine",
    )


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
        page="`machine` or `collectives`",
        refused="another word",
    )
    sizes: str | None = option(
        "measure collectives of these sizes in bytes (default: 1K to 256M)",
        "LIST",
        page="of collectives, in bytes",
        refused="`machine`; what is no size",
    )
    out: str | None = option(
        "write the cluster file to FILE too, as TOML",
        "FILE",
        "-o",
        "--out",
        page="writes the file here too",
        refused="a folder that is not there",
    )
    quick: bool = switch(
        "measure fewer sizes and samples, in about 15 s", page="fewer sizes and samples", refused="`collectives`"
    )
    ranks: str | None = option(
        "measure at most N processes at once (default: one a GPU, or one a core up to 8)",
        "N",
        page="the most processes at once",
        refused="more than the GPUs; 1 for collectives",
    )
