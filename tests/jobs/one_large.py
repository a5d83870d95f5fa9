"""An MLP most of whose parameters are one matrix, by one of torch's optimizers, clipped."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal

OPTIMIZERS: dict[str, Any] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
    "Adam": partial(torch.optim.Adam, lr=0.01),
}


class OneLarge(nn.Sequential):
    """[B, 6] -> [B, 3] by a matrix of 1 MiB, which it may normalise in place before it is used."""

    def __init__(self, normalised: bool = False) -> None:
        super().__init__(nn.Linear(6, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 3))
        self.normalised = normalised

    def forward(self, input: Tensor) -> Tensor:
        if self.normalised:
            weight = self[2].weight
            weight.data.div_(weight.data.norm())
        return super().forward(input)


def vectors() -> TensorDataset:
    """float32 [203, 6], and labels that a linear map decides."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(203, 6, generator=generator)
    return TensorDataset(inputs, (inputs @ torch.randn(6, 3, generator=generator)).argmax(1))


def classify(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return shoal.cross_entropy(model(batch[0]), batch[1])


def job(optimizer: str = "SGD", normalised: bool = False) -> shoal.Job:
    return shoal.Job(
        model=partial(OneLarge, normalised),
        loss=classify,
        optimizer=OPTIMIZERS[optimizer],
        train_data=vectors,
        eval_data=vectors,
        global_batch=16,
        length=shoal.Steps(6),
        clip_norm=0.5,
    )
