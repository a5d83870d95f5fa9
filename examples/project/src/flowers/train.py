"""The job: `shoal run flowers.train`, or `python -m flowers.train` for the block below."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

import shoal
from flowers.data import flowers
from flowers.nets import net


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The cross entropy summed over the batch, and its number of samples."""
    inputs, labels = batch
    return shoal.cross_entropy(model(inputs), labels)


def job(lr: float = 0.1, epochs: int = 3, width: int = 16, seed: int = 0) -> shoal.Job:
    """A small network by SGD; the parameters are the settings of `--set`."""
    return shoal.Job(
        model=partial(net, width),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=lr, momentum=0.9),
        train_data=partial(flowers, 480, 1),
        eval_data=partial(flowers, 120, 2),
        metrics={"accuracy": shoal.accuracy},
        global_batch=32,
        length=shoal.Epochs(epochs),
        seed=seed,
    )


if __name__ == "__main__":
    print(shoal.run("flowers.train:job").result["metrics"])
