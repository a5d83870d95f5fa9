"""Models that train in milliseconds, one for each thing that parallel training gets wrong."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import witness
from torch import Tensor, nn

import shoal

IGNORED = -100


def generator(seed: int) -> torch.Generator:
    """A generator of its own: the data must not depend on what was drawn before."""
    return torch.Generator().manual_seed(seed)


def vectors(num_samples: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """float32 [N, 6], labels that a linear map decides int64 [N], and the samples' own ids int64 [N]."""
    inputs = torch.randn(num_samples, 6, generator=generator(seed))
    labels = (inputs @ torch.randn(6, 3, generator=generator(0))).argmax(1)
    return inputs, labels, torch.arange(num_samples)


def images(num_samples: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """float32 [N, 1, 6, 6] whose bright row decides the label, labels and ids int64 [N]."""
    labels = torch.arange(num_samples) % 3
    inputs = torch.randn(num_samples, 1, 6, 6, generator=generator(seed))
    inputs[torch.arange(num_samples), 0, labels * 2] += 2.0
    return inputs, labels, torch.arange(num_samples)


def classify(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """The summed cross entropy; tells the ids that it was given."""
    inputs, labels, ids = batch
    witness.trained(ids)
    return shoal.cross_entropy(model(inputs), labels)


def accuracy(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """As shoal.accuracy; tells the ids that were evaluated."""
    witness.log_ids("eval", batch[2])
    return shoal.accuracy(model, batch)


def mlp_model(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))


def sgd(parameters: Any, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def mlp(samples: int = 203, batch: int = 16, steps: int = 16, lr: float = 0.1, **changes: Any) -> shoal.Job:
    """Two layers by SGD with momentum."""
    fields: dict[str, Any] = {
        "model": mlp_model,
        "loss": classify,
        "optimizer": partial(sgd, lr=lr),
        "train_data": partial(vectors, samples),
        "eval_data": partial(vectors, 101, 2),
        "metrics": {"accuracy": accuracy},
        "global_batch": batch,
        "length": shoal.Steps(steps),
        "schedule": witness.Gated(),
    }
    return shoal.Job(**{**fields, **changes})


def job(samples: int = 203, batch: int = 16, steps: int = 16, lr: float = 0.1) -> shoal.Job:
    """The MLP."""
    return mlp(samples, batch, steps, lr)


def one_epoch(samples: int = 1003, batch: int = 64) -> shoal.Job:
    """The MLP, every sample once."""
    return mlp(samples, batch, length=shoal.Epochs(1))


def wide(optimizer: str = "torch") -> shoal.Job:
    """An MLP of 1.6 MB, by torch's SGD, or the same with a hook or of a class of its own."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        made = Own(parameters, lr=0.1, momentum=0.9) if optimizer == "own" else sgd(parameters)
        if optimizer == "hooked":
            made.register_step_post_hook(lambda *_: None)
        return made

    return mlp(model=partial(mlp_model, 40_000), optimizer=make, steps=6)


class Own(torch.optim.SGD):
    """An optimizer that is not torch's."""


class SlowToLoad(torch.utils.data.Dataset[Any]):
    """The vectors by item, for data-loading processes; augmented from the global generators."""

    def __init__(self, num_samples: int) -> None:
        self.inputs, self.labels, self.ids = vectors(num_samples)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        noise = torch.randn(6) * 0.1 + random.random() * 0.1
        return self.inputs[i] + noise, self.labels[i], self.ids[i]


def augmented() -> shoal.Job:
    """The MLP on samples that are changed at random as they are read."""
    return mlp(train_data=partial(SlowToLoad, 203), steps=8)


def conv_model() -> nn.Module:
    # Statistics over 32 and 18 values a grain: over the two values of a BatchNorm1d a training is chaotic, and rounding
    # alone would change every digit within ten steps.
    convolutions = (nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 2), nn.BatchNorm2d(4))
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(36, 3))


def convnet(samples: int = 200, batch: int = 16, steps: int = 16) -> shoal.Job:
    """Convolutions with BatchNorm; 200 samples, so that an epoch ends in a short step of whole grains."""
    return mlp(
        samples,
        batch,
        steps,
        0.02,
        model=conv_model,
        train_data=partial(images, samples),
        eval_data=partial(images, 60, 2),
    )


class TinyGPT(nn.Module):
    """Embedding, one causal block with dropout, and a head tied to the embedding: int64 [B, T] -> [B, T, 16]."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.norm = nn.LayerNorm(8)
        self.mix = nn.Linear(8, 24)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.embedding(tokens))
        query, key, value = self.mix(self.norm(x)).chunk(3, -1)
        x = x + self.dropout(F.scaled_dot_product_attention(query, key, value, is_causal=True))
        x = x + F.dropout(self.down(F.gelu(self.up(x))), 0.2, self.training)
        logits: Tensor = self.head(x)
        return logits


class Ragged(torch.utils.data.Dataset[Tensor]):
    """Sequences of 2 to 12 tokens that count upwards with gaps."""

    def __init__(self, num_samples: int, seed: int = 1) -> None:
        lengths = torch.randint(2, 13, (num_samples,), generator=generator(seed)).tolist()
        starts = torch.randint(0, 16, (num_samples,), generator=generator(seed + 1)).tolist()
        self.samples = [(torch.arange(n) * 3 + s) % 16 for n, s in zip(lengths, starts, strict=True)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> Tensor:
        return self.samples[i]


def pad(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    """int64 [B, 12] inputs and targets one token later, -100 at padding."""
    tokens = torch.full((len(samples), 13), IGNORED)
    for row, sample in zip(tokens, samples, strict=True):
        row[: len(sample)] = sample
    return tokens[:, :-1].clamp(min=0), tokens[:, 1:].contiguous()


def token_loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    inputs, targets = batch
    return shoal.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def gpt(steps: int = 16) -> shoal.Job:
    """Dropout, ragged lengths, tied weights, parameter groups, clipping, warm-up and cosine."""
    return shoal.Job(
        model=TinyGPT,
        loss=token_loss,
        optimizer=adamw,
        train_data=partial(Ragged, 150),
        eval_data=partial(Ragged, 40, 3),
        collate=pad,
        global_batch=20,
        length=shoal.Steps(steps),
        schedule=witness.Gated(shoal.warmup_cosine(warmup=0.2)),
        clip_norm=0.5,
    )


class Conditional(nn.Module):
    """Layers that only some samples use, one that none uses, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.rare, self.unused = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, inputs: Tensor, is_rare: Tensor) -> Tensor:
        inputs = inputs + self.frozen(inputs)
        out: Tensor = self.shared(inputs)
        if bool(is_rare.any()):
            out = out + self.rare(inputs) * is_rare[:, None]
        return out


