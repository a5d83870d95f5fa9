"""Losses and optimizers of plain torch, each with a small model."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from benchmarks.corpus.layers import CLASSES, classified, points
from benchmarks.corpus.row import SAMPLES, Batch, ids, numbers, torch_row


def small(outputs: int = CLASSES) -> nn.Module:
    """A perceptron with a norm and dropout."""
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, outputs))


def towards(outputs: int = CLASSES) -> Batch:
    """Points, and as many numbers as there are outputs."""
    return {"x": numbers(SAMPLES, 8), "y": numbers(SAMPLES, outputs, seed=1)}


def summed(function: Any, model: Any, batch: Batch) -> tuple[Tensor, int]:
    """A loss of torch's that is summed over the samples, of the outputs and the targets."""
    outputs = model(batch["x"])
    return function(outputs, batch["y"].to(outputs.dtype), reduction="sum"), len(outputs)


def probable(model: Any, batch: Batch) -> tuple[Tensor, int]:
    """The divergence from soft targets."""
    outputs = F.log_softmax(model(batch["x"]), -1)
    return F.kl_div(outputs, batch["y"].softmax(-1).to(outputs.dtype), reduction="sum"), len(outputs)


def counted(model: Any, batch: Batch) -> tuple[Tensor, int]:
    """The Poisson loss of counts."""
    outputs = model(batch["x"])
    return F.poisson_nll_loss(outputs, batch["y"].abs().round().to(outputs.dtype), reduction="sum"), outputs.numel()


def binary(model: Any, batch: Batch) -> tuple[Tensor, int]:
    """The cross entropy of yes and no, the yes weighted."""
    outputs = model(batch["x"])
    wanted = (batch["y"] > 0).to(outputs.dtype)
    weight = torch.tensor(2.0, dtype=outputs.dtype)
    return F.binary_cross_entropy_with_logits(outputs, wanted, pos_weight=weight, reduction="sum"), outputs.numel()


def gaussian(model: Any, batch: Batch) -> tuple[Tensor, int]:
    """The likelihood of a mean and a variance that are both learned."""
    mean, spread = model(batch["x"]).chunk(2, -1)
    wanted = batch["y"][:, : mean.shape[1]].to(mean.dtype)
    return F.gaussian_nll_loss(mean, wanted, F.softplus(spread) + 0.1, reduction="sum"), len(mean)


