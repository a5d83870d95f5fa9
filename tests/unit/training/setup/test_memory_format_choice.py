"""Proof of channels last: whether a job computes the same with its images in the other memory format."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import shoal
from shoal.data.source import opened
from shoal.jobs.job import Job
from shoal.numerics.precision import Precision
from shoal.plans.plan import PrecisionSection
from shoal.training.setup.job_model import build_model
from shoal.training.setup.memory_format_choice import NO_IMAGES, why_not_channels_last

CPU = torch.device("cpu")
FLOAT32 = Precision.of(PrecisionSection(), CPU)


def images(shape: tuple[int, ...] = (3, 16, 16), num_samples: int = 32) -> TensorDataset:
    inputs = torch.randn(num_samples, *shape, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, torch.arange(num_samples) % 10)


def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return shoal.cross_entropy(model(batch[0]), batch[1])


def net(*layers: nn.Module, pixels: int = 64, features: int = 16) -> nn.Module:
    """Layers before the last, which takes `features` of `pixels`."""
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features * pixels, 10))


def pooled(*more: nn.Module) -> nn.Module:
    return net(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), *more, nn.MaxPool2d(2))


def job(model: Callable[[], nn.Module] = pooled, **changes: Any) -> Job:
    fields: dict[str, Any] = {
        "model": model,
        "loss": loss,
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "train_data": images,
        "global_batch": 32,
        "grains": 8,
        "length": shoal.Steps(1),
    }
    return Job(**fields | changes)


def why_not(made: Job, precision: Precision = FLOAT32) -> str | None:
    made = opened(made)
    return why_not_channels_last(made, build_model(made, precision), precision, made.train_data)


class Functional(nn.Module):
    """A pool that is no module, and what follows it."""

    def __init__(self, after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.convolution, self.last, self.after = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(1024, 10), after

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.last(self.after(F.max_pool2d(self.convolution(inputs), 2)))
        return found


SAME = {
    "a max pool": pooled,
    "an average pool": lambda: net(nn.Conv2d(3, 16, 3, padding=1), nn.AvgPool2d(2)),
    "norms": lambda: pooled(nn.BatchNorm2d(16)),
    "dropout of a module": lambda: pooled(nn.Dropout(0.5), nn.Dropout2d(0.5)),
    "a pool by function, flattened": lambda: Functional(lambda x: torch.flatten(x, 1)),
    "a pool by function, reshaped": lambda: Functional(lambda x: x.reshape(len(x), -1)),
}


@pytest.mark.parametrize("model", SAME.values(), ids=list(SAME))
def test_models_that_compute_the_same(model: Callable[[], nn.Module]) -> None:
    assert why_not(job(model)) is None


def test_models_without_images() -> None:
    assert why_not(job(lambda: nn.Sequential(nn.Flatten(), nn.Linear(768, 10)))) == NO_IMAGES


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (lambda x: x.view(len(x), -1), "view size is not compatible"),
        (lambda x: x.as_strided((len(x), 1024), (1024, 1)), "computes something else"),
        (lambda x: F.dropout(x, 0.5).flatten(1), "or draws otherwise"),
    ],
    ids=["view", "strides", "draws"],
)
def test_a_model_that_goes_by_strides_is_no_candidate(after: Callable[[Tensor], Tensor], said: str) -> None:
    assert said in (why_not(job(lambda: Functional(after))) or "")


def test_a_backward_that_goes_by_strides_is_no_candidate() -> None:
    assert "view size is not compatible" in (why_not(job(lambda: pooled(Viewed()))) or "")


class Viewed(nn.Module):
    def forward(self, inputs: Tensor) -> Any:
        return _Viewed.apply(inputs)  # type: ignore[no-untyped-call]


class _Viewed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        return inputs[0] * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].view(-1).view(gradients[0].shape)


def test_what_raises_either_way_is_left_to_the_first_step() -> None:
    def fails(inputs: Tensor) -> Tensor:
        raise ValueError("always")

    assert why_not(job(lambda: Functional(fails))) == NO_IMAGES


def test_data_that_cannot_be_read_are_left_to_the_first_step() -> None:
    assert why_not(job(train_data=Unreadable)) == NO_IMAGES


class Unreadable(Dataset[Any]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        raise ValueError("always")


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("a stream is not begun")


def test_streams_keep_channels_first() -> None:
    assert why_not(job(train_data=Stream, shuffle=False)) == NO_IMAGES


def test_the_trial_leaves_no_trace() -> None:
    made = opened(job(lambda: pooled(nn.BatchNorm2d(16), nn.Dropout(0.5))))
    model = build_model(made, FLOAT32)
    model[4].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    training = [module.training for module in model.modules()]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert why_not_channels_last(made, model, FLOAT32, made.train_data) is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]


class Counting(nn.Module):
    """Counts its forwards, and keeps what it has seen last."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.calls, self.seen = pooled(), 0, None

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        self.seen = images
        found: Tensor = self.body(images)
        return found


def test_attributes_of_the_model_stay_as_they_were() -> None:
    made = opened(job(Counting))
    model = build_model(made, FLOAT32)
    assert why_not_channels_last(made, model, FLOAT32, made.train_data) is None
    assert isinstance(model, Counting)
    assert (model.calls, model.seen) == (0, None)
