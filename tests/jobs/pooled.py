"""Nets whose images are pooled, for which channels last is chosen where nobody says."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import witness
from tiny import accuracy, images, mlp
from torch import Tensor, nn

import shoal


class Net(nn.Module):
    """A convolution and a pool; `way` is how the images become rows."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.dropout, self.pool, self.last = nn.Dropout(0.2), nn.MaxPool2d(2), nn.Linear(72, 3)
        self.way = way

    def forward(self, inputs: Tensor) -> Tensor:
        found = self.pool(self.dropout(self.norm(self.convolution(inputs)).relu()))
        rows: Tensor = found.view(len(found), -1) if self.way == "view" else found.flatten(1)
        return self.last(rows)  # type: ignore[no-any-return]


def classify(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """The summed cross entropy; tells the ids that it was given."""
    inputs, labels, ids = batch
    witness.trained(ids)
    return shoal.cross_entropy(model(inputs), labels)


def job(way: str = "flatten", steps: int = 8) -> shoal.Job:
    """200 images of 6 x 6, 16 a step."""
    data: dict[str, Any] = {"train_data": partial(images, 200), "eval_data": partial(images, 60, 2)}
    optimizer = partial(torch.optim.SGD, lr=0.02, momentum=0.9)
    return mlp(
        200,
        16,
        steps,
        model=partial(Net, way),
        loss=classify,
        optimizer=optimizer,
        metrics={"accuracy": accuracy},
        **data,
    )
