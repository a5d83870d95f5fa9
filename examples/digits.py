"""A job that classifies scikit-learn's 8x8 digits in seconds: the smallest example."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

import shoal
from datasets import digits


def model() -> nn.Sequential:
    """A small CNN: float32 images [N, 1, 8, 8] -> logits [N, 10]; 38,282 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The cross entropy summed over the batch, and its number of samples."""
    inputs, labels = batch
    return shoal.cross_entropy(model(inputs), labels)


def job(lr: float = 0.1, momentum: float = 0.9, epochs: int = 10, batch: int = 64, seed: int = 0) -> shoal.Job:
    """A small CNN by SGD with momentum, 23 steps an epoch, the last of each short."""
    return shoal.Job(
        model=model,
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=lr, momentum=momentum),
        train_data=partial(digits, "train"),
        eval_data=partial(digits, "test"),
        metrics={"accuracy": shoal.accuracy},
        global_batch=batch,
        length=shoal.Epochs(epochs),
        seed=seed,
    )
