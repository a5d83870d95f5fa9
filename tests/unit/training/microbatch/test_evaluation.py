"""What is evaluated does not depend on what was computed before."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.jobs.read_late import counting, waiting
from torch import Tensor, nn

import shoal
import shoal.training.microbatch.evaluation
from shoal.data.source import Opened
from shoal.distributed.mesh import alone
from shoal.errors import DataError, JobError
from shoal.numerics.precision import Precision
from shoal.plans.plan import Plan, PrecisionSection
from shoal.training.microbatch.evaluation import BetweenChunks, Evaluator
from shoal.training.microbatch.step import StepRunner
from shoal.training.setup.engine import Engine, Options, build
from shoal.training.setup.preflight import judged

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


def evaluated(metric: Callable[[Any, Any], Any], between: BetweenChunks | None = None) -> tuple[dict[str, float], int]:
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
    evaluator = Evaluator(job, alone(CPU), precision, Opened(Noise()), {"mean": metric})
    return evaluator.evaluate(nn.Linear(1, 1), between)


def test_a_long_evaluation_prints_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    now, lines = [100.0], list[str]()
    monkeypatch.setattr(shoal.training.microbatch.evaluation.time, "monotonic", lambda: now[0])

    def slow(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        now[0] += 12.0
        return mean(model, batch)

    assert evaluated(slow, BetweenChunks(note=lines.append)) == evaluated(mean)
    assert lines == ["evaluation: 8 samples, 1.5 s a sample", "evaluation: 16 samples, 1.5 s a sample"]


def test_a_stream_that_draws_gives_the_same_samples_whatever_is_computed_in_between() -> None:
    metrics, count = evaluated(mean)
    random.seed(3)
    assert evaluated(mean_after_draws) == (metrics, count)
    assert count == 20


def several(sets: Any) -> tuple[dict[str, float], int]:
    """Metrics after two steps, of a job with that evaluation data."""
    job = shoal.Job(
        model=lambda: nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)),
        loss=lambda model, batch: shoal.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train_data=rows(16),
        eval_data=sets,
        metrics={"accuracy": shoal.accuracy},
        global_batch=8,
        grains=2,
        length=shoal.Steps(2),
    )
    engine = build(job, judged(job, Plan()).plan, alone(CPU), Options(telemetry=False))
    try:
        engine.rehearse()
        return engine.evaluator.evaluate(engine.model)
    finally:
        engine.close()


def rows(count: int, noise: float = 0.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    inputs = torch.randn(count, 2, generator=generator)
    return inputs + noise * torch.randn(count, 2, generator=generator), (inputs.sum(1) > 0).long()


def test_each_of_several_sets_is_evaluated_as_if_it_were_alone() -> None:
    clean, noisy = rows(20), lambda: rows(13, noise=2.0)
    metrics, count = several({"clean": clean, "noisy": noisy})
    assert count == 33
    assert metrics == {f"clean/{name}": value for name, value in several(clean)[0].items()} | {
        f"noisy/{name}": value for name, value in several(noisy)[0].items()
    }
    assert list(metrics) == ["clean/loss", "clean/accuracy", "noisy/loss", "noisy/accuracy"]


def test_a_set_that_cannot_be_read_is_named() -> None:
    with pytest.raises(DataError, match=r"eval_data\['noisy'\] of tensors with first dims"):
        several({"clean": rows(20), "noisy": (torch.zeros(3, 2), torch.zeros(4))})


def slope(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    """A metric that differentiates, and draws before it does."""
    noise = torch.rand(())
    inputs = batch[0].clone().requires_grad_()
    (found,) = torch.autograd.grad(model(inputs).sum(), inputs)
    return found.sum() + noise, len(inputs)


def test_a_metric_that_differentiates_is_computed_with_gradients_and_leaves_none() -> None:
    job = shoal.Job(
        model=lambda: nn.Linear(2, 2),
        loss=lambda model, batch: shoal.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train_data=rows(16),
        eval_data=rows(20),
        metrics={"slope": slope, "backward": backward},
        global_batch=8,
        grains=2,
        length=shoal.Steps(2),
    )
    engine = build(job, judged(job, Plan()).plan, alone(CPU), Options(telemetry=False))
    try:
        kept = [torch.ones_like(parameter) for parameter in engine.model.parameters()]
        for parameter, gradient in zip(engine.model.parameters(), kept, strict=True):
            parameter.grad = gradient
        first, _ = engine.evaluator.evaluate(engine.model)  # tries without gradients before
        again, _ = engine.evaluator.evaluate(engine.model)
        assert first == again
        for parameter, gradient in zip(engine.model.parameters(), kept, strict=True):
            assert parameter.grad is gradient
            assert torch.equal(gradient, torch.ones_like(gradient))
    finally:
        engine.close()


def backward(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    inputs = batch[0].clone().requires_grad_()
    model(inputs).sum().backward()
    assert inputs.grad is not None
    return inputs.grad.sum(), len(inputs)


def test_chunks_are_queued_before_the_first_is_read() -> None:
    """A metric that adds up in one tensor has the sums of each chunk, although later chunks change the tensor."""
    found = []
    for is_device in (False, True):
        seen, reads = torch.zeros(()), Counter[str]()

        def growing(model: nn.Module, batch: Tensor, seen: Tensor = seen) -> tuple[Tensor, int]:
            return seen.add_(batch.sum()), len(batch)

        with waiting(late=True) if is_device else nullcontext(), counting(reads):
            found.append(evaluated(growing))
        chunks = {name: count for name, count in reads.items() if name.startswith("training/microbatch/evaluation.py")}
        assert sum(chunks.values()) == (0 if is_device else 3)
    assert found[0] == found[1]


def test_a_metric_without_a_value_is_said() -> None:
    def nothing(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        return torch.zeros(()), 0

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
    metrics = {"nothing": nothing, "nan": lambda model, batch: (batch.sum() * torch.nan, len(batch)), "mean": mean}
    evaluator = Evaluator(job, alone(CPU), Precision.of(PrecisionSection(), CPU), Opened(Noise()), metrics)
    evaluator.evaluate(nn.Linear(1, 1))
    assert evaluator.without_value == {"nothing": "its weights sum to 0", "nan": "its sum is not finite"}


def test_a_metric_that_changes_its_batch_changes_it_for_nobody_else() -> None:
    def emptied(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        return batch.zero_().sum(), len(batch)

    def sloped(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        batch.mul_(3.0)  # a first try, without gradients, has done so already
        (slope,) = torch.autograd.grad(model(batch).sum(), model.weight)
        return slope.sum(), len(batch)

    job = shoal.Job(
        model=lambda: nn.Linear(1, 1),
        loss=mean,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train_data=list(torch.ones(8, 1)),
        eval_data=list(torch.ones(8, 1)),
        metrics={"emptied": emptied, "sloped": sloped, "mean": mean},
        global_batch=8,
        grains=2,
        length=shoal.Steps(1),
    )
    engine = build(job, judged(job, Plan()).plan, alone(CPU), Options(telemetry=False))
    try:
        metrics, _ = engine.evaluator.evaluate(engine.model)
    finally:
        engine.close()
    assert metrics == {"loss": 1.0, "emptied": 0.0, "sloped": 3.0, "mean": 1.0}


def test_a_rehearsal_leaves_no_trace_in_metrics_and_model() -> None:
    calls = [0]

    def counted(model: Any, batch: Tensor) -> tuple[float, int]:
        calls[0] += 1
        model.calls = calls[0]
        with torch.no_grad():
            model.weight.add_(1.0)
        return 0.0, len(batch)

    job = shoal.Job(
        model=lambda: nn.Linear(1, 1),
        loss=mean,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train_data=list(torch.ones(8, 1)),
        eval_data=list(torch.ones(8, 1)),
        metrics={"counted": counted},
        global_batch=8,
        grains=2,
        length=shoal.Steps(1),
    )
    engine = build(job, judged(job, Plan()).plan, alone(CPU), Options(telemetry=False))
    try:
        before = engine.model.get_parameter("weight").clone()
        engine.rehearse()
        assert torch.equal(engine.model.get_parameter("weight"), before)
    finally:
        engine.close()
    assert calls == [0]
    assert not hasattr(engine.model, "calls")


class Centred(nn.Linear):
    """Subtracts in evaluation the mean of the last batch of the training."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.center = x.mean()
        return super().forward(x - getattr(self, "center", 0.0) if not self.training else x)


