"""The cases: small jobs, one for each thing that parallel training gets wrong somewhere. See README.md here.

Plain torch and shoal.Job values only, so that another framework can run them through an adapter of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shoal

IGNORED = -100


@dataclass(frozen=True)
class Case:
    """A job, on how many ranks it is run, and the sections of the plan that it is about."""

    job: Callable[[], shoal.Job]
    ranks: tuple[int, ...] = (2,)
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    steps: int = 3
    slow: bool = False
    undivided: bool = False  # its model has no layer that could be cut
    blocks: bool = False  # whether it repeats blocks over sequences, which is what the context axis divides


def generator(seed: int) -> torch.Generator:
    """Data do not depend on what was drawn before."""
    return torch.Generator().manual_seed(seed)


def vectors(num_samples: int, width: int = 6, seed: int = 1) -> tuple[Tensor, Tensor]:
    """float32 [N, width] and labels int64 [N] of three classes that a linear map decides."""
    inputs = torch.randn(num_samples, width, generator=generator(seed))
    return inputs, (inputs @ torch.randn(width, 3, generator=generator(0))).argmax(1)


def images(num_samples: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """float32 [N, 1, 6, 6] whose bright row decides the label int64 [N]."""
    labels = torch.arange(num_samples) % 3
    inputs = torch.randn(num_samples, 1, 6, 6, generator=generator(seed))
    inputs[torch.arange(num_samples), 0, labels * 2] += 2.0
    return inputs, labels


def tokens(num_samples: int, vocabulary: int = 16, length: int = 12, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Ragged sequences as (inputs, targets) int64 [N, length]; targets are -100 behind a sample's end."""
    draw = generator(seed)
    found = torch.randint(vocabulary, (num_samples, length + 1), generator=draw)
    lengths = torch.randint(1, length + 1, (num_samples, 1), generator=draw)
    targets = found[:, 1:].masked_fill(torch.arange(length) >= lengths, IGNORED)
    return found[:, :-1].contiguous(), targets


def classify(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Cross entropy over the samples."""
    return shoal.cross_entropy(model(batch[0]), batch[1])


def next_token(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Cross entropy over the valid tokens."""
    return shoal.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=IGNORED)


def sgd(parameters: Any, lr: float = 0.1) -> torch.optim.Optimizer:
    """With momentum."""
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def adamw(parameters: Any, lr: float = 0.01) -> torch.optim.Optimizer:
    """With a group that decays and one that does not."""
    every = list(parameters)
    groups = [
        {"params": [p for p in every if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in every if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr)


def mlp(width: int = 16) -> nn.Module:
    """Two layers."""
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))


def job(**changes: Any) -> shoal.Job:
    """The MLP by SGD with momentum, a schedule and clipping; 100 samples by 16."""
    fields: dict[str, Any] = {
        "model": mlp,
        "loss": classify,
        "optimizer": sgd,
        "train_data": partial(vectors, 100),
        "eval_data": partial(vectors, 37, seed=2),
        "metrics": {"accuracy": shoal.accuracy},
        "global_batch": 16,
        "length": shoal.Steps(20),
        "schedule": shoal.warmup_cosine(0.2),
        "clip_norm": 1.0,
    }
    return shoal.Job(**{**fields, **changes})


