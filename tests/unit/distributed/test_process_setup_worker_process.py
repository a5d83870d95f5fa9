"""A rank's exit code says to whoever started it whether another try makes sense."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest

from shoal.distributed import process_setup
from shoal.distributed.process_setup import as_rank
from shoal.errors import ExitCode, InUseError, JobError, LaunchError, PeerError, ShoalError
from shoal.launch.environment import REPORT_FILE, Environment

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


@pytest.mark.parametrize("at_once", [True, False])
def test_a_rank_that_lost_a_peer_ends_at_once_where_its_callers_have_nothing_to_write(
    at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(process_setup.os, "_exit", ended.append)
    monkeypatch.setenv(REPORT_FILE, str(tmp_path / "rank-%r.json"))

    def work() -> NoReturn:
        raise PeerError(given="g", conflict="c", remedy="r")

    code = as_rank(Environment(rank=1, world_size=2), work, may_end_at_once=at_once)
    assert (tmp_path / "rank-1.json").exists()
    assert ended == ([code] if at_once else [])
