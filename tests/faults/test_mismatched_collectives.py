"""Collectives of the job's own code that do not match: every rank and what it called are named."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.launching import JOBS, Run, run
from tests.usual import parametrize

pytestmark = pytest.mark.faults

JOB = """
import sys
sys.path.insert(0, {folder!r})
from dataclasses import replace
import tiny
import torch
import torch.distributed as dist


def job(kind: str = "shapes"):
    made, seen = tiny.mlp(), []

    def loss(model, batch):
        if torch.is_grad_enabled():
            seen.append(None)
            if kind == "shapes" and len(seen) > 3:
                dist.all_reduce(torch.zeros(4000 if dist.get_rank() == 1 else 2))
            elif kind == "missing" and dist.get_rank() == 1 and len(seen) > 3:
                dist.barrier()
        return made.loss(model, batch)

    return replace(made, loss=loss)
"""


@parametrize(
    ("kind", "told"),
    [
        ("shapes", ("rank 0 in all_reduce at {job}:17 in loss", "rank 1 in all_reduce at {job}:17 in loss")),
        ("missing", ("rank 0 in none of its own, or in one of shoal", "rank 1 in barrier at {job}:19 in loss")),
    ],
    ids=["shapes", "missing"],
    usual=["shapes"],
)
def test_both_ranks_and_their_calls_are_named(kind: str, told: tuple[str, ...], tmp_path: Path) -> None:
    job = tmp_path / "mismatched.py"
    job.write_text(JOB.format(folder=str(JOBS)), encoding="utf-8")
    ended = run(Run(job, tmp_path / "run", 2, settings={"kind": kind})).fails(69)
    assert "RankLostError: the job's own collectives do not match" in ended.stderr
    for text in told:
        assert text.format(job=job) in ended.stderr
