"""Trials of optimizers on stand-ins: what a step depends on, and the refusal of what ranks cannot divide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmarks.habits import optimizers as habits
from torch import nn

from shoal.training.update.optimizer_trial import OptimizerTrial, Own

CUT = {name: Own((0,)) for name in ("0.weight", "0.bias")} | {"2.weight": Own((1,)), "2.bias": Own()}
STAGE = {name: Own() for name in ("0.weight", "0.bias")}
UPDATES = {name: Own(updated=name.endswith("weight")) for name in CUT}


def trial(make: Callable[[Any], Any], wide: int = 32) -> OptimizerTrial:
    model = nn.Sequential(nn.Linear(16, wide), nn.Tanh(), nn.Linear(wide, 4))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return OptimizerTrial(make, model.named_parameters(), shapes, torch.device("cpu"))


class Lion(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-4})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.mul_(1 - 1e-5).sub_(m.lerp(p.grad, 0.1).sign(), alpha=group["lr"])
                m.lerp_(p.grad, 0.01)


class Clipped(Lion):
    """Clips by the norm of each parameter, where it is too large."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.sub_(p.grad, alpha=0.1 * min(1.0, 50.0 / float(p.grad.norm())))


class FanIn(Lion):
    """The rate of a matrix follows from its shape."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.sub_(p.grad, alpha=1 / p.shape[-1])


class Noisy(Lion):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.sub_(p.grad + torch.randn_like(p), alpha=0.1)


def tuned(parameters: Any) -> torch.optim.Optimizer:
    decayed = [p for p in parameters if p.ndim > 1]
    rest = [p for p in parameters if p.ndim == 1]
    return torch.optim.AdamW([{"params": decayed}, {"params": rest, "weight_decay": 0.0}], foreach=True)


@pytest.mark.parametrize(
    "make",
    [
        Lion,
        tuned,
        habits.Groups,
        habits.ScheduleFree,
        habits.Swapping,
        habits.clamped_after_step.program.pieces()["optimizer"],
        lambda p: habits.Lookahead(torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        lambda p: habits.Averaging(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.RMSprop(p, centered=True, fused=None),
        lambda p: torch.optim.Adam(p, amsgrad=True, fused=True),
        Noisy,  # it is refused by its draws
    ],
)
@pytest.mark.parametrize("own", [CUT, STAGE, UPDATES])
def test_an_optimizer_that_computes_element_by_element_is_the_same_on_a_part(make: Any, own: dict[str, Own]) -> None:
    assert trial(make).differing(own) == []


@pytest.mark.parametrize("make", [habits.Both, Clipped, lambda p: torch.optim.Adafactor(p, lr=1e-2)])
def test_an_optimizer_of_whole_parameters_is_not_the_same_on_slices(make: Any) -> None:
    assert trial(make).differing(CUT)[0] == "0.weight"
    assert trial(make).differing(STAGE) == []
    assert trial(make).differing(UPDATES) == []


def test_a_rate_by_shape_is_not_the_same_on_slices() -> None:
    assert trial(FanIn).differing(CUT)[0] in ("0.bias", "2.weight")  # the weight before them is cut along its rows


def test_a_norm_over_all_parameters_is_not_the_same_on_a_rank_with_some() -> None:
    assert trial(habits.Normed).differing(STAGE)[0] == "0.weight"
    assert trial(habits.Normed).differing(UPDATES)[0] == "0.weight"
    assert trial(habits.Normed).differing(CUT)[0] == "0.weight"


def test_large_parameters_have_small_stand_ins() -> None:
    (first, *_) = trial(habits.Both, wide=100_000).steps()
    assert max(tensor.numel() for tensor in first.values()) <= 1 << 11
    assert trial(habits.Both, wide=100_000).differing(CUT)[0] == "0.weight"


def test_a_trial_leaves_generators_and_what_the_factory_reads() -> None:
    seen: dict[str, int] = {"made": 0}

    def make(parameters: Any) -> torch.optim.Optimizer:
        seen["made"] += 1
        torch.rand(1)
        return Lion(parameters)

    tried, before = trial(make), torch.get_rng_state()
    assert tried.differing(CUT) == []
    assert seen == {"made": 0}
    assert torch.equal(torch.get_rng_state(), before)
