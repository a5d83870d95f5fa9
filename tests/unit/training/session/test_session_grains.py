"""A Session's number of grains fits its model and dataset, and a training that is resumed keeps its own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from shoal.plans import grains
from shoal.plans.resolve import CompletePlan

ROWS, BATCH = 64, 32


def trained(folder: Path, steps: int, **settings: Any) -> tuple[CompletePlan, float]:
    """The judged plan, and the loss of the last step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    inputs = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(1))
    with shoal.Session(global_batch=BATCH, checkpoints=folder, **settings) as session:
        model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in session.steps(TensorDataset(inputs), shoal.Steps(steps)):
            for (batch,) in step:
                step.backward(model(batch).square().sum(), len(batch))
        found = session.plan
        assert isinstance(found, CompletePlan)
        return found, step.loss


def test_the_default_fits_and_a_resume_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert trained(tmp_path / "light", 1)[0].batch.grains_per_microbatch == 8
    _, whole = trained(tmp_path / "whole", 4)
    trained(tmp_path / "cut", 2)
    monkeypatch.setattr(grains, "MOST_BYTES_OF_A_GRAIN", 8)  # every sample is heavy from now on
    heavy, _ = trained(tmp_path / "heavy", 1)
    assert heavy.batch.grains_per_microbatch == BATCH
    resumed, loss = trained(tmp_path / "cut", 4, resume=True)
    assert resumed.batch.grains_per_microbatch == 8
    assert loss == whole
