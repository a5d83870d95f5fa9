"""Launcher of a run's ranks on an engine, and the submission that describes the run to it."""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

from shoal.errors import CommandError, LaunchError, nearest, printable
from shoal.launch.signals import Signals

# Engines and their modules, each a `Launcher`, which is imported when its engine is requested.
_OWN_NAMES = {"local": "this_host", "hosts": "ssh"}
LAUNCHERS = {
    name: f"shoal.launch.launchers.{_OWN_NAMES.get(name, name)}"
    for name in ("local", "slurm", "mpi", "hosts", "kubernetes", "ray", "spark")
}


@dataclass(frozen=True)
class Submission:
    """Run to start on an engine: the command of each process, and the resources that the processes need."""

    arguments: tuple[str, ...]  # of `shoal`, with --out and without --on and --dry-run
    name: str  # of the run: letters, digits, dots, underscores and hyphens
    out: Path  # the run directory, absolute
    folder: Path  # the command's working directory, absolute
    num_processes: int  # the most processes if `least_processes` is given
    options: str = ""  # the text after the engine's name and a colon
    threads: int | None = None  # of each process; None: not given
    num_hosts: int | None = None  # None: the engine decides
    gpus: bool | None = None  # whether each process needs a GPU; None: not given
    cluster: str | None = None  # the name of the cluster for which the plan was made
    max_restarts: int = 0  # in a row, without a new step
    least_processes: int | None = None  # the fewest processes that suffice; None: exactly `num_processes`
    address: str | None = None  # of the run directory, if `out` is this host's working copy of it

    def __post_init__(self) -> None:
        """Refuse control characters: in a script or a manifest, a line feed begins a line of its own.

        Raises: CommandError.
        """
        for text in (*self.command, self.options, str(self.out), str(self.folder), self.address or ""):
            if "\n" in text or printable(text) != text:
                raise CommandError(
                    given=f"a run to submit with {text!r}",
                    conflict="it has a control character, which would become a part of the script that the engine runs",
                    remedy="give the folder, file or setting a name without it",
                )

    @property
    def command(self) -> tuple[str, ...]:
        """The words of the command that starts one process."""
        return (sys.executable, "-m", "shoal", *self.arguments)

    def with_what_is_there(self, number: int) -> Submission:
        """Return the submission for `number` processes that can start now, clipped to the submission's limits."""
        if self.least_processes is None:
            return self
        return replace(self, num_processes=min(self.num_processes, max(self.least_processes, number)))


def words_of(options: str) -> list[str]:
    """Split an engine's options into words by the rules of a shell. Raises: CommandError if a quote is open."""
    try:
        return shlex.split(options)
    except ValueError as error:
        raise CommandError(
            given=options, conflict=f"they cannot be split into words: {error}", remedy="close the quote"
        ) from None


class Launcher(Protocol):
    """Module of an engine. Both functions raise a ShoalError if the engine cannot accept the submission."""

    def render(self, submission: Submission) -> Mapping[str, str]:
        """Return the texts that would be submitted or started, by a file name or a word for each."""

    def start(self, submission: Submission, signals: Signals) -> int:
        """Start or submit the run and follow it to its end. Return shoal's exit code.

        The caller handles `signals`; the launcher forwards each to the run.
        """


def launcher(name: str) -> Launcher:
    """Return the launcher of an engine. Raises: CommandError if the engine is unknown."""
    if name not in LAUNCHERS:
        raise CommandError(
            given=f"--on {name}",
            conflict="there is no such engine",
            remedy=f"use one of {', '.join(LAUNCHERS)}{nearest(name, list(LAUNCHERS))}",
        )
    return cast(Launcher, importlib.import_module(LAUNCHERS[name]))


def library(engine: str, module: str, submission: Submission) -> Any:
    """Import an engine's own package. Raises: LaunchError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise LaunchError(
            given=f"--on {engine}:{submission.options}" if submission.options else f"--on {engine}",
            conflict=f"the package {module.partition('.')[0]} is not installed here ({sys.executable})",
            remedy=f'pip install "shoal[{engine}]", on every node of the cluster',
        ) from None
