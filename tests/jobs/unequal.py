"""The MLP with a rank 1 that sleeps for each sample in some steps, as a slower device would compute longer."""

from __future__ import annotations

import os
import time
from typing import Any

from tiny import mlp
from torch import Tensor, nn

import shoal


class Slow(shoal.Callback):
    """Knows whether rank 1 is slow in the coming step: from step `first` on, and before step `until`."""

    def __init__(self, first: int, until: int) -> None:
        self.first, self.until, self.step = first, until, 1

    def on_step(self, run: shoal.training.callbacks.base.RunControl, record: shoal.StepRecord) -> None:
        self.step = record.step + 1

    @property
    def applies(self) -> bool:
        """Whether this process has to sleep."""
        return os.environ.get("RANK") == "1" and self.first <= self.step < self.until


def job(grains: int = 12, batch: int = 48, steps: int = 60, first: int = 1, until: int = 61) -> shoal.Job:
    """`first`, `until`: the slow steps."""
    slow = Slow(first, until)

    def loss(model: nn.Module, data: Any) -> tuple[Tensor, Tensor]:
        inputs, labels, _ = data
        if model.training and slow.applies:
            time.sleep(0.002 * len(inputs))
        return shoal.cross_entropy(model(inputs), labels)

    return mlp(480, batch, steps, grains=grains, loss=loss, callbacks=[slow], metrics={}, eval_data=None)