def ignoring(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """The smoothed cross entropy of those classes that are known."""
    wanted = torch.where(batch["y"] == 0, -100, batch["y"])
    total = F.cross_entropy(model(batch["x"]), wanted, ignore_index=-100, label_smoothing=0.1, reduction="sum")
    return total, (wanted != -100).sum()


def likely(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """The negative likelihood weighted by class: weights of samples are no whole numbers."""
    weight = torch.tensor([0.5, 1.0, 1.5, 2.0])
    outputs = F.log_softmax(model(batch["x"]).float(), -1)
    return F.nll_loss(outputs, batch["y"], weight, reduction="sum"), weight[batch["y"]].sum()


def triplets() -> Batch:
    """An anchor, one like it and one unlike it."""
    return {"x": numbers(SAMPLES, 8), "like": numbers(SAMPLES, 8, seed=1), "unlike": numbers(SAMPLES, 8, seed=2)}


def apart(model: Any, batch: Batch) -> tuple[Tensor, int]:
    """The triplet loss: the model is called three times."""
    found = [model(batch[name]) for name in ("x", "like", "unlike")]
    return F.triplet_margin_loss(*found, margin=1.0, reduction="sum"), len(found[0])


def alike(model: Any, batch: Batch) -> tuple[Tensor, int]:
    """The cosine loss of pairs: the model is called twice."""
    first, second = model(batch["x"]), model(batch["like"])
    wanted = torch.ones(len(first), dtype=first.dtype)
    return F.cosine_embedding_loss(first, second, wanted, reduction="sum"), len(first)


def spoken() -> Batch:
    """Steps of sound, and texts of ragged lengths."""
    lengths = 1 + torch.arange(SAMPLES) % 3
    return {"x": numbers(SAMPLES, 9, 8), "text": ids(SAMPLES, 3, most=CLASSES, least=1), "lengths": lengths}


def aligned(model: Any, batch: Batch) -> tuple[Tensor, int]:
    """The CTC loss."""
    steps = F.log_softmax(model(batch["x"]).float(), -1).transpose(0, 1)
    given = torch.full((steps.shape[1],), len(steps))
    return F.ctc_loss(steps, batch["text"], given, batch["lengths"], reduction="sum"), steps.shape[1]


class Adaptive(nn.Module):
    """An adaptive softmax over many classes: the loss is computed in the model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(8, 8), nn.AdaptiveLogSoftmaxWithLoss(8, 20, [4, 10])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(x)), y).output


def adapted(model: Any, batch: Batch) -> tuple[Tensor, int]:
    """What the model's adaptive softmax says of the right classes."""
    found = model(batch["x"], batch["y"])
    return -found.sum(), len(found)


def many_classes() -> Batch:
    """Points, and one of twenty classes."""
    return {"x": numbers(SAMPLES, 8), "y": ids(SAMPLES, most=20, least=0)}


class Words(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.register = nn.Embedding(20, CLASSES, sparse=True), None

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x).sum(1)


def many_words() -> Batch:
    """Token ids, and a class."""
    return {"x": ids(SAMPLES, 3, most=20, least=0), "y": ids(SAMPLES, most=CLASSES, least=0, seed=1)}


def muon(parameters: Any, lr: float = 0.02) -> torch.optim.Optimizer:
    """Muon, which takes matrices only."""
    return torch.optim.Muon(list(parameters), lr=lr)


def grouped(parameters: Any) -> torch.optim.Optimizer:
    """AdamW without weight decay for vectors, and a rate of its own for the head."""
    named = list(parameters.named)
    heads = [p for name, p in named if name.startswith("4.")]
    rest = [p for name, p in named if not name.startswith("4.")]
    groups = [{"params": [p for p in rest if p.ndim > 1], "weight_decay": 0.1}]
    groups += [{"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0}, {"params": heads, "lr": 1e-2}]
    return torch.optim.AdamW(groups, lr=1e-3)


def matrices() -> nn.Module:
    """Layers without vectors."""
    return nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, CLASSES, bias=False))


_POINT = partial(points, 8)
LOSSES: dict[str, Any] = {
    "mse": (partial(summed, F.mse_loss), towards),
    "huber": (partial(summed, F.huber_loss), towards),
    "l1": (partial(summed, F.l1_loss), towards),
    "smooth_l1": (partial(summed, F.smooth_l1_loss), towards),
    "soft_margin": (partial(summed, F.soft_margin_loss), towards),
    "binary_cross_entropy": (binary, towards),
    "kl_divergence": (probable, towards),
    "poisson": (counted, towards),
    "gaussian": (gaussian, towards),
    "ignored_classes": (ignoring, _POINT),
    "weighted_classes": (likely, _POINT),
    "triplet": (apart, triplets),
    "cosine": (alike, triplets),
    "ctc": (aligned, spoken),
}
_OPTIM = torch.optim
OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(_OPTIM.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "sgd_plain": partial(_OPTIM.SGD, lr=0.05, maximize=False),
    "adam": partial(_OPTIM.Adam, lr=1e-2, weight_decay=1e-2, amsgrad=True),
    "adamw_groups": grouped,
    "adagrad": partial(_OPTIM.Adagrad, lr=1e-2),
    "adadelta": partial(_OPTIM.Adadelta, lr=0.1),
    "adamax": partial(_OPTIM.Adamax, lr=1e-2),
    "nadam": partial(_OPTIM.NAdam, lr=1e-2),
    "radam": partial(_OPTIM.RAdam, lr=1e-2),
    "rmsprop": partial(_OPTIM.RMSprop, lr=1e-3, momentum=0.9, centered=True),
    "rprop": partial(_OPTIM.Rprop, lr=1e-3),
    "asgd": partial(_OPTIM.ASGD, lr=1e-2),
    "adafactor": partial(_OPTIM.Adafactor, lr=1e-2),
}
_FREE = {"clip_norm": None}
ROWS = [
    *(torch_row("torch losses", name, small, *given) for name, given in LOSSES.items()),
    torch_row("torch losses", "adaptive_softmax", Adaptive, adapted, many_classes),
    *(
        torch_row("torch optimizers", name, small, classified, _POINT, optimizer=optimizer)
        for name, optimizer in OPTIMIZERS.items()
    ),
    torch_row("torch optimizers", "muon", matrices, classified, _POINT, optimizer=muon),
    torch_row(
        "torch optimizers",
        "sparse_adam",
        Words,
        classified,
        many_words,
        optimizer=partial(_OPTIM.SparseAdam, lr=0.01),
        **_FREE,
    ),
    torch_row(
        "torch optimizers", "sparse_sgd", Words, classified, many_words, optimizer=partial(_OPTIM.SGD, lr=0.1), **_FREE
    ),
    torch_row("torch optimizers", "schedule", small, classified, _POINT, schedule=shoal.warmup_cosine(warmup=0.5)),
    torch_row(
        "torch optimizers", "ragged_last_batch", small, classified, _POINT, global_batch=7, length=shoal.Epochs(1)
    ),
]
