"""Losses and metrics as pairs of sums (total, weight), so that they add up over grains and ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.errors import LossError


def cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over valid targets, and how many were valid.

    logits [N, C] or [N, C, ...], any floating dtype (computed in float32 at least); targets int64 [N] or [N, ...].
    Targets equal to `ignore_index` count for nothing. Raises: LossError for what are no such logits and targets.
    """
    _refuse_logits(logits, targets)
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    total = F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")
    return total, (targets != ignore_index).sum()


def refuse_weight(weight: float) -> float:
    """The weight. Raises: LossError where no sum can have it: it is negative or infinite."""
    if weight < 0.0 or weight == math.inf:
        raise LossError(
            given=f"a loss whose weight is {weight}",
            conflict="the gradient is divided by the sum of the weights, each a number of samples or tokens",
            remedy="return how many the total sums over, 0 for none",
        )
    return weight


def mse(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Squared error summed over all elements, and how many elements; shapes equal. Raises: LossError."""
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        raise _no_tensors("shoal.mse", outputs, targets)
    if outputs.shape != targets.shape:
        raise LossError(
            given=f"shoal.mse of outputs {_shape(outputs)} and targets {_shape(targets)}",
            conflict="each output has its own target: other shapes would be broadcast against each other",
            remedy="give both one shape: targets.view_as(outputs), say, or outputs.squeeze(-1)",
        )
    return F.mse_loss(outputs, targets, reduction="sum"), _count(targets.numel(), outputs.device)


def accuracy(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Correct predictions and all predictions; batch is (inputs, int64 targets [N]), the model gives logits [N, C].

    Logits [N, C, ...] with targets [N, ...] too. Raises: LossError for other batches and outputs.
    """
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        raise _no_pair(f"a batch that is {_kind(batch)}")
    inputs, targets = batch[0], batch[1]
    logits = model(inputs)
    if not isinstance(logits, Tensor) or not isinstance(targets, Tensor):
        raise _no_pair(f"a model that gives {_kind(logits)}, and targets that are {_kind(targets)}")
    if logits.ndim < 2 or _without_classes(logits) != targets.shape:
        raise _no_pair(f"logits {_shape(logits)} and targets {_shape(targets)}")
    correct = (logits.argmax(dim=1) == targets).sum()
    return correct, _count(targets.numel(), correct.device)


def _count(number: int, device: torch.device) -> Tensor:
    """A count on a device: filled there, since a copy from the host would wait for what is queued."""
    return torch.full((), number, device=device)


def _without_classes(logits: Tensor) -> torch.Size:
    return logits.shape[:1] + logits.shape[2:]


def _refuse_logits(logits: Tensor, targets: Tensor) -> None:
    if not isinstance(logits, Tensor) or not isinstance(targets, Tensor):
        raise _no_tensors("shoal.cross_entropy", logits, targets)
    if targets.is_floating_point():
        raise LossError(
            given=f"shoal.cross_entropy of logits {_shape(logits)} and targets {_shape(targets)}, {targets.dtype}",
            conflict="targets are class numbers (int64), which count as one each; probabilities do not",
            remedy='for probabilities [N, C] return (F.cross_entropy(logits, targets, reduction="sum"), len(targets)); '
            "for class numbers write targets.long()",
        )
    if (_without_classes(logits) if logits.ndim > 1 else logits.shape[:-1]) != targets.shape:
        raise LossError(
            given=f"shoal.cross_entropy of logits {_shape(logits)} and targets {_shape(targets)}",
            conflict="classes are dim 1: logits [N, C] have targets [N], logits [N, C, ...] have targets [N, ...]",
            remedy="for logits [batch, positions, C] write cross_entropy(logits.flatten(0, 1), targets.flatten())",
        )


def _no_tensors(name: str, first: Any, second: Any) -> LossError:
    return LossError(
        given=f"{name} of {_kind(first)} and {_kind(second)}",
        conflict="it takes two tensors",
        remedy='give the tensors within: model(**batch).logits and batch["labels"], say',
    )


def _no_pair(given: str) -> LossError:
    return LossError(
        given=f"shoal.accuracy, {given}",
        conflict="it takes batches (inputs, targets [N]) and calls model(inputs) for logits [N, C]",
        remedy='write a metric of your own, a pair of sums, as metrics={"accuracy": right}:\n'
        "def right(model, batch):\n"
        '    found = model(**batch).logits.argmax(-1) == batch["labels"]\n'
        "    return found.sum(), found.numel()",
    )


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def _kind(value: Any) -> str:
    """What a value is, for a message: a tensor with its shape, a mapping with its names."""
    if isinstance(value, Tensor):
        return f"a tensor {_shape(value)}"
    names = f" of {', '.join(map(str, value))}"[:200] if isinstance(value, Mapping) else ""
    return f"of type {type(value).__name__}{names}"
