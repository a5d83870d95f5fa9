"""A small model with BatchNorm and the faults that the environment asks for; without it nothing goes wrong.

Samples come in order: 16 a step, 2 a grain. So sample i is in step i // 16 (from 0), and of 2 ranks on rank
i % 16 // 8.
"""

from __future__ import annotations

import os
from typing import Any

import tiny
import torch
import witness
from torch import Tensor, nn

import shoal

NAN_SAMPLES = [int(i) for i in os.environ.get("TEST_NAN", "").split(",") if i]
RAISE = os.environ.get("TEST_RAISE", "")  # PLACE:SAMPLE, the place one of data, forward, backward
RAISING_RANK = os.environ.get("TEST_RAISING_RANK", "")  # alone; whoever has the sample where it is empty
MAX_ROWS = int(os.environ.get("TEST_MAX_ROWS", "0"))
POLICY: Any = os.environ.get("TEST_POLICY", "stop")


def should_raise(place: str, ids: Any) -> bool:
    """Whether these samples hold the one that is to raise there."""
    where, _, sample = RAISE.partition(":")
    if RAISING_RANK not in ("", os.environ.get("RANK")):
        return False
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


def limit_rows(count: int) -> None:
    """Raises: what torch or Python raises for want of memory, where a batch has more rows than $TEST_MAX_ROWS."""
    if MAX_ROWS and count > MAX_ROWS:
        kind = MemoryError if os.environ.get("TEST_MEMORY_OF") == "host" else torch.OutOfMemoryError
        raise kind(f"simulated: {count} rows, at most {MAX_ROWS} fit")


def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    inputs, labels, ids = batch
    if should_raise("forward", ids):
        raise ValueError("a sample that the model cannot take")
    limit_rows(len(ids))
    logits = model(inputs)
    if should_raise("backward", ids):
        logits = RaisesInBackward.apply(logits)
    witness.trained(ids)
    return shoal.cross_entropy(logits, labels)


def contrast(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    limit_rows(len(batch[2]))
    return tiny.contrast(model, batch)


def normed() -> nn.Module:
    """Statistics over 16 values a sample, for the same reason as in tiny.py."""
    norm = (nn.Unflatten(1, (2, 16)), nn.BatchNorm1d(2), nn.Flatten())
    return nn.Sequential(nn.Linear(6, 32), *norm, nn.Tanh(), nn.Linear(32, 3))


def dropped() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))


def job(steps: int = 8, **changes: Any) -> shoal.Job:
    """BatchNorm."""
    fields: dict[str, Any] = {
        "model": normed,
        "loss": loss,
        "train_data": Data,
        "metrics": {},
        "eval_data": None,
        "shuffle": False,
        "on_nonfinite": POLICY,
    }
    return tiny.mlp(steps=steps, lr=0.02, **{**fields, **changes})


def dropout() -> shoal.Job:
    """Dropout in place of BatchNorm."""
    return job(model=dropped)


def contrastive() -> shoal.Job:
    """A loss over pairs, within a grain."""
    return job(model=tiny.mlp_model, loss=contrast)
