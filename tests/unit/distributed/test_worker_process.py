"""A rank's exit code says to whoever started it whether another try makes sense."""

from __future__ import annotations

from typing import NoReturn

import pytest

from shoal.distributed.worker_process import as_rank
from shoal.errors import ExitCode, InUseError, JobError, LaunchError, ShoalError
from shoal.launch.environment import Environment

MISSED, TAKEN, WRONG = (kind(given="g", conflict="c", remedy="r") for kind in (LaunchError, InUseError, JobError))


@pytest.mark.parametrize(
    ("engine", "error", "code"),
    [
        ("kubernetes", MISSED, ExitCode.RANK_LOST),
        ("kubernetes", TAKEN, ExitCode.RANK_LOST),
        ("kubernetes", WRONG, ExitCode.USER),
        ("slurm", MISSED, ExitCode.USER),
    ],
    ids=["others are late", "the lost one still has it", "a wrong job", "on another engine"],
)
def test_a_pod_that_was_alone_tries_again(engine: str, error: ShoalError, code: ExitCode) -> None:
    def work() -> NoReturn:
        raise error

    assert as_rank(Environment(rank=0, world_size=2, engine=engine), work) == code
