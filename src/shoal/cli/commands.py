"""The commands: the module and the options of each, and its help.

This module imports nothing heavy, since `shoal --help` reads it.
"""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from dataclasses import dataclass
from typing import Any

from shoal.cli import options
from shoal.runs.options import add_options

_MORE = "more"  # title of the last group


@dataclass(frozen=True)
class Command:
    """A command: its module, which has a function of the command's name that takes the options, and its help.

    Attributes:
        group: title of the commands among which `shoal --help` lists it.
        usage: the words after the command's name.
        groups: "title: names of options | title: ...". Options that are in no group follow as `more`.
        examples: command lines.
        codes: exit codes and their meanings.
    """

    module: str
    options: type[Any]
    group: str
    help: str
    description: str
    usage: str
    groups: str
    examples: tuple[str, ...]
    codes: str = "0 done, 2 user error"


COMMANDS = {
    "run": Command(
        "shoal.cli.run.start",
        options.RunOptions,
        "train",
        "train a job on one process or many",
        "Train the job that FUNCTION in JOBFILE returns. The number of devices changes only the time.",
        "JOBFILE[:FUNCTION] [--devices N] [--set K=V] [OPTIONS]",
        "job and settings: job set config | devices and layout: devices plan layout cluster max_microbatch step "
        "shares workers share_gpu | where it runs: on dry_run | length and evaluations: steps evaluate_every | "
        "output: out track trace private no_source records no_telemetry | precision and proof: precision exact "
        "verify require_certificate | checkpoints and recovery: resume resume_if_exists accept_changes "
        "checkpoint_every keep_checkpoints max_restarts bad_samples check_replicas | initial weights: init_from "
        "init_allow init_rename",
        (
            "shoal run job.py",
            "shoal run job.py --devices 2 --set lr=0.01 --out runs/first",
            "shoal run job.py --out runs/first --resume",
            "shoal run job.py --plan auto --on slurm:--time=60 --cluster 4x8xA100",
        ),
        "0 done, 1 a fault of shoal, 2 user or configuration error, 65 stopped at a non-finite step, 69 a worker died, "
        "73 checkpoint not written, 74 no good checkpoint, 75 preempted (resume with --resume), 130 interrupted twice",
    ),
    "plan": Command(
        "shoal.cli.plan",
        options.PlanOptions,
        "decide",
        "say how many devices to use, which layout, how long and why",
        "Search all layouts of a job on a cluster, run nothing on it, and say why the best one is the best.",
        "JOBFILE[:FUNCTION]|hf:DIR|--script COMMAND [OPTIONS]",
        "job and settings: job set config precision seq batch | a script, as it is: script launcher cpu | devices "
        "and aim: cluster max_devices aim | length and cost: samples tokens price mtbf | output: output html emit "
        "more | calibration: learn",
        (
            "shoal plan job.py",
            "shoal plan job.py --cluster 4x8xA100 --aim deadline=2h -o plan.toml",
            "shoal plan hf:llama --cluster 8xH100 --seq 4096 --batch 64",
            "shoal plan --script 'train.py --batch {batch}' --batch 64 --cluster 8xH100",
        ),
    ),
    "verify": Command(
        "shoal.cli.run.start",
        options.VerifyOptions,
        "check",
        "prove that a parallel run computes what one process computes",
        "Run some steps as planned and on one process, in float64 and otherwise, and compare every tensor.",
        "JOBFILE[:FUNCTION]|--script COMMAND [--devices N] [OPTIONS]",
        "job and settings: job set config | a script, as it is: script launcher batch cpu keep | devices and "
        "layout: devices plan max_microbatch workers share_gpu | length: steps | output: out | precision: precision "
        "exact",
        (
            "shoal verify job.py --devices 2",
            "shoal verify job.py --plan plan.toml --steps 5",
            "shoal verify --script 'train.py --batch-size {batch}' --devices 2",
        ),
        "0 verified, 1 diverged, 2 could not run, 130 stopped by a signal",
    ),
    "doctor": Command(
        "shoal.cli.doctor",
        options.DoctorOptions,
        "check",
        "find what costs time on a machine, in a run or in a script",
        "Examine this machine, or find what costs time in a run or in a training script, and what would save it.",
        "[RUN|--script COMMAND] [OPTIONS]",
        "what is examined: run job set hosts folder | a script, as it is: script devices launcher batch cpu | trial "
        "of remedies: try_out steps | output: json out",
        (
            "shoal doctor",
            "shoal doctor runs/first",
            "shoal doctor runs/first --job job.py --try",
            "shoal doctor --script 'train.py --batch-size {batch}' --devices 2",
        ),
        "0 nothing keeps training from working here, 1 something does, 2 user error",
    ),
    "bench": Command(
        "shoal.cli.bench",
        options.BenchOptions,
        "check",
        "measure this machine for shoal plan",
        "Measure this machine and store the result as a cluster, for `shoal plan --cluster here`.",
        "[machine|collectives] [OPTIONS]",
        "what is measured: what quick ranks sizes | output: out",
        ("shoal bench --quick", "shoal bench collectives --sizes 64K,1M"),
        "0 done, 2 user error, 69 a process died, 130 stopped by a signal",
    ),
    "runs": Command(
        "shoal.cli.runs",
        options.RunsOptions,
        "look",
        "list, compare, clean up and reproduce runs",
        "List runs, say what differs between them, delete those that are not wanted, or print how to run one again.",
        "[list|show|compare|prune|delete|reproduce] [DIR|RUN ...]",
        "what to do: words | list: sort filter | delete and prune: keep_best metric yes | output: json",
        (
            "shoal runs --sort -best --filter state=completed",
            "shoal runs compare runs/first runs/second",
            "shoal runs prune --keep-best 3 --metric accuracy:max",
        ),
    ),
    "watch": Command(
        "shoal.cli.report",
        options.WatchOptions,
        "look",
        "show a run in the terminal while it trains",
        "Show the progress of a run, redrawn in place until the run ends. It only reads.",
        "RUN [OPTIONS]",
        "run: run | output: once openmetrics",
        ("shoal watch runs/first", "shoal watch runs/first --once"),
    ),
    "report": Command(
        "shoal.cli.report",
        options.ReportOptions,
        "look",
        "write one HTML page of where a run's time went",
        "Write one page that shows where the time of a run, or of several, went, beside what was predicted.",
        "RUN [RUN ...] [-o FILE] [--json]",
        "runs: runs | output: output json",
        ("shoal report runs/first", "shoal report runs/first runs/second -o both.html"),
    ),
    "resize": Command(
        "shoal.cli.resize",
        options.ResizeOptions,
        "train",
        "change the number of processes of a run that trains",
        "Let a run that trains continue with N processes. An exact run computes the same bits on any number.",
        "RUN N",
        "run and devices: run devices",
        ("shoal resize runs/first 4",),
        "0 the run continues with N, 2 user error, 130 interrupted: the request is withdrawn",
    ),
    "evaluate": Command(
        "shoal.cli.trained_engine",
        options.EvaluateOptions,
        "models",
        "compute a job's metrics with the weights of a checkpoint",
        "Compute the metrics of a job on its evaluation data with the weights of a checkpoint, of any layout.",
        "JOBFILE[:FUNCTION] RUN [OPTIONS]",
        "job and run: job run step ema | devices and layout: devices | settings: set config | output: json",
        ("shoal evaluate job.py runs/first", "shoal evaluate job.py runs/first --step best --json"),
        "0 done, 2 user error, 69 a process died, 74 the checkpoint is damaged",
    ),
    "predict": Command(
        "shoal.cli.trained_engine",
        options.PredictOptions,
        "models",
        "write a trained model's outputs for each sample of a data set",
        "Write the outputs of a job's model, with the weights of a checkpoint of any layout, for each sample in order.",
        "JOBFILE[:FUNCTION] RUN [-o FILE] [OPTIONS]",
        "job and run: job run data step ema | devices and layout: devices | settings: set config | output: output",
        ("shoal predict job.py runs/first -o outputs.npz", "shoal predict job.py runs/first --data train"),
        "0 done, 2 user error, 73 not written, 74 the checkpoint is damaged",
    ),
    "export": Command(
        "shoal.cli.export",
        options.ExportOptions,
        "models",
        "write a run's weights as safetensors, as Hugging Face lays them out",
        "Write the weights of a checkpoint, of any layout, to files that other programs read. It needs no GPU and no "
        "job.",
        "RUN [-o DIR] [OPTIONS]",
        "run: run step ema | output: output dtype max_shard_size tokenizer",
        ("shoal export runs/first", "shoal export runs/first --step best --dtype bfloat16 -o model"),
        "0 done, 2 user error, 73 not written, 74 the checkpoint is damaged",
    ),
}
_GROUPS = ("train", "decide", "check", "look", "models")


