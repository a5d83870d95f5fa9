"""Jobs with mistakes that people make in their own code; `shoal verify` has to find and explain each."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from tiny import IGNORED, TinyGPT, gpt, mlp
from torch import Tensor, nn

import shoal


def mean_over_tokens(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    """The mean over the valid tokens, called a sum over the samples."""
    inputs, targets = batch[0], batch[1]
    mean = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    return mean * len(inputs), len(inputs)


def bare_mean(model: nn.Module, batch: Any) -> Tensor:
    """As in every tutorial."""
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=IGNORED)


def ragged() -> shoal.Job:
    return shoal.Job(**{**vars(gpt()), "loss": mean_over_tokens})


def bare() -> shoal.Job:
    return shoal.Job(**{**vars(gpt()), "loss": bare_mean})


class Seeded(nn.Module):
    """Seeds its dropout by the rank, so that "every rank draws other masks"."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout, self.last = nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(int(os.environ.get("RANK", "0")))
        out: Tensor = self.last(self.dropout(torch.tanh(self.first(x))))
        return out


def seeded() -> shoal.Job:
    return mlp(model=Seeded)


class TiedLate:
    """Makes the optimizer's list before the head gets the embedding's weight."""

    def __init__(self) -> None:
        self.parameters: list[nn.Parameter] = []

    def model(self) -> nn.Module:
        model = TinyGPT()
        model.head = nn.Linear(8, 16, bias=False)
        self.parameters = list(model.parameters())
        model.head.weight = model.embedding.weight
        return model

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters, lr=0.1)


def tied_late() -> shoal.Job:
    late = TiedLate()
    return shoal.Job(**{**vars(gpt()), "model": late.model, "optimizer": late.optimizer})


class Unseeded(nn.Module):
    """Noise from a generator that nobody seeds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        noise = int.from_bytes(os.urandom(2), "little") / 2**16
        out: Tensor = self.last(torch.tanh(self.first(x)) * noise)
        return out


unseeded = partial(mlp, model=Unseeded)

OUTSIDE = nn.Linear(6, 3)
OWN = torch.Generator()
OWN.seed()
nn.init.uniform_(OUTSIDE.weight, generator=OWN)
outside = partial(mlp, model=lambda: OUTSIDE)


class Dying(nn.Module):
    """Ends its process on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        if os.environ.get("RANK") == "1":
            print("these are my last", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        out: Tensor = self.last(x)
        return out


dying = partial(mlp, model=Dying)
