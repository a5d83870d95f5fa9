"""Lazy modules become whole as in plain torch, and the forward that makes them so leaves nothing else behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

import shoal
from shoal.errors import JobError
from shoal.numerics.generators import seed_everything
from shoal.plans.grains import random_key
from shoal.training.setup.job_model import make_model, outline

X = torch.randn(32, 12, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()


class Own(nn.Module):
    """Makes its tensors in its forward, counts its calls and keeps a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.calls = UninitializedParameter(), 0
        self.register_buffer("centre", UninitializedBuffer())
        self.norm = nn.LazyBatchNorm1d()

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.weight, UninitializedParameter):
            self.weight.materialize((x.shape[1], 3))
            nn.init.normal_(self.weight)
            self.centre.materialize((x.shape[1],))
            self.centre.zero_()
        out: Tensor = self.norm((x - self.centre) @ self.weight)
        return out


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += len(x)
        self.mean = x.mean(0)
        return x


def sequence() -> nn.Module:
    return nn.Sequential(Counts(), nn.Linear(12, 12), nn.Dropout(0.5), Own(), nn.LazyLinear(2), nn.BatchNorm1d(2))


def job(**fields: Any) -> shoal.Job:
    given: dict[str, Any] = {
        "model": sequence,
        "loss": lambda model, batch: shoal.cross_entropy(model(batch[0]), batch[1]),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "train_data": (X, Y),
        "global_batch": 32,
        "grains": 4,
        "length": shoal.Steps(1),
        "shuffle": False,
    }
    return shoal.Job(**given | fields)


def test_initial_values_are_those_of_a_forward_in_plain_torch() -> None:
    key = random_key(0, "initial values")
    seed_everything(key)
    plain = sequence()
    plain(X)
    seed_everything(key)
    sequence()
    before = torch.get_rng_state()
    seed_everything(key)
    model = make_model(job())
    assert torch.equal(torch.get_rng_state(), before), "the generator ends as after plain construction"
    for (name, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    counts, own = model[0], model[3]
    assert counts.calls == 0
    for buffer in (counts.seen, counts.mean, own.centre, own.norm.running_mean, model[5].running_mean):
        assert not buffer.any()
    assert not own.norm.num_batches_tracked
    assert all(p.grad is None for p in model.parameters())


def test_an_outline_has_the_shapes() -> None:
    found = outline(job(grains=None))
    assert found is not None
    assert {(tuple(p.shape), p.is_meta) for p in found[4].parameters()} == {((2, 3), True), ((2,), True)}


def test_what_the_loss_does_not_use_is_refused_by_name() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.other = nn.LazyLinear(2), nn.LazyLinear(3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.used(x)
            return out

    with pytest.raises(JobError, match="does not use them") as refused:
        make_model(job(model=Unused))
    assert "other.weight, other.bias" in refused.value.given


def test_a_session_refuses_them() -> None:
    model = nn.Sequential(nn.LazyLinear(2))
    with shoal.Session(global_batch=4, seed=0) as session, pytest.raises(JobError, match="no shape yet"):
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
