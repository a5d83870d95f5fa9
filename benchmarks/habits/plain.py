"""Plain torch: the training loop that every program's numbers are compared with, and the pieces that many share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, default_collate

Tensors = dict[str, torch.Tensor]


@dataclass
class Trained:
    """Mean loss of each step, the model's first and last tensors, and what the last evaluation gave."""

    losses: list[float]
    first: Tensors
    last: Tensors
    evaluated: dict[str, float] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------- pieces that many share


def points() -> tuple[torch.Tensor, torch.Tensor]:
    """64 points of 16 numbers in 4 classes: four steps of 16, so that a run of six begins a second epoch."""
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] * 3).long().clamp(0, 3)


class Points(torch.utils.data.Dataset):
    """The same as a dataset."""

    def __init__(self) -> None:
        self.x, self.y = points()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.y[i]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


def cross_entropy(model: nn.Module, batch: Any) -> Any:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


DEFAULTS = {
    "model": mlp,
    "loss": cross_entropy,
    "optimizer": sgd,
    "train_data": points,
    "global_batch": 16,
    "steps": 6,
}


# ------------------------------------------------------------------------------------------------------- the loop


def opened(data: Any) -> Any:
    """A data set, where a class or a function is given."""
    return data() if isinstance(data, type) or (callable(data) and not hasattr(data, "__getitem__")) else data


def batches(data: Any, size: int, collate: Callable[[list[Any]], Any] | None) -> Iterator[Any]:
    """Batches of one pass, in order; each is a copy of its rows, as a DataLoader gives it."""
    rows = opened(data)
    if isinstance(rows, DataLoader):
        yield from rows
        return
    if isinstance(rows, IterableDataset) or not hasattr(rows, "__getitem__"):  # a stream
        items = []
        for item in rows:
            items.append(item)
            if len(items) == size:
                yield (collate or default_collate)(items)
                items = []
        return
    if isinstance(rows, tuple | dict):
        parts = list(rows.values()) if isinstance(rows, dict) else list(rows)
        for start in range(0, len(parts[0]), size):
            ids = torch.arange(start, min(start + size, len(parts[0])))
            taken = [torch.as_tensor(part)[ids] for part in parts]
            yield dict(zip(rows, taken, strict=True)) if isinstance(rows, dict) else tuple(taken)
        return
    for start in range(0, len(rows), size):
        yield (collate or default_collate)([rows[i] for i in range(start, min(start + size, len(rows)))])


def train(**pieces: Any) -> Trained:
    """One process, the whole global batch in each step: zero_grad, loss, backward, step."""
    asked = {**DEFAULTS, **pieces}
    model = asked["model"]()
    model.train()
    optimizer = asked["optimizer"](list(model.parameters()))
    data, epoch, losses = opened(asked["train_data"]), 0, []
    first: Tensors = {}
    while not _done(asked, losses, epoch):
        for of in (data, getattr(data, "sampler", None)):
            if hasattr(of, "set_epoch"):
                of.set_epoch(epoch)
        for batch in batches(data, asked["global_batch"], asked.get("collate")):
            if _done(asked, losses, epoch):
                break
            if not first and not any(map(nn.parameter.is_lazy, model.parameters())):
                first = tensors(model)
            optimizer.zero_grad()
            losses.append(_step(asked, model, batch))
            if asked.get("clip_norm"):
                nn.utils.clip_grad_norm_(model.parameters(), asked["clip_norm"])
            optimizer.step()
        epoch += 1
    if hasattr(optimizer, "eval"):  # the weights that are evaluated and handed on
        optimizer.eval()
    last = tensors(model)
    return Trained(losses, first or dict.fromkeys(last, torch.zeros(())), last, evaluate(asked, model))


def train_by_grain(**pieces: Any) -> Trained:
    """The loop with ghost batches: batch statistics are those of a grain, an eighth of the batch.

    Each grain begins at the buffers from before the step; the mean of theirs is kept.
    """
    return train(**pieces, num_grains=pieces.pop("grains", 8))


def tensors(model: nn.Module) -> Tensors:
    """A copy of the model's state."""
    return {name: value.detach().clone() for name, value in model.state_dict().items() if torch.is_tensor(value)}


def evaluate(asked: dict[str, Any], model: nn.Module) -> dict[str, float]:
    """Mean loss and metrics over the evaluation data; empty where there is none."""
    if asked.get("eval_data") is None:
        return {}
    model.eval()
    sums: dict[str, list[float]] = {}
    for batch in batches(asked["eval_data"], asked["global_batch"], asked.get("collate")):
        for name, function in {"loss": asked["loss"], **asked.get("metrics", {})}.items():
            total, weight = map(torch.as_tensor, function(model, copy.deepcopy(batch)))
            so_far = sums.setdefault(name, [0.0, 0.0])
            so_far[0], so_far[1] = so_far[0] + float(total.detach()), so_far[1] + float(weight)
    return {name: total / weight if weight else float("nan") for name, (total, weight) in sums.items()}


def _done(asked: dict[str, Any], losses: list[float], epoch: int) -> bool:
    return epoch >= asked["epochs"] if asked.get("epochs") else len(losses) >= asked["steps"]


def _step(asked: dict[str, Any], model: nn.Module, batch: Any) -> float:
    """Gradients of one batch's mean loss, which is returned."""
    grains = asked.get("num_grains")
    if not grains:
        total, weight = asked["loss"](model, batch)
        mean = total / weight
        mean.backward()
        return float(mean.detach())
    before = {name: value.clone() for name, value in model.named_buffers()}
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in before}
    size, sums = len(batch[1]) // grains, []
    for start in range(0, len(batch[1]), size):
        for name, value in model.named_buffers():
            value.copy_(before[name])
        total, weight = asked["loss"](model, tuple(part[start : start + size] for part in batch))
        (total / len(batch[1])).backward()
        assert weight == size
        sums.append(float(total.detach()))
        for name, value in model.named_buffers():
            seen[name].append(value.clone())
    for name, value in model.named_buffers():
        value.copy_(torch.stack([part.double() for part in seen[name]]).mean(0))
    return sum(sums) / len(batch[1])
