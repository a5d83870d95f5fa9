"""Losses and metrics as pairs of sums (total, weight), so that they add up over grains and ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.errors import LossError


def cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy summed over valid targets, and the number of valid targets.

    Args:
        logits: [N, C] or [N, C, ...], any floating dtype. bfloat16 and float16 are computed in float32.
        targets: Class numbers, int64 [N] or [N, ...].
        ignore_index: Value of targets that do not count, by default -100.

    Raises:
        LossError: If the arguments are no such logits and targets.
    """
    if not isinstance(logits, Tensor) or not isinstance(targets, Tensor):
        raise _no_tensors("shoal.cross_entropy", logits, targets)
    if targets.is_floating_point():
        raise LossError(
            given=f"shoal.cross_entropy of logits {_shape(logits)} and targets {_shape(targets)}, {targets.dtype}",
            conflict="targets are class numbers (int64), which count as one each; probabilities do not",
            remedy='for probabilities [N, C] return (F.cross_entropy(logits, targets, reduction="sum"), len(targets)); '
            "for class numbers write targets.long()",
        )
    if (logits.shape[:1] + logits.shape[2:] if logits.ndim > 1 else logits.shape[:-1]) != targets.shape:
        raise LossError(
            given=f"shoal.cross_entropy of logits {_shape(logits)} and targets {_shape(targets)}",
            conflict="classes are dim 1: logits [N, C] have targets [N], logits [N, C, ...] have targets [N, ...]",
            remedy="for logits [batch, positions, C] write cross_entropy(logits.flatten(0, 1), targets.flatten())",
        )
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    total = F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")
    return total, (targets != ignore_index).sum()


def mse(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the squared error summed over all elements, and the number of elements.

    Raises: LossError if an argument is no tensor or the shapes differ.
    """
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        raise _no_tensors("shoal.mse", outputs, targets)
    if outputs.shape != targets.shape:
        raise LossError(
            given=f"shoal.mse of outputs {_shape(outputs)} and targets {_shape(targets)}",
            conflict="each output has its own target: other shapes would be broadcast against each other",
            remedy="give both one shape: targets.view_as(outputs), say, or outputs.squeeze(-1)",
        )
    # A count is filled on the device, because a copy from the host would wait for queued work.
    count = torch.full((), targets.numel(), device=outputs.device)
    return F.mse_loss(outputs, targets, reduction="sum"), count


def accuracy(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Return the number of correct predictions and the number of all predictions.

    `batch` is (inputs, targets) with int64 targets [N] or [N, ...]. `model(inputs)` returns logits [N, C] or [N, C,
    ...]. Raises: LossError for other batches and outputs.
    """
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        raise _no_pair(f"a batch that is {_kind(batch)}")
    inputs, targets = batch[0], batch[1]
    logits = model(inputs)
    if not isinstance(logits, Tensor) or not isinstance(targets, Tensor):
        raise _no_pair(f"a model that gives {_kind(logits)}, and targets that are {_kind(targets)}")
    if logits.ndim < 2 or logits.shape[:1] + logits.shape[2:] != targets.shape:
        raise _no_pair(f"logits {_shape(logits)} and targets {_shape(targets)}")
    correct = (logits.argmax(dim=1) == targets).sum()
    return correct, torch.full((), targets.numel(), device=correct.device)


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
    """Describe a value for a message: a tensor with its shape, a mapping with its keys."""
    if isinstance(value, Tensor):
        return f"a tensor {_shape(value)}"
    names = f" of {', '.join(map(str, value))}"[:200] if isinstance(value, Mapping) else ""
    return f"of type {type(value).__name__}{names}"
