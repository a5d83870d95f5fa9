"""A layout that the job refuses: exit code 2 and the nearest legal values, before any rank has been started."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.launching import Run, run

pytestmark = pytest.mark.faults

# Each process that loads the file leaves a line: its number, and its rank where it is one.
JOB = """
import os
from pathlib import Path

import torch
from torch import nn

import shoal

with (Path(__file__).parent / "loaded.txt").open("a") as file:
    file.write(f"{os.getpid()} {os.environ.get('RANK', 'none')}\\n")


def job(name: str = "a"):
    return shoal.Job(
        model=lambda: nn.Sequential(nn.Linear(6, 3)),
        loss=lambda model, batch: shoal.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train_data=(torch.zeros(32, 6), torch.zeros(32, dtype=torch.long)),
        global_batch=16,
        GRAINS
    )
"""


def written(folder: Path, grains: str = "") -> Path:
    path = folder / "some_job.py"
    path.write_text(JOB.replace("GRAINS", grains))
    return path


def loads(folder: Path) -> list[str]:
    path = folder / "loaded.txt"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize(("grains", "devices", "nearest"), [("", 9, "1 to 8"), ("grains=3,", 4, "1 to 3")])
def test_more_ranks_than_grains(tmp_path: Path, grains: str, devices: int, nearest: str) -> None:
    ended = run(Run(written(tmp_path, grains), tmp_path / "out", devices)).fails(2)
    assert nearest in ended.stderr
    assert "on rank" not in ended.stderr
    assert [line.split()[1] for line in loads(tmp_path)] == ["none"]  # once, and by no rank
    assert not ended.out.exists()


@pytest.mark.parametrize(
    ("plan", "devices", "environment", "said"),
    [
        ("[layout]\ndata = 2\n", 3, {}, "layout.data = 3"),
        ('[layout]\npipeline = 2\n[pipeline]\nschedule = "interleaved_1f1b"', None, {}, "stages_per_rank = 2 or more"),
        (
            "[layout]\ndata = 2\n",
            None,
            {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"},
            "layout.data = 3",
        ),
    ],
)
def test_what_the_plan_alone_tells(
    tmp_path: Path, plan: str, devices: int | None, environment: dict[str, str], said: str
) -> None:
    (tmp_path / "plan.toml").write_text(plan)
    arguments = ("--plan", str(tmp_path / "plan.toml"))
    job = written(tmp_path)
    ended = run(Run(job, tmp_path / "out", devices, arguments=arguments, environment=environment)).fails(2)
    assert said in ended.stderr
    assert loads(tmp_path) == []
    assert not ended.out.exists()


@pytest.mark.slow
def test_a_layout_that_fits_is_not_looked_at_twice(tmp_path: Path) -> None:
    run(Run(written(tmp_path), tmp_path / "out", 2)).expect(0)
    assert sorted(line.split()[1] for line in loads(tmp_path)) == ["0", "1"]
    beside = tmp_path / "other"
    beside.mkdir()
    run(Run(written(beside, "grains=1 + 7,"), beside / "out", 2)).expect(0)
    assert sorted(line.split()[1] for line in loads(beside)) == ["0", "1", "none"]
