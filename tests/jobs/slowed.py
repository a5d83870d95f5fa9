"""A perceptron that can be slowed down in ways of which `shoal doctor` has to find each."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import shoal


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Samples of 64 numbers; each takes `nap` seconds to read, as one on a slow disk."""

    def __init__(self, count: int, nap: float = 0.0) -> None:
        self.count, self.nap = count, nap

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        if self.nap:
            time.sleep(self.nap)
        return torch.full((64,), number % 7 / 7.0), torch.tensor(number % 10)


def _slow(rank: str, quota: str) -> None:
    """Puts this process into a cgroup, if it is that rank."""
    if quota and os.environ.get("RANK") == rank:
        with open(os.path.join(quota, "tasks"), "w", encoding="utf-8") as tasks:
            tasks.write(str(os.getpid()))


class Elementwise(nn.Module):
    """Operators on `features` numbers of a sample, which read and write memory and compute next to nothing."""

    def __init__(self, features: int, depth: int) -> None:
        super().__init__()
        self.scale, self.depth = nn.Parameter(torch.ones(features)), depth

    def forward(self, samples: Tensor) -> Tensor:
        """Scores [B, 10] of samples [B, 64]."""
        found = samples.mean(1, keepdim=True) * self.scale
        for _ in range(self.depth):
            found = torch.relu(found * 0.9)
        return found.unflatten(1, (10, -1)).mean(-1)


def job(
    width: int = 256,
    depth: int = 4,
    steps: int = 60,
    batch: int = 64,
    samples: int = 64_000,
    evaluated: int = 64,
    nap: float = 0.0,
    item: bool = False,
    bucket_bytes: int = 0,
    quota: str = "",
    elementwise: int = 0,
    grains: int = 8,
) -> shoal.Job:
    """`quota`: the cgroup of rank 1; `item`: the loss reads each of its inputs back; `elementwise`: numbers of a sample
    that operators go through, in place of the perceptron.
    """
    _slow("1", quota)
    if bucket_bytes:
        import shoal.parallel.data.replicated as buckets
        import shoal.plans.accounting.collectives as partition

        buckets.GLOO_BUCKET_BYTES = partition.END_BUCKET_BYTES = bucket_bytes
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]

    def perceptron() -> nn.Module:
        return nn.Sequential(nn.Linear(64, width), nn.ReLU(), *layers, nn.Linear(width, 10))

    def loss(model: nn.Module, data: Any) -> Any:
        inputs, labels = data
        if item:
            [value.item() for value in inputs.flatten()]
        return shoal.cross_entropy(model(inputs), labels)

    return shoal.Job(
        model=lambda: Elementwise(elementwise, depth) if elementwise else perceptron(),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        train_data=Samples(samples, nap),
        eval_data=Samples(evaluated),
        global_batch=batch,
        grains=grains,
        length=shoal.Steps(steps),
    )