def conditional_loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    inputs, labels, ids = batch
    return shoal.cross_entropy(model(inputs, (ids % 16 == 13).float()), labels)


def conditional() -> shoal.Job:
    """Sample 13 of each batch of 16, in order, alone uses `rare`: on 2 ranks always rank 1. Weight decay by AdamW."""
    return mlp(
        model=Conditional,
        loss=conditional_loss,
        metrics={},
        shuffle=False,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    )


class Opaque(nn.Module):
    """Draws from Python's generator in the forward: nothing that a scope over torch could divide by grain."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp_model()

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.inner(inputs * (1.0 + 0.2 * random.random())) if self.training else self.inner(inputs)
        return out


def opaque() -> shoal.Job:
    """A model with randomness of its own."""
    return mlp(model=Opaque)


def contrast(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    """Each sample against the others of its batch: a batch's loss is not the sum of its parts'."""
    inputs, _, ids = batch
    features = F.normalize(model(inputs), dim=1)
    return F.cross_entropy(features @ features.T / 0.5, torch.arange(len(ids)), reduction="sum"), len(ids)


def contrastive() -> shoal.Job:
    """A loss over pairs: the grain is what it compares within."""
    return mlp(loss=contrast, metrics={}, batch=32)


def steep(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """A loss so large that float16 overflows under the first loss scales, and fits under later ones."""
    total, weight = classify(model, batch)
    return total * 30.0, weight


def overflowing() -> shoal.Job:
    """For float16: some steps are skipped until the scale fits."""
    return mlp(loss=steep, lr=0.001, steps=20)
