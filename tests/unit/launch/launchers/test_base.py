"""Engines are known by name, and a submission is the command of each process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shoal.errors import CommandError
from shoal.launch.launchers import this_host
from shoal.launch.launchers.base import LAUNCHERS, Submission, launcher, words_of

SUBMISSION = Submission(("run", "job.py", "--set", "a=b c"), "job", Path("/runs/job"), Path("/home"), 2)


@pytest.mark.parametrize("name", LAUNCHERS)
def test_every_engine_has_its_launcher(name: str) -> None:
    found = launcher(name)
    assert callable(found.render)
    assert callable(found.start)


def test_an_engine_that_is_not_known_is_refused_with_the_nearest() -> None:
    with pytest.raises(CommandError, match="did you mean 'local'"):
        launcher("loca")


def test_options_are_words() -> None:
    assert words_of("--time=9 --comment 'a b'") == ["--time=9", "--comment", "a b"]
    with pytest.raises(CommandError, match="close the quote"):
        words_of("'a")


def test_a_dry_run_on_this_host_shows_each_rank() -> None:
    assert this_host.render(SUBMISSION)["ranks"].splitlines() == [
        f"RANK={rank} WORLD_SIZE=2 {sys.executable} -m shoal run job.py --set 'a=b c'" for rank in range(2)
    ]
