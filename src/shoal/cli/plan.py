"""The `shoal plan` command."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rich.console import Console

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


def plan(options: argparse.Namespace) -> ExitCode:
    """Answers the question in the options. Raises: ShoalError where there is no answer."""
    if options.learn is not None:
        _refuse_beside_learn(options)
        learn_from(options.learn)
        return ExitCode.DONE
    if options.job is None:
        raise CommandError(
            given="shoal plan without a JOBFILE",
            conflict="there is nothing to plan",
            remedy="write shoal plan JOBFILE --cluster 8xH100, or shoal plan --learn RUNDIR",
        )
    aim = parse(options.aim)
    most, hours = _positive("--max-devices", options.max_devices), _positive("--mtbf", options.mtbf)
    for text in (options.output, options.html):
        _refuse_folder(text)
    base = apply_wishes(Plan(), Wishes(precision=options.precision), from_file=False)
    target = parse_target(options.job, options.set)
    loaded = load(target)
    asked = question(loaded.job, base, options.cluster, int(most) if most else None)
    found = answer(asked, aim, f"{target.path}:{loaded.function}", hours, time.perf_counter)
    console = Console()
    show(found, console if console.is_terminal else Console(width=_WIDTH))
    _write(found, options)
    return ExitCode.DONE


# Of those that a search has, the default of each as `shoal plan` has it.
_OF_A_SEARCH: dict[str, object] = {
    "job": None,
    "cluster": "here",
    "aim": "fastest",
    "max_devices": None,
    "precision": None,
    "set": [],
    "mtbf": None,
    "output": None,
    "html": None,
}


def _refuse_beside_learn(options: argparse.Namespace) -> None:
    """Raises: CommandError for what a search would read, which `--learn` is not."""
    given = {
        name: getattr(options, name) for name, default in _OF_A_SEARCH.items() if getattr(options, name) != default
    }
    if given:
        names = ", ".join("JOBFILE" if name == "job" else f"--{name.replace('_', '-')}" for name in given)
        raise CommandError(
            given=f"shoal plan --learn {' '.join(options.learn)} with {names}",
            conflict="to learn reads run directories, each of which knows its cluster, and plans nothing",
            remedy="write two commands: shoal plan --learn RUNDIR, and then shoal plan JOBFILE with the others",
        )


def _write(found: Answer, options: argparse.Namespace) -> None:
    if options.output:
        write_file(Path(options.output), plan_text(found.plan))
        print(f"\nplan written: shoal run {options.job} --plan {options.output}")
    if options.html:
        write_file(Path(options.html), page(found))
        print(f"page written: {options.html}")


def _positive(name: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf") or (name == "--max-devices" and value != int(value)):
        kind = "a whole number" if name == "--max-devices" else "a number of hours"
        raise CommandError(
            given=f"{name} {text}", conflict=f"{name} takes {kind} above zero", remedy=f"write {name} 8, say"
        )
    return value


def _refuse_folder(text: str | None) -> None:
    if text and (Path(text).is_dir() or not Path(text).absolute().parent.is_dir()):
        raise CommandError(
            given=f"-o or --html {text}",
            conflict="that is a folder" if Path(text).is_dir() else "there is no such folder",
            remedy="give the name of a file in a folder that exists",
        )
