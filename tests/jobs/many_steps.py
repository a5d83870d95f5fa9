"""More steps than have a record each, of no work; the process is killed within a block of steps the first time."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shoal

BATCH, STEPS, KILLED_AT = 2, 10_120, 10_090


def job(marks: str = "") -> shoal.Job:
    steps = 0

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        nonlocal steps
        steps += 1
        if marks and steps == KILLED_AT and not (Path(marks) / "killed").exists():
            (Path(marks) / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return (model(batch[0]) - batch[1]).square().sum(), BATCH

    inputs = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
    return shoal.Job(
        model=lambda: nn.Linear(2, 1),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        train_data=torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True)),
        global_batch=BATCH,
        grains=1,
        length=shoal.Steps(STEPS),
    )
