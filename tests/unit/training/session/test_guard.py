"""What a plain loop does itself and a Session does is refused where it would count twice, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import shoal
from shoal.errors import LossError, UserCodeError

DATA = TensorDataset(torch.randn(24, 2, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 2)
Loop = Callable[[Any, Any], None]


def train(within: Loop = lambda *_: None, after: Loop = lambda *_: None) -> list[float]:
    """The losses of a loop that does `within` for each batch and `after` each step."""
    losses = []
    with shoal.Session(global_batch=8, grains=4) as session:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = StepLR(optimizer, 1)
        model, optimizer, scheduler = session.prepare(model, optimizer, scheduler)
        for step in session.steps(DATA):
            for inputs, labels in step:
                step.backward(*shoal.cross_entropy(model(inputs), labels))
                within(model, scheduler)
            after(model, scheduler)
            losses.append(step.loss)
    return losses


def clip(model: Any, _: Any) -> None:
    clip_grad_norm_(model.parameters(), 0.1)


@pytest.mark.parametrize(
    ("within", "words"),
    [
        (clip, "Session\\(clip_norm"),
        (lambda model, _: model.zero_grad(), "leave model.zero_grad\\(\\) out"),
        (lambda _, scheduler: scheduler.step(), "once a step"),
    ],
)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
def test_refused_within_the_batches(within: Loop, words: str) -> None:
    with pytest.raises(UserCodeError, match=words):
        train(within)


def test_clipping_after_the_update_is_refused() -> None:
    with pytest.raises(UserCodeError, match="nothing reads them any more"):
        train(after=clip)


@pytest.mark.parametrize("to_none", [True, False])
def test_what_changes_nothing_is_let_pass(to_none: bool) -> None:
    torch.manual_seed(0)
    plain = train()
    torch.manual_seed(0)
    assert train(after=lambda model, _: model.zero_grad(set_to_none=to_none)) == plain
    assert len(plain) == 3


def test_a_scheduler_that_no_checkpoint_has_is_told_of(tmp_path: Path) -> None:
    with shoal.Session(global_batch=8, checkpoints=tmp_path / "kept") as session:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        StepLR(optimizer, 1)
        session.prepare(model, optimizer)
        with pytest.warns(RuntimeWarning, match="a scheduler of SGD was not given to prepare"):
            session.steps(DATA)


def test_a_loss_without_its_weight_is_told_what_to_write() -> None:
    with shoal.Session(global_batch=8) as session:
        model = torch.nn.Linear(2, 2)
        model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        steps = session.steps(DATA)
        step = next(steps)
        batches = iter(step)
        inputs, labels = next(batches)
        with pytest.raises(LossError, match="mean of means"):
            step.backward(torch.nn.functional.cross_entropy(model(inputs), labels))


def test_attributes_of_other_trainers() -> None:
    with shoal.Session(global_batch=8) as session:
        assert (session.rank, session.world_size, session.device.type) == (0, 1, "cpu")
        with pytest.raises(AttributeError, match=r"a Session has no backward; write step\.backward\(total, weight\)"):
            session.backward(torch.zeros(()))
        assert not hasattr(session, "nothing_of_the_kind")