def add_command(commands: Any, name: str, command: Command) -> None:
    """Add a command's parser to the subparsers `commands`."""
    width = max(40, min(100, shutil.get_terminal_size().columns) - 2)
    codes = [f"  {code.strip()}" for code in re.split(r", (?=\d)", command.codes)]
    parser = commands.add_parser(
        name,
        allow_abbrev=False,
        add_help=False,
        usage=f"shoal {name} {command.usage}",
        description=textwrap.fill(command.description, width),
        epilog="\n".join(["examples:", *(f"  {line}" for line in command.examples), "", "exit codes:", *codes]),
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=24, width=width),
    )
    groups = dict(part.split(": ") for part in command.groups.split(" | "))
    add_options(parser, command.options, {**{title: names.split() for title, names in groups.items()}, _MORE: ()})
    parser._action_groups[-1].add_argument("-h", "--help", action="help", help="show this help and end")


def overview() -> str:
    """Return the text of `shoal --help`: the commands in groups, and four lines to begin with."""
    lines = ["usage: shoal COMMAND [OPTIONS]", "", "One model, any number of devices, the same training run.", ""]
    for group in _GROUPS:
        lines.append(f"{group}:")
        own = {name: command.help for name, command in COMMANDS.items() if command.group == group}
        lines += [f"  {name.ljust(9)} {text}" for name, text in own.items()]
    lines += ["", "begin with:"]
    lines += ["  shoal run job.py                 # train on this machine"]
    lines += ["  shoal plan job.py                # how many devices, and which layout"]
    lines += ["  shoal verify job.py --devices 2  # the same result on two processes?"]
    lines += ["  shoal runs                       # the runs so far", ""]
    return "\n".join([*lines, "shoal COMMAND --help has each command's options; shoal --version the version.", ""])