class LanguageModel(nn.Module):
    """Embedding, one causal block with dropout, and a head tied to the embedding: int64 [B, T] -> [B, T, V]."""

    def __init__(self, vocabulary: int = 16, width: int = 8, dropout: float = 0.0, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.dropout(self.embedding(ids))
        query, key, value = self.mix(self.norm(x)).chunk(3, -1)
        x = x + self.dropout(F.scaled_dot_product_attention(query, key, value, is_causal=True))
        x = x + self.dropout(self.down(F.gelu(self.up(x))))
        logits: Tensor = self.head(x)
        return logits


def language(vocabulary: int = 16, dropout: float = 0.0, tied: bool = True, **changes: Any) -> shoal.Job:
    """The language model by AdamW on ragged tokens."""
    fields: dict[str, Any] = {
        "model": partial(LanguageModel, vocabulary, 8, dropout, tied),
        "loss": next_token,
        "optimizer": adamw,
        "train_data": partial(tokens, 64, vocabulary),
        "eval_data": partial(tokens, 19, vocabulary, seed=2),
        "metrics": {},
    }
    return job(**{**fields, **changes})


class AttentionBlock(nn.Module):
    """Causal attention of three heads, and a perceptron: float32 [B, T, W] -> the same, positions by a rotation."""

    def __init__(self, dropout: float, width: int = 12) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        query, key, value = self.mix(self.norm(x)).unflatten(-1, (3, 3, x.shape[-1] // 3)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query * rotation, key * rotation, value, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        out: Tensor = x + self.dropout(self.down(F.gelu(self.up(x))))
        return out


class WideLayers(nn.Module):
    """Two wide layers: [B, 128] -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.relu(self.up(x)))
        return out


class Blocks(nn.Module):
    """A stack of blocks over tokens, int64 [B, T] -> [B, T, V], its activations computed again where `recompute`."""

    def __init__(
        self, dropout: float = 0.2, recompute: bool = False, vocabulary: int = 16, width: int = 12, layers: int = 3
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(AttentionBlock(dropout, width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        rotation = torch.arange(ids.shape[1])[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
        rotation = torch.cos(rotation).to(x).repeat(1, x.shape[-1] // 12)
        for block in self.blocks:
            again = self.recompute and self.training
            x = checkpoint(block, x, rotation, use_reentrant=False) if again else block(x, rotation)
        logits: Tensor = self.head(x)
        return logits


class Frozen(nn.Module):
    """A frozen layer, one that nothing uses, and one that only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 8).requires_grad_(False)
        self.unused = nn.Linear(8, 8)
        self.sometimes = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.frozen(x))
        out: Tensor = self.last(x)
        positive = out[:, 0] > 0.4  # a row decides for itself, so that it does not matter with whom it is computed
        if bool(positive.any()):
            out = torch.where(positive[:, None], out + self.sometimes(x)[:, :3], out)
        return out


class Shared(nn.Module):
    """One layer used twice, parameters of one element, and buffers of several rules."""

    steps: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.again = self.inner
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.zeros(1))
        self.last = nn.Linear(6, 3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("seen", torch.tensor(2**60))
        self.register_buffer("largest", torch.full((6,), -1e9))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
            self.seen += len(x)
            self.largest = torch.maximum(self.largest, x.detach().amax(0))
            self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        out: Tensor = self.last(torch.tanh(self.again(torch.tanh(self.inner(x)))) * self.scale + self.shift)
        return out


class Strided(nn.Module):
    """Weights used transposed, so that their gradients are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(6, 10) * 0.3)
        self.second = nn.Parameter(torch.randn(10, 3).t().contiguous().t() * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.first) @ self.second


class Recomputed(nn.Module):
    """Blocks with dropout whose activations are computed again in the backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2)) for _ in range(2))
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.training else block(x)
        out: Tensor = self.last(x)
        return out


def convolutions() -> nn.Module:
    """With BatchNorm."""
    layers = (nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 2), nn.BatchNorm2d(4))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(36, 3))


class Stacked(nn.Module):
    """The language model with blocks in a list, whose dropout and products are within them."""

    def __init__(self, vocabulary: int = 16, width: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
            if layer % 2
            else Perceptron(width)
            for layer in range(2 * layers)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class Perceptron(nn.Module):
    """With dropout, around a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.dropout(self.down(F.gelu(self.up(x))))
        return out


class Residual(nn.Module):
    """Two convolutions with BatchNorm around a shortcut."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))
        return out


def residual() -> nn.Module:
    """A small ResNet."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Sequential(Residual(), Residual()), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 3)
    )


def contrastive(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    """Each sample against the others of its batch."""
    features = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(features @ features.T * 5.0, torch.arange(len(features)), reduction="sum"), len(features)


class Opaque(nn.Module):
    """Noise from Python's and numpy's generators: nothing that could be divided by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        noise = random.random() + float(np.random.rand()) if self.training else 1.0
        out: Tensor = self.last(torch.tanh(self.first(x)) * noise)
        return out


def dropping() -> nn.Module:
    """The MLP with dropout."""
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3))


