"""A language model that every axis of a layout can divide."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import tiny
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal

WIDTH, HEADS = 8, 2


class Block(nn.Module):
    """Causal attention and a perceptron with dropout: [B, T, 8] -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        # Without biases: a softmax does not see the key's, whose gradient is rounding alone, and Adam would amplify it.
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        of = (layer(self.norm(x)).unflatten(-1, (-1, WIDTH // HEADS)) for layer in (self.query, self.key, self.value))
        query, key, value = (heads.transpose(1, 2) for heads in of)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        out: Tensor = x + self.dropout(self.down(F.gelu(self.up(x))))
        return out


class Stack(nn.Module):
    """Two blocks between an embedding and a head that are one parameter: int64 [B, T] -> [B, T, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(16, WIDTH), nn.Embedding(12, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.mark()

    def mark(self) -> None:
        """Write on each parameter whether it decays: `by_marks` groups by it."""
        for p in self.parameters():
            p.decays = p.ndim >= 2  # type: ignore[attr-defined]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def by_marks(parameters: Any) -> torch.optim.Optimizer:
    """The groups of `tiny.adamw`, by what the model wrote on its parameters: each layout's parts have it."""
    groups = [
        {"params": [p for p in parameters if p.decays is decays], "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def stack(steps: int = 50) -> shoal.Job:
    """Dropout, ragged lengths, tied weights, AdamW with groups, clipping, warm-up and cosine."""
    return shoal.Job(
        model=Stack,
        loss=tiny.token_loss,
        optimizer=by_marks,
        train_data=partial(tiny.Ragged, 150),
        eval_data=partial(tiny.Ragged, 40, 3),
        collate=tiny.pad,
        global_batch=20,
        length=shoal.Steps(steps),
        schedule=shoal.warmup_cosine(warmup=0.2),
        clip_norm=0.5,
    )


def watched(watch: str = "loss:max", epochs: int = 5) -> shoal.Job:
    """The same in epochs; the best checkpoint is the one of the largest loss, say, which is an early one."""
    return dataclasses.replace(stack(), length=shoal.Epochs(epochs), watch=watch)


class Unseeded(Stack):
    """Its values come from the system's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator()
        generator.seed()
        nn.init.normal_(self.embedding.weight, generator=generator)


def unseeded() -> shoal.Job:
    """`stack`, of which each process makes another model."""
    return dataclasses.replace(stack(), model=Unseeded)
