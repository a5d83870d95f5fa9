"""Engines on one process: what a job is given has its effect in what is trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import shoal
from shoal.checkpoint import weights_sha256
from shoal.engine import Engine, Options, build
from shoal.mesh import alone
from shoal.plan.plan import Plan
from shoal.plan.resolve import complete
from shoal.telemetry import RecordWriter
from shoal.trainer import Outcome, Surroundings

X, Y = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)), torch.arange(20.0).view(20, 1)
ROWS = TensorDataset(X, Y)


def job(**changes: Any) -> shoal.Job:
    said: dict[str, Any] = {
        "model": lambda: nn.Linear(3, 1),
        "loss": lambda model, batch: shoal.mse(model(batch[0]), batch[1]),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "train_data": ROWS,
        "global_batch": 8,
        "grains": 4,
        "length": shoal.Steps(5),
    }
    return shoal.Job(**{**said, **changes})


def engine(wanted: shoal.Job, **options: Any) -> Engine:
    plan = complete(Plan(), wanted.grains, wanted.grain_size)
    return build(wanted, plan, alone(torch.device("cpu")), Options(telemetry=False, **options))


def trained(wanted: shoal.Job, notes: list[str] | None = None, **options: Any) -> tuple[str, Outcome]:
    """The weights' hash and the outcome."""
    made = engine(wanted, **options)
    around = Surroundings((notes if notes is not None else []).append, lambda record, rank: None, lambda: False)
    try:
        outcome = made.trainer(None, made.order.num_steps, around, RecordWriter(None)).train()
        return weights_sha256(dict(made.model.state_dict())), outcome
    finally:
        made.close()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from zip(X, Y, strict=True)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_data_loader_trains_as_its_dataset_does(shuffle: bool) -> None:
    expected, _ = trained(job(shuffle=shuffle))
    found, outcome = trained(job(train_data=lambda: DataLoader(ROWS, 8, shuffle=shuffle)))
    assert found == expected
    assert outcome.state.step == 5


def test_a_data_loader_of_a_stream_trains_as_the_stream_does() -> None:
    long = {"length": shoal.Steps(2)}
    assert trained(job(train_data=DataLoader(Stream(), 8), **long))[0] == trained(job(train_data=Stream(), **long))[0]


def test_a_data_loaders_workers_where_nobody_says_how_many() -> None:
    loader = DataLoader(ROWS, 8, num_workers=2)
    taken, kept = (engine(job(train_data=loader), take_workers=take) for take in (True, False))
    assert (taken.plan.data.workers, taken.notes) == (2, ())
    assert kept.plan.data.workers == 0
    assert kept.notes == ("train_data: num_workers=2 has no effect: the plan has data.workers = 0",)
    for each in (taken, kept):
        each.close()


def test_an_evaluation_reads_a_data_loader_of_any_batch_size() -> None:
    _, outcome = trained(job(eval_data=DataLoader(ROWS, 3, num_workers=1)))
    assert outcome.eval_samples == 20
    _, outcome = trained(job(eval_data=DataLoader(Stream(), 3)))
    assert outcome.eval_samples == 20
