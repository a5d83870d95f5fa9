"""The `shoal plan` command."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from rich.console import Console

from shoal.cli.options import PlanOptions
from shoal.errors import CommandError, ExitCode
from shoal.planner.answer.answer import Answer, answer
from shoal.planner.answer.page import page
from shoal.planner.answer.question import question
from shoal.planner.answer.table import show
from shoal.planner.calibrate.files import learn_from
from shoal.planner.search.aims import parse
from shoal.plans.plan import Plan
from shoal.plans.resolve import Wishes, apply_wishes
from shoal.plans.toml import write as plan_text
from shoal.runs.directory import write_file
from shoal.runs.job_file import load, parse_target

_WIDTH = 140  # of a table that is not written to a terminal


def plan(options: PlanOptions) -> ExitCode:
    """Answers the question in the options. Raises: ShoalError where there is no answer."""
    if options.learn is not None:
        _refuse_beside_learn(options, options.learn)
        learn_from(options.learn)
        return ExitCode.DONE
    if options.job is None:
        raise CommandError(
            given="shoal plan without a JOBFILE",
            conflict="there is nothing to plan",
            remedy="write shoal plan JOBFILE --cluster 8xH100, or shoal plan --learn RUNDIR",
        )
    aim = parse(options.aim)
    hours = _hours(options.mtbf)
    for text in (options.output, options.html):
        _refuse_folder(text)
    base = apply_wishes(Plan(), Wishes(precision=options.precision), from_file=False)
    target = parse_target(options.job, options.set)
    loaded = load(target)
    asked = question(loaded.job, base, options.cluster, options.max_devices)
    found = answer(asked, aim, f"{target.path}:{loaded.function}", hours, time.perf_counter)
    console = Console()
    show(found, console if console.is_terminal else Console(width=_WIDTH))
    _write(found, options)
    return ExitCode.DONE


def _refuse_beside_learn(options: PlanOptions, learn: Sequence[str]) -> None:
    """Raises: CommandError for what a search would read, which `--learn` is not."""
    given = [f.name for f in fields(options) if f.name != "learn" and getattr(options, f.name) != f.default]
    if given:
        names = ", ".join("JOBFILE" if name == "job" else f"--{name.replace('_', '-')}" for name in given)
        raise CommandError(
            given=f"shoal plan --learn {' '.join(learn)} with {names}",
            conflict="to learn reads run directories, each of which knows its cluster, and plans nothing",
            remedy="write two commands: shoal plan --learn RUNDIR, and then shoal plan JOBFILE with the others",
        )


def _write(found: Answer, options: PlanOptions) -> None:
    if options.output:
        write_file(Path(options.output), plan_text(found.plan))
        print(f"\nplan written: shoal run {options.job} --plan {options.output}")
    if options.html:
        write_file(Path(options.html), page(found))
        print(f"page written: {options.html}")


def _hours(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise CommandError(
            given=f"--mtbf {text}", conflict="--mtbf takes a number of hours above zero", remedy="write --mtbf 8, say"
        )
    return value


def _refuse_folder(text: str | None) -> None:
    if text and (Path(text).is_dir() or not Path(text).absolute().parent.is_dir()):
        raise CommandError(
            given=f"-o or --html {text}",
            conflict="that is a folder" if Path(text).is_dir() else "there is no such folder",
            remedy="give the name of a file in a folder that exists",
        )
