"""Jobs that classify Fashion-MNIST: `job` (also `lenet`) trains a LeNet, `resnet18` a ResNet-18."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal
from datasets import fashion_mnist
from models import LeNet, ResNet18


def images(split: str, num_samples: int = 0) -> TensorDataset:
    """The first `num_samples` of a split, or all where it is 0: float32 [N, 1, 28, 28] and int64 [N]."""
    dataset = fashion_mnist(split)
    if num_samples == 0:
        return dataset
    # Cloned: a slice would keep the whole split in memory.
    return TensorDataset(*(tensor[:num_samples].clone() for tensor in dataset.tensors))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The cross entropy summed over the batch, and its number of samples."""
    inputs, labels = batch
    return shoal.cross_entropy(model(inputs), labels)


def job(
    lr: float = 0.1,
    momentum: float = 0.9,
    epochs: int = 4,
    batch: int = 256,
    seed: int = 0,
    train_samples: int = 0,
    eval_samples: int = 0,
) -> shoal.Job:
    """LeNet by SGD with momentum and a cosine schedule; `train_samples` and `eval_samples` of 0 mean all."""
    return _classify(
        LeNet,
        partial(torch.optim.SGD, lr=lr, momentum=momentum),
        data=(partial(images, "train", train_samples), partial(images, "test", eval_samples)),
        global_batch=batch,
        length=shoal.Epochs(epochs),
        schedule=shoal.warmup_cosine(warmup=0.05),
        seed=seed,
    )


lenet = job


def resnet18(
    lr: float = 0.05,
    momentum: float = 0.9,
    weight_decay: float = 5e-4,
    epochs: int = 10,
    batch: int = 64,
    seed: int = 0,
    train_samples: int = 0,
    eval_samples: int = 0,
) -> shoal.Job:
    """ResNet-18 by SGD with momentum, weight decay and a cosine schedule; samples of 0 mean all."""
    return _classify(
        ResNet18,
        partial(torch.optim.SGD, lr=lr, momentum=momentum, weight_decay=weight_decay),
        data=(partial(images, "train", train_samples), partial(images, "test", eval_samples)),
        global_batch=batch,
        length=shoal.Epochs(epochs),
        schedule=shoal.warmup_cosine(warmup=0.1),
        seed=seed,
    )


def _classify(
    model: Callable[[], nn.Module],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    data: tuple[Callable[[], TensorDataset], Callable[[], TensorDataset]],
    **rest: Any,
) -> shoal.Job:
    return shoal.Job(
        model=model,
        loss=loss,
        optimizer=optimizer,
        train_data=data[0],
        eval_data=data[1],
        metrics={"accuracy": shoal.accuracy},
        **rest,
    )
