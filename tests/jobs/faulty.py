"""A small model with BatchNorm and the faults that the environment asks for; without it nothing goes wrong.

Samples come in order: 16 a step, 2 a grain. So sample i is in step i // 16 (from 0), and on 2 ranks on rank i % 16 // 8.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

import shoal
import tiny
import witness

NAN_SAMPLES = [int(i) for i in os.environ.get("TEST_NAN", "").split(",") if i]
RAISE = os.environ.get("TEST_RAISE", "")  # PLACE:SAMPLE, the place one of data, forward, backward
MAX_ROWS = int(os.environ.get("TEST_MAX_ROWS", "0"))
POLICY: Any = os.environ.get("TEST_POLICY", "stop")


def should_raise(place: str, ids: Any) -> bool:
    """Whether these samples hold the one that is to raise there."""
    where, _, sample = RAISE.partition(":")
    return where == place and int(sample) in (ids.tolist() if isinstance(ids, Tensor) else ids)


class Data(torch.utils.data.Dataset[Any]):
    """160 samples, some of them with a NaN, one that may raise."""

    def __init__(self) -> None:
        self.inputs, self.labels, self.ids = tiny.vectors(160)
        self.inputs[NAN_SAMPLES, 2] = float("nan")

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        if should_raise("data", [i]):
            raise OSError(f"cannot read sample {i}")
        return self.inputs[i], self.labels[i], self.ids[i]


class RaisesInBackward(torch.autograd.Function):
    """The identity forwards; backwards an error."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ValueError("no derivative here")


def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    inputs, labels, ids = batch
    if should_raise("forward", ids):
        raise ValueError("a sample that the model cannot take")
    if MAX_ROWS and len(ids) > MAX_ROWS:
        kind = MemoryError if os.environ.get("TEST_MEMORY_OF") == "host" else torch.OutOfMemoryError
        raise kind(f"simulated: {len(ids)} rows, at most {MAX_ROWS} fit")
    logits = model(inputs)
    if should_raise("backward", ids):
        logits = RaisesInBackward.apply(logits)
    witness.trained(ids)
    return shoal.cross_entropy(logits, labels)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def dropped() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))


def job(steps: int = 8, dropout: bool = False) -> shoal.Job:
    """BatchNorm, or dropout in its place."""
    return tiny.mlp(
        steps=steps,
        model=dropped if dropout else normed,
        loss=loss,
        train_data=Data,
        metrics={},
        eval_data=None,
        shuffle=False,
        on_nonfinite=POLICY,
    )
