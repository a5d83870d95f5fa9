"""Engines on one process: what a job is given has its effect in what is trained."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import shoal
from shoal.checkpoint import weights_sha256
from shoal.data.source import opened
from shoal.distributed.mesh import alone
from shoal.errors import JobError, ShoalError, UserCodeError
from shoal.numerics.generators import all_generators
from shoal.plans.plan import Plan
from shoal.training.loop.trainer import Outcome
from shoal.training.observe.step_records import RecordWriter, Surroundings
from shoal.training.setup.engine import Engine, Options, build, look_at_whole
from shoal.training.setup.preflight import judged

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
    plan = judged(wanted, Plan()).plan
    return build(wanted, plan, alone(torch.device("cpu")), Options(telemetry=False, **options))


def trained(wanted: shoal.Job, *, resume: int | None = None, **options: Any) -> tuple[str, Outcome]:
    """The weights' hash and the outcome."""
    made = engine(wanted, **options)
    state = made.load()[0] if resume is not None else None
    assert state is None or state.step == resume
    around = Surroundings(lambda text: None, lambda record, rank: None, lambda: False)
    try:
        outcome = made.trainer(state, made.order.num_steps, around, RecordWriter(None)).train()
        return weights_sha256(dict(made.model.state_dict())), outcome
    finally:
        made.close()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from zip(X, Y, strict=True)


class RaisingError(Exception):
    pass


def after(calls: int, function: Any) -> Any:
    """The function, which raises once it was called so often."""
    left = iter(range(calls))

    def wrapped(*arguments: Any) -> Any:
        if next(left, None) is None:
            raise RaisingError("no more")
        return function(*arguments)

    return wrapped


class Spoilt(TensorDataset):
    def __getitem__(self, i: int) -> Any:
        if i == 17:
            raise RaisingError("no such sample")
        return super().__getitem__(i)


class SpoiltStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from zip(X[:17], Y[:17], strict=True)
        raise RaisingError("lost")


class Noisy(torch.optim.SGD):
    """Raises in the midst of its third step."""

    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        super().step(closure)
        if self.num_steps == 3:
            raise RaisingError("in the midst")


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


# What raises after two steps; three steps are an epoch.
RAISING: dict[str, dict[str, Any]] = {
    "data": {"train_data": Spoilt(X, Y), "shuffle": False},
    "stream": {"train_data": SpoiltStream()},
    "schedule": {"schedule": after(2, lambda progress: 1.0)},
}
GOOD: dict[str, dict[str, Any]] = {
    "data": {"train_data": ROWS, "shuffle": False},
    "stream": {"train_data": Stream(), "length": shoal.Steps(3)},
}


def ended(wanted: shoal.Job, folder: Path, **options: Any) -> ShoalError:
    """The error that a run of the job ended with."""
    with pytest.raises(ShoalError) as caught:
        trained(wanted, checkpoints=folder, **options)
    return caught.value


@pytest.mark.parametrize("kind", RAISING)
def test_what_was_trained_before_an_error_is_saved(kind: str, tmp_path: Path) -> None:
    changes = {"optimizer": sgd, **GOOD.get(kind, {})}
    error = ended(job(**{**changes, **RAISING[kind]}), tmp_path)
    assert "step 2 is saved: --resume goes on from there" in error.remedy
    assert trained(job(**changes), checkpoints=tmp_path, resume=2)[0] == trained(job(**changes))[0]


