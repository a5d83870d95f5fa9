"""What is evaluated does not depend on what was computed before."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import shoal
from shoal.data.source import Opened
from shoal.distributed.mesh import alone
from shoal.numerics.precision import Precision
from shoal.plans.plan import PrecisionSection
from shoal.training.evaluation import Evaluator

CPU = torch.device("cpu")


class Noise:
    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(20):
            yield torch.tensor([random.random()])


def collate(samples: list[Tensor]) -> Tensor:
    return torch.stack(samples) + torch.rand(1)


def mean(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return batch.sum(), len(batch)


def mean_after_draws(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    random.random()
    torch.rand(3)
    return mean(model, batch)


def evaluated(metric: Callable[[Any, Any], Any]) -> tuple[dict[str, float], int]:
    job = shoal.Job(
        model=lambda: nn.Linear(1, 1),
        loss=mean,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train_data=lambda: torch.utils.data.TensorDataset(torch.ones(8, 1)),
        eval_data=Noise,
        collate=collate,
        global_batch=8,
        length=shoal.Steps(1),
    )
    precision = Precision.of(PrecisionSection(), CPU)
    return Evaluator(job, alone(CPU), precision, Opened(Noise()), {"mean": metric}).evaluate(nn.Linear(1, 1))


def test_a_stream_that_draws_gives_the_same_samples_whatever_is_computed_in_between() -> None:
    metrics, count = evaluated(mean)
    random.seed(3)
    assert evaluated(mean_after_draws) == (metrics, count)
    assert count == 20
