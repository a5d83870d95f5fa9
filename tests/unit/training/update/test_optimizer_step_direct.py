"""Fused kernels called straight: the bits of torch's own fused step, and none where anything is not as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shoal.checkpoint.whole_optimizer import step_optimizer
from shoal.training.update.optimizer_step import DirectStep, fused

INPUTS = torch.linspace(-1, 1, 24).view(8, 3)
Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
MAKES: dict[str, Make] = {
    "SGD": lambda g: torch.optim.SGD(g, lr=0.1),
    "SGD with momentum": lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "SGD, dampened": lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9, dampening=0.5),
    "Adam": lambda g: torch.optim.Adam(g, lr=0.01, weight_decay=0.1),
    "Adam with amsgrad": lambda g: torch.optim.Adam(g, lr=0.01, amsgrad=True),
    "AdamW": lambda g: torch.optim.AdamW(g, lr=0.01, betas=(0.8, 0.95)),
    "Adam, decoupled": lambda g: torch.optim.Adam(g, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
}


class Run:
    """A model and its optimizer, of two groups with rates of their own, and how many steps were direct."""

    def __init__(self, make: Make) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        own = list(self.model.parameters())
        self.optimizer = make([{"params": own[:2]}, {"params": own[2:], "lr": 0.02}])
        self.direct, self.num_direct = DirectStep(self.optimizer), 0

    def differentiate(self) -> None:
        self.optimizer.zero_grad()
        self.model(INPUTS).square().sum().backward()

    def step(self, direct: bool = True) -> bool:
        taken = direct and self.direct.take()
        if not taken:
            with fused(self.optimizer):
                step_optimizer(self.optimizer)
            self.direct.learn()
        self.num_direct += taken
        return taken

    @property
    def tensors(self) -> list[torch.Tensor]:
        states = [v for own in self.optimizer.state.values() for v in own.values() if isinstance(v, torch.Tensor)]
        return [*(p.detach() for p in self.model.parameters()), *states]


@pytest.mark.parametrize("name", MAKES)
def test_the_bits_are_those_of_torchs_own_fused_step(name: str) -> None:
    one, other = Run(MAKES[name]), Run(MAKES[name])
    for number in range(5):
        for run, direct in ((one, True), (other, False)):
            run.optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
            run.differentiate()
            run.step(direct)
    assert one.num_direct == 4
    assert all(torch.equal(a, b) for a, b in zip(one.tensors, other.tensors, strict=True))


def hooked(run: Run) -> None:
    run.optimizer.register_step_pre_hook(lambda *_: None)


def loaded(run: Run) -> None:
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))


def without_a_gradient(run: Run) -> None:
    run.model[2].bias.grad = None


def transposed(run: Run) -> None:
    weight = run.model[0].weight
    assert weight.grad is not None
    weight.grad = weight.grad.t().contiguous().t()


def sparse(run: Run) -> None:
    weight = run.model[0].weight
    assert weight.grad is not None
    weight.grad = weight.grad.to_sparse()


def another_choice(run: Run) -> None:
    run.optimizer.param_groups[1]["foreach"] = True


def a_rate_in_a_tensor(run: Run) -> None:
    run.optimizer.param_groups[1]["lr"] = torch.tensor(0.1)


def no_momentum_any_more(run: Run) -> None:
    run.optimizer.param_groups[0].update(momentum=0.0, nesterov=False)


def another_group(run: Run) -> None:
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def of_its_own(run: Run) -> None:
    own: Any = run.optimizer
    own.step = lambda: None


def masked(run: Run) -> None:
    own: Any = run.optimizer
    own.found_inf = torch.ones(())


ODD = [
    hooked,
    loaded,
    without_a_gradient,
    transposed,
    sparse,
    another_choice,
    a_rate_in_a_tensor,
    no_momentum_any_more,
    another_group,
    of_its_own,
    masked,
]


@pytest.mark.parametrize("change", ODD)
def test_what_is_not_as_it_was_is_left_to_the_optimizer(change: Callable[[Run], None]) -> None:
    run = Run(MAKES["SGD with momentum"])
    for _ in range(2):
        run.differentiate()
        run.step()
    assert run.num_direct == 1
    run.differentiate()
    change(run)
    before = [tensor.clone() for tensor in run.tensors]
    assert not run.direct.take()
    assert all(torch.equal(a, b) for a, b in zip(before, run.tensors, strict=True))


def test_a_class_that_steps_otherwise_is_stepped_by_that(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self, closure=None: steps.append(self))
    run = Run(MAKES["SGD"])
    for _ in range(3):
        run.differentiate()
        assert not run.step()
    assert len(steps) == 3