def spread(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    """How far a batch's outputs are from their mean: of several grains at once it is another number."""
    found = model(batch[0])
    return (found - found.mean()).square().sum(), len(found)


def test_a_loss_that_compares_samples_goes_on_grain_by_grain(tmp_path: Path) -> None:
    """Also in the first step after a resume, which knows how the model is computed before it reads a batch."""
    changes = {"optimizer": sgd, "loss": spread}
    ended(job(**changes, schedule=after(2, lambda progress: 1.0)), tmp_path)
    assert trained(job(**changes), checkpoints=tmp_path, resume=2)[0] == trained(job(**changes))[0]


def test_what_was_trained_before_an_evaluation_that_raises_is_saved(tmp_path: Path) -> None:
    mean = lambda model, batch: (batch[1].sum(), len(batch[1]))  # noqa: E731
    for calls, step in ((0, 3), (3, 5)):  # the evaluation after an epoch, that of the end: of three chunks each
        folder, changes = tmp_path / str(step), {"eval_data": ROWS, "optimizer": sgd}
        error = ended(job(**changes, metrics={"mean": after(calls, mean)}), folder)
        assert isinstance(error, UserCodeError)
        assert f"step {step} is saved" in error.remedy
        resumed = trained(job(**changes, metrics={"mean": mean}), checkpoints=folder, resume=step)
        assert resumed[0] == trained(job(**changes))[0]


def test_a_torn_update_is_not_saved(tmp_path: Path) -> None:
    error = ended(job(optimizer=lambda parameters: Noisy(parameters, lr=0.1)), tmp_path, checkpoint_every=9)
    assert "step 2 could not be saved: the error came in the midst of an update; no checkpoint" in error.remedy
    assert not list(tmp_path.glob("step-*"))


def test_a_save_that_fails_does_not_hide_the_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.warns(RuntimeWarning, match="checkpoint"):
        error = ended(job(**GOOD["data"], schedule=after(2, lambda progress: 1.0)), tmp_path / "file")
    assert "RaisingError" in error.conflict
    assert "step 2 could not be saved" in error.remedy


class Counting(nn.Module):
    """Its values change in every forward, of an evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("last", torch.zeros(1))

    def forward(self, x: Any) -> Any:
        self.count += 1
        self.last = x.sum().view(1)
        return self.linear(x)


def test_a_rehearsal_finds_a_metric_that_raises_and_changes_nothing() -> None:
    wanted = job(model=Counting, eval_data=ROWS, metrics={"mean": lambda model, batch: (torch.rand(()), 1)})
    made = engine(wanted)
    random.seed(1)
    before = {name: value.clone() for name, value in made.model.state_dict().items()}, all_generators()
    made.rehearse()
    after_ = {name: value.clone() for name, value in made.model.state_dict().items()}, all_generators()
    assert all(torch.equal(before[0][name], after_[0][name]) for name in before[0])
    assert before[1] == after_[1]
    made.close()
    raising = engine(job(eval_data=ROWS, metrics={"mean": after(0, lambda model, batch: (torch.rand(()), 1))}))
    with pytest.raises(UserCodeError, match="'mean' of this job"):
        raising.rehearse()
    raising.close()
    silent = engine(job(eval_data=SpoiltStream()))
    silent.rehearse()  # a stream is not begun
    silent.close()


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


def test_several_metrics_that_run_the_model_again_are_said() -> None:
    mse = job().loss
    few, many, cheap = (
        engine(job(eval_data=ROWS, metrics=metrics))
        for metrics in (
            dict.fromkeys("ab", mse),
            dict.fromkeys("abc", mse),
            dict.fromkeys("abc", lambda model, batch: (batch[1].sum(), len(batch[1]))),
        )
    )
    assert few.rehearse() is None
    said = many.rehearse()
    assert said is not None
    assert "4 forwards" in said
    assert cheap.rehearse() is None


class CarriesLater(nn.Linear):
    """Adds what it has given before, once it was evaluated so often."""

    after, evaluated, last = 2, 0, 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if not self.training:
            self.evaluated += 1
        elif self.evaluated >= self.after:
            y, self.last = y + 0.1 * self.last, y.detach().mean()
        return y


def test_state_that_begins_with_an_evaluation_is_found_after_it() -> None:
    """Not before one of the steps 2, 10 and 100, before which shoal looks in any case."""
    length = {"eval_data": ROWS, "global_batch": 20, "grains": 2, "length": shoal.Steps(4)}
    with pytest.raises(JobError, match="leaves in last"):
        trained(job(model=lambda: CarriesLater(3, 1), **length))


class Later(nn.Linear):
    """Doubles its output after forty forwards."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * (2 if self.calls > 40 else 1)


def test_a_child_looks_at_the_whole_of_a_model_that_ranks_divide() -> None:
    """The counter is none that a rank of a divided model sets to later values."""
    for model, refused in ((lambda: Later(3, 1), True), (lambda: nn.Linear(3, 1), False)):
        wanted = opened(job(model=model))
        with pytest.raises(JobError, match="state that a forward leaves") if refused else contextlib.nullcontext():
            assert look_at_whole(wanted, judged(wanted, Plan()).plan, Options()) == []
