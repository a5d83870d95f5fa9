"""Launcher of ranks on this host, for `--dry-run` only; `shoal run` itself starts the ranks."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from shoal.errors import CommandError
from shoal.launch.launchers.base import Submission
from shoal.launch.signals import Signals


def render(submission: Submission) -> Mapping[str, str]:
    """Return the command of each rank, with the variables that number it."""
    if submission.options:
        raise CommandError(
            given=f"--on local:{submission.options}",
            conflict="this host takes no options",
            remedy="leave them out; --devices sets the number of processes",
        )
    command = shlex.join(submission.command)
    ranks = range(submission.num_processes)
    size = f"WORLD_SIZE={len(ranks)}"
    return {"ranks": "".join(f"RANK={rank} {size} {command}\n" for rank in ranks)}


def start(submission: Submission, signals: Signals) -> int:
    """Raise AssertionError, since the command itself starts these ranks, with spares and recovery."""
    raise AssertionError("ranks of this host are started by cli/run/start.py")
