"""One rank of tests/ranks/test_late_reads.py: trains jobs with each step read at once and late, and prints all."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from tests.jobs.read_late import job, trained, waiting
from torch import Tensor, nn

import shoal
from shoal.distributed.mesh import open_mesh
from shoal.launch.environment import Environment
from shoal.plans.plan import LayoutSection, Plan, ShardSection
from shoal.runs.records import StepRecord
from shoal.training.callbacks.base import RunControl

RANK = int(os.environ["RANK"])


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def infinite(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    total, weight = shoal.cross_entropy(model(batch[0]), batch[1])
    bad = (batch[0] == DATA_ROW).all(1)
    return total + torch.where(bad, torch.inf, 0.0).sum(), weight


DATA_ROW = job().train_data.tensors[0][43]


class Raising:
    """Raises once, on rank 1, in its so many-th backward."""

    def __init__(self, step: int) -> None:
        self._left = step

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() and RANK == 1:
            self._left -= 1
            if self._left == 0:
                raise ValueError("once")
        return shoal.cross_entropy(model(batch[0]), batch[1])


class Unsure(shoal.Callback):
    """Raises on rank 1 alone where it is asked whether it comes at once; the other rank says no."""

    watches_only = True

    def at_once(self, step: int) -> bool:
        if RANK == 1 and step == 5:
            raise ValueError("unsure")
        return False

    def on_step(self, run: RunControl, record: StepRecord) -> None:
        """Nothing."""


def cases() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Arguments of the job, and of its training, by name."""
    return {
        "clipped": ({"clip_norm": 0.5, "optimizer": lambda p: torch.optim.AdamW(p, lr=0.01)}, {}),
        "batch statistics, not finite": (
            {"loss": infinite, "on_nonfinite": "skip", "shuffle": False, "model": normed},
            {},
        ),
        "an error on one rank": ({"loss": Raising(7)}, {}),
        "an at_once that raises on one rank": ({}, {"callbacks": [Unsure()]}),
        "a stop on one rank": ({}, {"stops": lambda recorded: RANK == 1 and recorded >= 2}),
    }


def main() -> None:
    torch.set_num_threads(1)
    plan = Plan(layout=LayoutSection(**{sys.argv[1]: 2}), shard=ShardSection(level="optimizer"))
    port = int(os.environ["MASTER_PORT"])
    with open_mesh(Environment(RANK, 2, RANK, 2, port=port), plan.degrees) as mesh:
        for name in cases():
            for late in (False, True):
                wanted, how = cases()[name]
                with waiting(late):
                    course = trained(job(**wanted), plan, mesh, **how)
                found = {"weights": course.weights, "state": course.state, "error": course.error}
                found |= {"records": course.records, "reads": dict(course.reads), "order": course.order}
                found |= {"notes": course.notes}
                print(json.dumps({"name": name, "late": late, **found}), flush=True)


if __name__ == "__main__":
    main()
