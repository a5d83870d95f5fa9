"""Jobs of which some grains add nothing: no positive sample, or no sample that the collate function keeps."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

import shoal

STEPS, BATCH = 3, 8


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def inputs() -> Tensor:
    return torch.randn(STEPS * BATCH, 4, generator=torch.Generator().manual_seed(0))


class Rows(Dataset[Any]):
    """Rows with targets; of each batch only samples 1 and 2 are positive, the others are None if they have holes."""

    def __init__(self, holes: bool) -> None:
        self.inputs, self.holes = inputs(), holes

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, i: int) -> Any:
        positive = i % BATCH in (1, 2)
        return None if self.holes and not positive else (self.inputs[i], i % 3 if positive else -1)


def kept(samples: list[Any]) -> Any:
    return default_collate([sample for sample in samples if sample is not None])


def detection(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    """Only positive samples count, and the model is called for them alone."""
    positive = batch[1] >= 0
    if not positive.any():
        return torch.zeros(()), 0
    return F.cross_entropy(model(batch[0][positive]), batch[1][positive], reduction="sum"), int(positive.sum())


def constant(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    """As `detection`, with a weight though there is nothing to learn from."""
    total, _ = detection(model, batch)
    return total, len(batch[1])


def summing(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Adds up over the ranks by itself."""
    total, weight = shoal.cross_entropy(model(batch[0]), batch[1], ignore_index=-1)
    if dist.is_initialized():
        dist.all_reduce(weight)
    return total, weight


def waiting(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Waits for the other ranks."""
    if dist.is_initialized():
        dist.barrier()
    return shoal.cross_entropy(model(batch[0]), batch[1], ignore_index=-1)


def nothing(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    """A constant for every batch."""
    return torch.zeros(()), len(batch[1])


LOSSES = {"detection": detection, "constant": constant, "summing": summing, "waiting": waiting, "nothing": nothing}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def job(loss: str = "detection", holes: bool = False) -> shoal.Job:
    return shoal.Job(
        model=net,
        loss=LOSSES[loss],
        optimizer=sgd,
        train_data=lambda: Rows(holes),
        collate=kept,
        eval_data=lambda: Rows(holes),
        shuffle=False,
        global_batch=BATCH,
        grains=4,
        length=shoal.Steps(STEPS),
    )


def plain(holes: bool, loss: str = "detection") -> dict[str, Tensor]:
    """Weights of a loop over whole batches that knows nothing of shoal."""
    model, data = net(), Rows(holes)
    optimizer = sgd(model.parameters())
    for start in range(0, len(data), BATCH):
        optimizer.zero_grad()
        total, weight = LOSSES[loss](model, kept([data[i] for i in range(start, start + BATCH)]))
        (total / weight).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}
