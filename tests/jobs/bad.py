"""Jobs with one mistake each; `job` has none."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import tiny
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal

bad = partial(tiny.mlp, steps=4)


def job(lr: float = 0.1, wide: bool = False) -> shoal.Job:
    model = partial(nn.Linear, 6, 4) if wide else tiny.mlp_model
    return bad(lr=lr, model=model, metrics={})


def other_optimizer() -> shoal.Job:
    return bad()


def returns_nothing() -> None:
    return None


def raises() -> shoal.Job:
    raise RuntimeError("the job function fails")


def no_batch() -> shoal.Job:
    return bad(batch=0)


def wrong_fields() -> shoal.Job:
    return bad(grains=2.5, seed=-1, clip_norm=-1.0, on_nonfinite="ignore", length=3)


def module_instead_of_function() -> shoal.Job:
    return bad(model=tiny.mlp_model())


def empty_data() -> shoal.Job:
    return bad(train_data=torch.zeros(0, 6))


def empty_eval() -> shoal.Job:
    return bad(eval_data=torch.zeros(0, 6))


def unequal_data() -> shoal.Job:
    return bad(train_data=(torch.zeros(5, 6), torch.zeros(4)))


def loader_of_rank_batches() -> shoal.Job:
    return bad(train_data=DataLoader(TensorDataset(*tiny.vectors(40)), batch_size=8))


def no_dataset() -> shoal.Job:
    return bad(train_data=42)


def data_function_raises() -> shoal.Job:
    def data() -> Any:
        raise OSError("no such disk")

    return bad(train_data=data)


class Raises(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> Any:
        raise OSError(f"sample {i} is on a lost disk")


def data_raises() -> shoal.Job:
    return bad(train_data=Raises())


def data_ragged() -> shoal.Job:
    return bad(train_data=[torch.zeros(n % 5) for n in range(40)])


def collate_raises() -> shoal.Job:
    def collate(samples: list[Any]) -> Any:
        raise KeyError("label")

    return bad(collate=collate)


def data_not_tensors() -> shoal.Job:
    return bad(train_data=[object() for _ in range(40)])


def wrong_shape() -> shoal.Job:
    return bad(model=partial(nn.Linear, 7, 3))


def wrong_dtype() -> shoal.Job:
    inputs, labels, ids = tiny.vectors(40)
    return bad(train_data=(inputs.double(), labels, ids))


def wrong_labels() -> shoal.Job:
    inputs, labels, ids = tiny.vectors(40)
    return bad(train_data=(inputs, labels + 3, ids))


def with_loss(make: Any) -> shoal.Job:
    def loss(model: nn.Module, batch: Any) -> Any:
        total, weight = tiny.classify(model, batch)
        return make(total, weight, batch[0])

    return bad(loss=loss)


def bare_mean() -> shoal.Job:
    return with_loss(lambda total, weight, inputs: total / weight)


def total_per_sample() -> shoal.Job:
    return with_loss(lambda total, weight, inputs: (inputs.sum(1) + total, weight))


def weight_per_sample() -> shoal.Job:
    return with_loss(lambda total, weight, inputs: (total, torch.ones(len(inputs))))


def weight_of_text() -> shoal.Job:
    return with_loss(lambda total, weight, inputs: (total, "16"))


def without_gradient() -> shoal.Job:
    return with_loss(lambda total, weight, inputs: (total.detach(), weight))


def integer_loss() -> shoal.Job:
    return with_loss(lambda total, weight, inputs: (total.long(), weight))


def no_optimizer() -> shoal.Job:
    return bad(optimizer=lambda parameters: "sgd")


def optimizer_raises() -> shoal.Job:
    return bad(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=-1.0))


def foreign_tensors() -> shoal.Job:
    return bad(optimizer=lambda parameters: torch.optim.SGD([*parameters, nn.Parameter(torch.zeros(2))], lr=0.1))


def model_raises() -> shoal.Job:
    def model() -> nn.Module:
        raise ValueError("no such architecture")

    return bad(model=model)


def no_module() -> shoal.Job:
    return bad(model=lambda: None)


def nothing_to_train() -> shoal.Job:
    return bad(model=lambda: tiny.mlp_model().requires_grad_(False))


def metric_of_one_number() -> shoal.Job:
    return bad(metrics={"accuracy": lambda model, batch: 0.5})


def metric_raises() -> shoal.Job:
    return bad(metrics={"accuracy": lambda model, batch: batch["labels"]})


def schedule_nan() -> shoal.Job:
    return bad(schedule=lambda progress: float("nan"))


def schedule_raises() -> shoal.Job:
    return bad(schedule=lambda progress: 1 / 0)


class Stream:
    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        inputs, labels, ids = tiny.vectors(40)
        yield from zip(inputs, labels, ids, strict=True)


def stream_of_epochs() -> shoal.Job:
    return bad(train_data=Stream(), length=shoal.Epochs(2))


def three_grains() -> shoal.Job:
    return bad(grains=3)
