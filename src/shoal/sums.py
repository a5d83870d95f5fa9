"""Losses and metrics as pairs of sums (total, weight), so that they add up over grains and ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over valid targets, and how many were valid.

    logits [N, C] or [N, C, ...], any floating dtype (computed in float32 at least); targets int64 [N] or [N, ...].
    Targets equal to `ignore_index` count for nothing.
    """
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    total = F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")
    return total, (targets != ignore_index).sum()


def mse(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Squared error summed over all elements, and how many elements; shapes equal."""
    if outputs.shape != targets.shape:
        raise ValueError(f"outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)} differ in shape")
    return F.mse_loss(outputs, targets, reduction="sum"), torch.tensor(targets.numel(), device=outputs.device)


def accuracy(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Correct predictions and predictions made; batch is (inputs, int64 targets [N]), the model gives logits [N, C]."""
    inputs, targets = batch[0], batch[1]
    correct = (model(inputs).argmax(dim=1) == targets).sum()
    return correct, torch.tensor(targets.numel(), device=correct.device)
