"""A plan is judged in one process of a run and once, however its ranks are started."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.launching import Ended, Run, run, run_all, start

pytestmark = pytest.mark.ranks

# Each call of the judge, and each look through the rules that it judges by, leaves a line: its name, its process, and
# its rank where it is one. The job file imports this in every process that loads it, and START in the first process.
COUNTED = """
import os
import sys
from pathlib import Path

import shoal.plans.legal
import shoal.plans.resolve


def counted(module, name):
    original = getattr(module, name)

    def wrapped(*arguments, **named):
        with (Path(__file__).parent / "calls.txt").open("a") as file:
            file.write(f"{name} {os.getpid()} {os.environ.get('RANK', 'none')}\\n")
        return original(*arguments, **named)

    for place, known in list(sys.modules.items()):
        if place.startswith("shoal.") and getattr(known, name, None) is original:
            setattr(known, name, wrapped)


counted(shoal.plans.resolve, "judge")
counted(shoal.plans.legal, "excluded")
"""
START = "import sys\n\nimport counted\nfrom shoal.cli.main import main\n\nsys.exit(main())\n"
JOB = """
import os

import counted
import torch
from torch import nn

import shoal


def job():
    return shoal.Job(
        model=lambda: nn.Sequential(nn.Linear(6, 3)),
        loss=lambda model, batch: shoal.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train_data=(torch.zeros(32, 6), torch.zeros(32, dtype=torch.long)),
        global_batch=16,
        GRAINS
    )
"""


def wanted(folder: Path, devices: int | None, grains: str = "", **more: Any) -> Run:
    """A run whose processes count; more grains than the source of the file says are what a launcher looks for."""
    (folder / "counted.py").write_text(COUNTED)
    (folder / "start.py").write_text(START)
    job = folder / "some_job.py"
    job.write_text(JOB.replace("GRAINS", grains))
    return Run(job, folder / "out", devices, launcher=(str(folder / "start.py"),), **more)


def calls(folder: Path, name: str) -> list[str]:
    """The ranks, or none, of the processes that called it."""
    lines = [line.split() for line in (folder / "calls.txt").read_text().splitlines()]
    return sorted(rank for called, _, rank in lines if called == name)


def test_one_process(tmp_path: Path) -> None:
    run(wanted(tmp_path, 1)).expect(0)
    assert calls(tmp_path, "judge") == ["none"]


def test_ranks_that_shoal_starts(tmp_path: Path) -> None:
    """Rank 0 judges with the job; the launcher has looked at the plan alone, before torch was loaded."""
    run(wanted(tmp_path, 3)).expect(0)
    assert calls(tmp_path, "judge") == ["0"]
    assert calls(tmp_path, "excluded") == ["0", "none"]


def test_ranks_whose_job_is_looked_at_before(tmp_path: Path) -> None:
    ended = run(wanted(tmp_path, 3, "grains=1 + 7,")).expect(0)
    assert calls(tmp_path, "judge") == ["none"]
    assert calls(tmp_path, "excluded") == ["none", "none"]
    assert "grains_per_microbatch = 3" in (ended.out / "plan.toml").read_text()


def test_servers(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text('[server]\nmode = "synchronous"\n')
    run(wanted(tmp_path, None, arguments=("--plan", str(tmp_path / "plan.toml")))).expect(0)
    assert calls(tmp_path, "judge") == ["none"]
    assert calls(tmp_path, "excluded") == ["none", "none"]


def by_hand(one: Run) -> list[Ended]:
    """Three ranks that are told nothing but RANK and the like, by nobody of shoal's."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    found = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with contextlib.ExitStack() as ranks:
        variables = [{**found, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(3)]
        started = [ranks.enter_context(start(replace(one, environment=more))) for more in variables]
        return [rank.wait() for rank in started]


def test_ranks_that_have_nothing_but_their_arguments(tmp_path: Path) -> None:
    for ended in by_hand(wanted(tmp_path, None)):
        ended.expect(0)
    assert calls(tmp_path, "judge") == calls(tmp_path, "excluded") == ["0"]


def test_what_rank_0_refuses_is_refused_by_all(tmp_path: Path) -> None:
    """With one exit code, by which a scheduler tells a mistake from a rank that was lost."""
    for ended in by_hand(wanted(tmp_path, None, "grains=2,")):
        assert "3 data ranks for a job of grains=2" in ended.expect(2).stderr


def test_a_job_that_depends_on_the_process_is_refused(tmp_path: Path) -> None:
    """The process that looks at it is no rank, and the ranks load other grains than it has judged."""
    (ended,) = run_all([wanted(tmp_path, 2, "grains=4 if 'RANK' in os.environ else 8,")])
    assert "the plan was judged for the same file with grains=8" in ended.expect(2).stderr
