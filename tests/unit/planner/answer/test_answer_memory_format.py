"""Plans for CPUs say how images lie in memory: as a run without a plan file chooses it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from shoal.planner.answer.answer import with_chosen_format
from shoal.plans.plan import Plan


def images() -> TensorDataset:
    return TensorDataset(torch.randn(32, 3, 16, 16), torch.arange(32) % 10)


def loss(model: nn.Module, batch: Any) -> Any:
    return shoal.cross_entropy(model(batch[0]), batch[1])


def pooled() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 10))


def plain() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(768, 10))


def job(model: Callable[[], nn.Module]) -> shoal.Job:
    optimizer = partial(torch.optim.SGD, lr=0.1)
    return shoal.Job(
        model=model, loss=loss, optimizer=optimizer, train_data=images, global_batch=32, length=shoal.Steps(1)
    )


@pytest.mark.parametrize(
    ("model", "cluster", "exact", "last"),
    [
        (pooled, "here", False, True),
        (pooled, "here", True, False),
        (pooled, "8xH100", False, False),
        (plain, "here", False, False),
    ],
    ids=["pools", "exact", "GPUs", "no pools"],
)
def test_where_a_run_would_choose_it(
    model: Callable[[], nn.Module], cluster: str, exact: bool, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.hardware.detect.gpus", list)
    base = Plan().with_sections(execution={"exact": exact})
    found = with_chosen_format(job(model), base, cluster)
    assert found == base.with_sections(execution={"channels_last": last})
