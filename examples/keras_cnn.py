"""A job that trains a Keras model, the `Sequential` CNN of every tutorial, on Fashion-MNIST."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")  # Keras reads it once, when it is imported

import keras
import torch
from keras import layers
from torch import Tensor
from torch.utils.data import TensorDataset

import shoal
from fashion_mnist import images

Batch = tuple[Tensor, Tensor]


def model(filters: int = 32, dropout: float = 0.5, normalize: bool = False) -> keras.Sequential:
    """Two convolutions and a dense layer: float32 images [N, 28, 28, 1] -> logits [N, 10]."""
    norm = [layers.BatchNormalization()] if normalize else []
    return keras.Sequential(
        [
            keras.Input(shape=(28, 28, 1)),
            layers.Conv2D(filters, kernel_size=(3, 3), activation="relu"),
            *norm,
            layers.MaxPooling2D(pool_size=(2, 2)),
            layers.Conv2D(2 * filters, kernel_size=(3, 3), activation="relu"),
            layers.MaxPooling2D(pool_size=(2, 2)),
            layers.Flatten(),
            layers.Dropout(dropout),
            layers.Dense(10),
        ]
    )


def channels_last(split: str, num_samples: int) -> TensorDataset:
    """Fashion-MNIST as Keras wants images: float32 [N, 28, 28, 1] and int64 [N]."""
    pixels, labels = images(split, num_samples).tensors
    return TensorDataset(pixels.permute(0, 2, 3, 1).contiguous(), labels)


def loss(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """The cross entropy summed over the batch, and its number of samples."""
    inputs, labels = batch
    return shoal.cross_entropy(model(inputs), labels)


def job(
    lr: float = 1e-3,
    epochs: int = 4,
    batch: int = 128,
    filters: int = 32,
    dropout: float = 0.5,
    normalize: bool = False,
    seed: int = 0,
    train_samples: int = 0,
    eval_samples: int = 0,
) -> shoal.Job:
    """A Keras CNN by Adam; samples of 0 mean all; `normalize` puts a BatchNormalization in."""
    return shoal.Job(
        model=partial(model, filters, dropout, normalize),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=lr),
        train_data=partial(channels_last, "train", train_samples),
        eval_data=partial(channels_last, "test", eval_samples),
        metrics={"accuracy": shoal.accuracy},
        global_batch=batch,
        length=shoal.Epochs(epochs),
        seed=seed,
    )
