"""Small models that the tests of profiling share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from examples.models import GPT, LeNet, ResNet18
from torch import Tensor, nn

import shoal

T, WIDTH, HEADS = 32, 64, 4


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Any]
    batch: Callable[[int], Any]


def classify(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return shoal.cross_entropy(model(batch[0]), batch[1])


def next_token(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return shoal.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def images(samples: int) -> Any:
    return torch.zeros(samples, 1, 28, 28), torch.zeros(samples, dtype=torch.int64)


def tokens(samples: int) -> Any:
    return torch.zeros(samples, T, dtype=torch.int64), torch.zeros(samples, T, dtype=torch.int64)


def vectors(samples: int) -> Any:
    return torch.zeros(samples, 6), torch.zeros(samples, dtype=torch.int64)


def gpt(layers: int = 2, dropout: float = 0.1) -> nn.Module:
    return GPT(layers=layers, width=WIDTH, heads=HEADS, block=T, dropout=dropout)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


class Written(nn.Module):
    """Attention that a model writes out: products, a softmax, dropout."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        weights = F.dropout((q @ k.transpose(-1, -2)).softmax(-1), 0.1, self.training)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


CASES = {
    "mlp": Case(mlp, classify, vectors),
    "lenet": Case(LeNet, classify, images),
    "resnet": Case(ResNet18, classify, images),
    "gpt": Case(gpt, next_token, tokens),
}
