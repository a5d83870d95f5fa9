"""Jobs whose settings change their length alone, and others that change more."""

from __future__ import annotations

from typing import Any

import tiny
from torch import nn

import shoal

RATES = {"constant": None, "cosine": shoal.warmup_cosine()}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 3))


def job(epochs: int = 1, schedule: str = "constant", lr: float = 0.1, samples: int = 0) -> shoal.Job:
    """The MLP with dropout: four steps an epoch, the last of them short."""
    length = shoal.Samples(samples) if samples else shoal.Epochs(epochs)
    data = tiny.vectors(55)
    return tiny.mlp(length=length, lr=lr, schedule=RATES[schedule], train_data=data, model=model)


def warm(epochs: int = 1) -> shoal.Job:
    """A schedule of its own that a setting is in."""
    return tiny.mlp(samples=55, length=shoal.Epochs(epochs), schedule=lambda progress: min(1.0, progress.step / epochs))


def leaving(epochs: int = 1, lr: float = 0.1) -> shoal.Job:
    """A rate that the job leaves in a module beside it, where the optimizer reads it."""
    tiny.LEFT = lr  # type: ignore[attr-defined]
    return tiny.mlp(samples=55, length=shoal.Epochs(epochs), optimizer=lambda p: tiny.sgd(p, tiny.LEFT))  # type: ignore[attr-defined]


def by_attribute(epochs: int = 1, lr: float = 0.1) -> shoal.Job:
    """A rate that is an attribute of the function that reads it."""

    def optimizer(parameters: Any) -> Any:
        return tiny.sgd(parameters, optimizer.rate)  # type: ignore[attr-defined]

    optimizer.rate = lr  # type: ignore[attr-defined]
    return tiny.mlp(samples=55, length=shoal.Epochs(epochs), optimizer=optimizer)
