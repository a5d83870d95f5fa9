"""The models of keras.applications on torch, with random weights and few classes, at the smallest images they take."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

import shoal
from benchmarks.corpus.row import SAMPLES, Batch, Row, ids, make_job, numbers

CLASSES = 4

# name -> images' side, and what else the builder is given
FITTING: dict[str, tuple[int, dict[str, Any]]] = {
    "MobileNet": (32, {"alpha": 0.25}),
    "MobileNetV2": (32, {"alpha": 0.35}),
    "MobileNetV3Small": (32, {"include_preprocessing": False}),
    "MobileNetV3Large": (32, {"include_preprocessing": False}),
    "EfficientNetB0": (32, {}),
    "EfficientNetV2B0": (32, {"include_preprocessing": False}),
    "NASNetMobile": (32, {}),
    "DenseNet121": (32, {}),
    "ResNet50": (32, {}),
}
LEFT_OUT: dict[str, str] = {}


def build(name: str, side: int, settings: dict[str, Any]) -> Any:
    """The model, whose last activation is left out."""
    import keras

    make = getattr(keras.applications, name)
    fixed = {"weights": None, "classes": CLASSES, "classifier_activation": None}
    return make(input_shape=(side, side, 3), **fixed, **settings)


def images(side: int) -> Batch:
    """Images [side, side, 3] and labels."""
    return {"x": numbers(SAMPLES, side, side, 3), "y": ids(SAMPLES, most=CLASSES, least=0, seed=1)}


def classified(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """The cross entropy of one class a sample."""
    return shoal.cross_entropy(model(batch["x"]), batch["y"])


def _import() -> None:
    import keras  # noqa: F401


def _row(name: str, side: int, settings: dict[str, Any]) -> Row:
    model, data = partial(build, name, side, settings), partial(images, side)
    written = f"keras.applications.{name} {side} {settings}"
    return Row(f"keras.{name}", "Keras applications", partial(make_job, model, classified, data), _import, written)


ROWS = [_row(name, *given) for name, given in FITTING.items()]
