"""A job that trains a byte-level GPT on Python's own help topics: ragged samples, tied weights, dropout."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import shoal
from datasets import IGNORED, pad, topics
from models import GPT

Batch = tuple[Tensor, Tensor]


def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The cross entropy in nats summed over the valid tokens, and their number. Batch: two int64 [B, T]."""
    inputs, targets = batch
    return shoal.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def bits_per_byte(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss in bits: a token is a byte, so their quotient is bits per byte."""
    total, weight = loss(model, batch)
    return total / math.log(2), weight


def accuracy(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """How many valid tokens the largest logit names, and how many are valid."""
    inputs, targets = batch
    # Padding is never right: no byte is -100.
    return (model(inputs).argmax(-1) == targets).sum(), (targets != IGNORED).sum()


def adamw(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """AdamW that decays matrices and embeddings, but neither biases nor norms."""
    every = list(parameters)
    groups = [
        {"params": [p for p in every if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in every if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for the matrices of the blocks, AdamW for embeddings, biases and norms; it has the groups of both."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], lr: float) -> None:
        matrices, others = [], []
        for name, p in named:
            (matrices if p.ndim == 2 and name.startswith("blocks.") else others).append(p)
        self.parts: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95))]
        if matrices:
            self.parts.append(torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw"))
        super().__init__([*others, *matrices], {})
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step both."""
        for part in self.parts:
            part.step()


def muon_and_adamw(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """Take the parameters by their names."""
    return MuonAndAdamW(parameters.named, lr)


def job(
    lr: float = 1e-3,
    steps: int = 300,
    batch: int = 32,
    layers: int = 4,
    width: int = 256,
    heads: int = 4,
    block: int = 128,
    dropout: float = 0.1,
    seed: int = 0,
) -> shoal.Job:
    """A GPT by AdamW with warm-up, a cosine and clipping; `block` is the longest context in bytes."""
    return shoal.Job(
        model=partial(GPT, layers, width, heads, block, dropout),
        loss=loss,
        optimizer=partial(adamw, lr=lr),
        train_data=partial(topics, "train", block),
        eval_data=partial(topics, "test", block),
        metrics={"bits_per_byte": bits_per_byte, "accuracy": accuracy},
        global_batch=batch,
        length=shoal.Steps(steps),
        schedule=shoal.warmup_cosine(warmup=0.1),
        clip_norm=1.0,
        seed=seed,
        collate=partial(pad, block=block),
    )


def muon(lr: float = 1e-3, steps: int = 300, width: int = 256, layers: int = 4, batch: int = 32) -> shoal.Job:
    """The same GPT by Muon and AdamW, with one learning rate for both."""
    return replace(job(lr, steps, batch, layers, width), optimizer=partial(muon_and_adamw, lr=lr))