class CountedEvaluations(nn.Linear):
    """Counts its evaluations in a buffer, by which it multiplies."""

    num_evaluated: Tensor

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.register_buffer("num_evaluated", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.num_evaluated += 1
        return super().forward(x) * (1 if self.training else self.num_evaluated)


class Remembered(nn.Linear):
    """Adds in evaluation what it has given before."""

    before = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if not self.training:
            y = y + self.before
            self.before = y.detach().mean()
        return y


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (lambda: Centred(1, 1), "state that a forward leaves in center.*in an evaluation"),
        (CountedEvaluations, "buffer num_evaluated"),
        (lambda: Remembered(1, 1), "state that a forward leaves in before"),
    ],
)
def test_a_metric_that_depends_on_the_batches_before_is_refused(model: Callable[[], nn.Module], named: str) -> None:
    job = shoal.Job(
        model=model,
        loss=lambda model, batch: (model(batch).square().sum(), len(batch)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train_data=list(torch.rand(8, 1)),
        eval_data=list(torch.rand(8, 1)),
        global_batch=8,
        grains=2,
        length=shoal.Steps(1),
    )
    with pytest.raises(JobError, match=re.compile(named, re.DOTALL)):
        begin(build(job, judged(job, Plan()).plan, alone(CPU), Options(telemetry=False)))


def begin(engine: Engine) -> None:
    """All looks that come before the first step."""
    try:
        engine.rehearse()
        runner = StepRunner(engine, engine.loader, print)
        runner.probe.before_step(runner.fetch(0))
    finally:
        engine.close()
