"""The models of keras.applications on torch, with random weights and few classes, at the smallest images they take."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

import shoal
from benchmarks.corpus.row import BATCH, SAMPLES, Batch, Row, ids, make_job, numbers

FAMILY = "Keras applications"
CLASSES = 4

# name -> images' side, and what else the builder is given
FITTING: dict[str, tuple[int, dict[str, Any]]] = {
    "MobileNet": (32, {"alpha": 0.25}),
    "MobileNetV2": (32, {"alpha": 0.35}),
    "MobileNetV3Small": (32, {"include_preprocessing": False}),
    "MobileNetV3Large": (32, {"include_preprocessing": False}),
    "EfficientNetB0": (32, {}),
    "EfficientNetV2B0": (32, {"include_preprocessing": False}),
    "DenseNet121": (32, {}),
}
LEFT_OUT = {
    "keras DenseNet169, 201": "12.6 and 18.3 million parameters; more of DenseNet121's layers",
    "keras EfficientNetB1 to B7": "6.6 to 64.1 million parameters; more of EfficientNetB0's layers",
    "keras EfficientNetV2B1 to B3, S, M, L": "6.9 to 117.8 million parameters; more of V2B0's layers",
    "keras ConvNeXtTiny to XLarge": "27.8 to 348.2 million parameters; convnext of Transformers is in the table",
    "keras ResNet50 to 152, also V2": "23.6 to 58.4 million parameters; see resnet and bit of Transformers",
    "keras VGG16, VGG19": "33.6 and 38.9 million parameters in plain convolutions and dense layers",
    "keras Xception, InceptionV3, InceptionResNetV2": "20.9 to 54.3 million parameters, images of 71 or 75 at least",
    "keras NASNetMobile, NASNetLarge": "Keras refuses the first on torch; the second has 84.9 million parameters",
}


def build(name: str, side: int, settings: dict[str, Any]) -> Any:
    """The model, whose last activation is left out."""
    import keras

    make = getattr(keras.applications, name)
    fixed = {"weights": None, "classes": CLASSES, "classifier_activation": None}
    return make(input_shape=(side, side, 3), **fixed, **settings)


def images(side: int) -> Batch:
    """Images [side, side, 3] and labels."""
    return {"x": numbers(2 * SAMPLES, side, side, 3), "y": ids(2 * SAMPLES, most=CLASSES, least=0, seed=1)}


def classified(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """The cross entropy of one class a sample."""
    return shoal.cross_entropy(model(batch["x"]), batch["y"])


def _import() -> None:
    import keras  # noqa: F401


def _row(name: str, side: int, settings: dict[str, Any]) -> Row:
    model, data = partial(build, name, side, settings), partial(images, side)
    # By two samples of one position, as the last layers see them otherwise, a batch norm divides by next to nothing.
    others = {"global_batch": 2 * BATCH, "optimizer": partial(torch.optim.SGD, lr=0.01)}
    written = f"keras.applications.{name} {side} {settings} {2 * BATCH} SGD"
    job = partial(make_job, model, classified, data, **others)
    return Row(f"keras.{name}", FAMILY, job, _import, written)


ROWS = [_row(name, *given) for name, given in FITTING.items()]
