"""The MLP of `tiny` with places where a worker waits while it computes: $TEST_HOLD=FOLDER:SAMPLE:SAMPLE..."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import tiny
import torch
from torch import Tensor

import shoal


def hold(ids: Tensor) -> None:
    """Waits where a batch has one of the samples, until FOLDER/open-SAMPLE is there; says who waits."""
    folder, *samples = os.environ.get("TEST_HOLD", "").split(":")
    for sample in samples:
        if torch.is_grad_enabled() and bool((ids == int(sample)).any()):
            Path(folder, f"reached-{sample}-{os.getpid()}").touch()
            while not Path(folder, f"open-{sample}").exists():
                time.sleep(0.005)


def loss(model: torch.nn.Module, batch: Any) -> Any:
    """The MLP's, once nothing holds it up."""
    hold(batch[2])
    return tiny.classify(model, batch)


def job(steps: int = 12, samples: int = 203) -> shoal.Job:
    """Samples in their own order: step s holds 16 s to 16 s + 15 of them, its grains two each."""
    return tiny.mlp(samples, steps=steps, loss=loss, shuffle=False, schedule=None)
