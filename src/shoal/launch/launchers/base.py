"""Launcher of a run's ranks on an engine, and the submission that it is given."""

from __future__ import annotations

import difflib
import importlib
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

from shoal.errors import CommandError, LaunchError
from shoal.launch.signals import Signals

# Modules, imported when their engine is asked for. Each is a `Launcher`.
LAUNCHERS = {
    "local": "shoal.launch.launchers.this_host",
    "slurm": "shoal.launch.launchers.slurm",
    "mpi": "shoal.launch.launchers.mpi",
    "hosts": "shoal.launch.launchers.ssh",
    "kubernetes": "shoal.launch.launchers.kubernetes",
    "ray": "shoal.launch.launchers.ray",
    "spark": "shoal.launch.launchers.spark",
}


@dataclass(frozen=True)
class Submission:
    """Run to start on an engine: the command that each of its processes has, and what they need."""

    arguments: tuple[str, ...]  # of `shoal`, with --out and without --on and --dry-run
    name: str  # of the run, of letters, digits, dots, underscores and hyphens
    out: Path  # the run directory, absolute
    folder: Path  # where the command is given, absolute
    num_processes: int  # with `least_processes` the most
    options: str = ""  # what follows the engine's name and a colon
    threads: int | None = None  # of each process; None: nobody says
    num_hosts: int | None = None  # None: the engine decides
    gpus: bool | None = None  # whether each process needs a GPU; None: nobody says
    cluster: str | None = None  # the name of the one that the plan was made for
    max_restarts: int = 0  # in a row, that bring no new step
    least_processes: int | None = None  # how few will do, where there are not so many; None: it is one number
    address: str | None = None  # of the run directory, where `out` is this host's working copy of it

    @property
    def command(self) -> tuple[str, ...]:
        """The words of the command that starts one process."""
        return (sys.executable, "-m", "shoal", *self.arguments)

    def with_what_is_there(self, number: int) -> Submission:
        """The submission for so many processes as an engine can start now, within its limits."""
        if self.least_processes is None:
            return self
        return replace(self, num_processes=min(self.num_processes, max(self.least_processes, number)))

    def option_words(self) -> list[str]:
        """`options` as words, as a shell reads them. Raises: CommandError where a quote is open."""
        try:
            return shlex.split(self.options)
        except ValueError as error:
            raise CommandError(
                given=self.options, conflict=f"these are no words: {error}", remedy="close the quote"
            ) from None


class Launcher(Protocol):
    """Module of an engine. Both functions raise a ShoalError for what the engine does not take."""

    def render(self, submission: Submission) -> Mapping[str, str]:
        """Texts that would be submitted or started, by a file name, or a word, for each."""

    def start(self, submission: Submission, signals: Signals) -> int:
        """Starts or submits the run and follows it to its end; shoal's exit code.

        A signal in `signals` is handed on to the run. `signals` are handled by the caller.
        """


def launcher(name: str) -> Launcher:
    """The launcher of an engine. Raises: CommandError for an engine that is not known."""
    if name not in LAUNCHERS:
        near = difflib.get_close_matches(name, LAUNCHERS, 1)
        raise CommandError(
            given=f"--on {name}",
            conflict="there is no such engine",
            remedy=f"use one of {', '.join(LAUNCHERS)}" + (f"; did you mean {near[0]!r}?" if near else ""),
        )
    return cast(Launcher, importlib.import_module(LAUNCHERS[name]))


def library(engine: str, module: str, submission: Submission) -> Any:
    """An engine's own package. Raises: LaunchError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise LaunchError(
            given=f"--on {engine}:{submission.options}" if submission.options else f"--on {engine}",
            conflict=f"the package {module.partition('.')[0]} is not installed here ({sys.executable})",
            remedy=f'pip install "shoal[{engine}]", on every node of the cluster',
        ) from None
