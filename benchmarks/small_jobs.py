"""Jobs on made-up data, tiny to large, whose steps small_steps.py measures: the examples' models and an MLP."""

from __future__ import annotations

import platform
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import shoal
from models import GPT, BasicBlock, LeNet, ResNet18
from shoal.hardware.detect import cores, processor

SAMPLES = 4096


def machine() -> dict[str, str]:
    """What a record says of the machine: processor, cores and versions."""
    hardware = f"{processor()}, {cores()} cores"
    return {"hardware": hardware, "torch": torch.__version__, "python": platform.python_version()}


def images() -> TensorDataset:
    """Float32 [N, 1, 28, 28] and int64 [N]."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(SAMPLES, 1, 28, 28, generator=generator), torch.randint(10, (SAMPLES,), generator=generator)
    )


def bytes_of(length: int) -> TensorDataset:
    """Two int64 [N, length]."""
    text = torch.randint(256, (SAMPLES, length + 1), generator=torch.Generator().manual_seed(0))
    return TensorDataset(text[:, :-1].clone(), text[:, 1:].clone())


def classified(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return shoal.cross_entropy(model(batch[0]), batch[1])


def continued(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return shoal.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


class MLP(nn.Module):
    """784 inputs, two hidden layers of `width`, 10 classes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(784, width), nn.Linear(width, width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(F.relu(self.second(F.relu(self.first(images.flatten(1))))))


class StridedResNet18(nn.Sequential):
    """ResNet18 behind the stem of He et al. for photographs: 64 x 64 made of 28 x 28, 7 x 7 stride 2, max pool."""

    def __init__(self) -> None:
        body = ResNet18()
        body.conv = nn.Conv2d(1, 64, 7, 2, padding=3, bias=False)
        body.relu = nn.Sequential(nn.ReLU(), nn.MaxPool2d(3, 2, padding=1))
        super().__init__(nn.Upsample((64, 64)), body)


def residual() -> nn.Module:
    """One block of ResNet18, small: for tries."""
    return nn.Sequential(BasicBlock(1, 8, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


def lenet(batch: int = 256) -> shoal.Job:
    return shoal.Job(
        model=LeNet,
        loss=classified,
        optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        train_data=images,
        global_batch=batch,
        length=shoal.Steps(10_000),
    )


def resnet18(batch: int = 64) -> shoal.Job:
    return shoal.Job(
        model=ResNet18,
        loss=classified,
        optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=5e-4),
        train_data=images,
        global_batch=batch,
        length=shoal.Steps(10_000),
    )


def mlp(batch: int = 256, width: int = 1024) -> shoal.Job:
    return shoal.Job(
        model=partial(MLP, width),
        loss=classified,
        optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        train_data=images,
        global_batch=batch,
        length=shoal.Steps(10_000),
    )


def gpt(batch: int = 32, layers: int = 4, width: int = 256, block: int = 128) -> shoal.Job:
    return shoal.Job(
        model=partial(GPT, layers, width, 4, block, 0.1),
        loss=continued,
        optimizer=partial(adamw, lr=1e-3),
        train_data=partial(bytes_of, block),
        global_batch=batch,
        length=shoal.Steps(10_000),
        clip_norm=1.0,
    )


def adamw(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr)