def odd() -> nn.Module:
    """Sizes that no number of ranks divides."""
    return nn.Sequential(nn.Linear(6, 7, bias=False), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


def grouped(num: int) -> dict[str, dict[str, Any]]:
    """So many grains a microbatch."""
    return {"batch": {"grains_per_microbatch": num}}


def marked(num_samples: int) -> tuple[Tensor, Tensor]:
    """As `vectors`, the first 16 with a mark in their first column."""
    inputs, labels = vectors(num_samples)
    inputs[:16, 0] = 100.0
    return inputs, labels


def without_first(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Cross entropy over the samples without the mark."""
    inputs, labels = batch
    kept = labels.masked_fill(inputs[:, 0] == 100.0, IGNORED)
    return shoal.cross_entropy(model(inputs), kept, ignore_index=IGNORED)


def recomputing(kind: str, num: int = 2) -> dict[str, dict[str, Any]]:
    """Activations computed again in the backward, in microbatches of so many grains."""
    return {"memory": {"recompute": kind}, **grouped(num)}


COMPILED = {"execution": {"compile": "default"}, **grouped(2)}
BF16 = {"precision": {"parameters": "float32", "compute": "bfloat16"}}
FP8 = {"precision": {"compute": "bfloat16", "products": "float8_rows"}}
PURE = {"precision": {"parameters": "bfloat16", "compute": "bfloat16"}}
FP16 = {"precision": {"compute": "float16", "loss_scale": "dynamic"}}

CASES: dict[str, Case] = {
    "mlp": Case(job, (1, 2, 3)),
    "ragged tokens": Case(partial(language, tied=False), (2, 3)),
    "tied embeddings": Case(language, (2, 3)),
    "vocabulary 50257": Case(partial(language, 50257), (2, 3, 5), steps=1),
    "frozen, unused, conditional": Case(partial(job, model=Frozen), (2, 3)),
    "uneven last batch": Case(partial(job, train_data=partial(vectors, 21), length=shoal.Epochs(2)), (2, 3)),
    "empty rank": Case(partial(job, train_data=partial(vectors, 17), length=shoal.Epochs(2)), (3, 4)),
    "a rank that never gets anything": Case(
        partial(job, train_data=partial(vectors, 4), global_batch=4, grains=4), (4,)
    ),
    "batch normalisation": Case(
        partial(job, model=convolutions, train_data=partial(images, 100), eval_data=partial(images, 30, 2))
    ),
    "dropout": Case(partial(job, model=dropping), (2, 3)),
    "dropout and ragged tokens": Case(partial(language, dropout=0.3), (2, 3)),
    "accumulation of 1": Case(job, (2,), grouped(4)),
    "accumulation of 3": Case(partial(job, grains=6, global_batch=18), (2,), grouped(1)),
    "accumulation of 4": Case(job, (2,), grouped(1)),
    "clipping that bites": Case(partial(job, clip_norm=0.01), (2, 3)),
    "clipping by value": Case(partial(job, clip_norm=None, clip_value=0.01), (2, 3), slow=True),
    "no clipping": Case(partial(job, clip_norm=None), (2,)),
    "bf16": Case(language, (2, 3), BF16),
    "pure bf16": Case(partial(job, clip_norm=None), (2,), PURE),
    "fp16 with an overflow": Case(partial(job, model=partial(mlp, 32), loss=lambda m, b: _large(m, b)), (2,), FP16),
    "AdamW with groups": Case(partial(job, optimizer=adamw), (2, 3)),
    "shared modules, one element, buffers": Case(partial(job, model=Shared), (2, 3)),
    "strided gradients": Case(partial(job, model=Strided), (2, 3), undivided=True),
    "checkpointing": Case(partial(job, model=partial(Recomputed, False)), (2,), grouped(2)),
    "reentrant checkpointing": Case(partial(job, model=partial(Recomputed, True)), (2,), grouped(2)),
    **{
        f"{kind} recomputation of {name}": Case(made, (2,), recomputing(kind))
        for kind in ("selective", "full")
        for name, made in {
            "blocks with dropout": partial(language, model=Stacked),
            "batch normalisation": partial(
                job, model=residual, train_data=partial(images, 100), eval_data=partial(images, 30, 2)
            ),
            "a model that checkpoints itself": partial(job, model=partial(Recomputed, False)),
        }.items()
    },
    "full recomputation, in bf16": Case(partial(language, model=Stacked), (2,), {**recomputing("full"), **BF16}),
    **{
        f"compiled{with_}": Case(
            partial(language, model=partial(Stacked, layers=1)), (2,), {**COMPILED, **further}, steps=2, slow=True
        )
        for with_, further in {"": {}, " and computed again": {"memory": {"recompute": "full"}}}.items()
    },
    "a loss over pairs": Case(partial(job, loss=contrastive, fuse=False, metrics={}), (2, 3)),
    "randomness outside torch": Case(partial(job, model=Opaque), (2,)),
    "a first batch without weight": Case(
        partial(job, loss=without_first, train_data=partial(marked, 100), shuffle=False), (2, 3)
    ),
    "blocks": Case(partial(language, model=Blocks), (2, 3), blocks=True),
    "blocks in bf16": Case(partial(language, model=partial(Blocks, 0.0)), (2, 3), BF16, blocks=True),
    "blocks in float8": Case(
        partial(language, model=partial(Blocks, 0.0, width=144, layers=2)), (2,), FP8, blocks=True
    ),
    "blocks computed again": Case(partial(language, model=partial(Blocks, recompute=True)), (2, 3), blocks=True),
    "odd sizes": Case(partial(job, model=odd, global_batch=15, grains=5), (3,)),
}


def _large(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """A loss whose gradient overflows float16 under the first loss scales, and not under later ones."""
    total, weight = shoal.cross_entropy(model(batch[0]) * 300.0, batch[1])
    return total * 40.0, weight
