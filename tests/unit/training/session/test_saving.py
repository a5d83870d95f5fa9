"""Schedulers' state through JSON, and groups put back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, lr_scheduler

import shoal
from shoal.errors import JobMismatchError, UserCodeError
from shoal.training.session.optimizers import Groups, group_values, number_of
from shoal.training.session.saving import Schedulers


def sgd() -> SGD:
    return SGD([nn.Parameter(torch.ones(2))], lr=1.0, momentum=0.9)


MAKE: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "multi step": lambda o: lr_scheduler.MultiStepLR(o, [2, 3, 3]),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 2.0, total_steps=9),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.1, 1.0, step_size_up=3),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 4)], milestones=[2]
    ),
}


def rates(name: str, first: int, through: Callable[[Any], Any]) -> list[float]:
    """The rates of seven steps, after the first of which optimizer and scheduler are made again."""
    optimizer, found = sgd(), []
    scheduler = MAKE[name](optimizer)
    for number in range(7):
        if number == first:
            state, groups = through(Schedulers([scheduler]).state()), optimizer.state_dict()
            optimizer = sgd()
            scheduler = MAKE[name](optimizer)
            optimizer.load_state_dict(groups)
            Schedulers([scheduler]).restore(state)
        optimizer.step()
        scheduler.step(*([1.0] if name == "plateau" else []))
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("name", MAKE)
def test_a_scheduler_goes_on_from_json(name: str) -> None:
    assert rates(name, 3, lambda state: json.loads(json.dumps(state))) == rates(name, 9, lambda state: state)


def test_other_schedulers_are_refused() -> None:
    saved = Schedulers([lr_scheduler.StepLR(sgd(), 2)]).state()
    with pytest.raises(JobMismatchError, match="with the schedulers none; the checkpoint is of one with StepLR"):
        Schedulers([]).restore(saved)


def test_code_in_a_state_is_refused_before_the_first_step(tmp_path: Path) -> None:
    class Factor:
        def __init__(self) -> None:
            self.of = nn.Tanh()

        def __call__(self, step: int) -> float:
            return 0.5

    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    with shoal.Session(global_batch=4, checkpoints=tmp_path) as own:
        own.prepare(model, optimizer, lr_scheduler.LambdaLR(optimizer, Factor()))
        with pytest.raises(UserCodeError, match="scheduler state LambdaLR/lr_lambdas/0/of of type Tanh"):
            own.steps(torch.ones(8, 2))


def test_groups_are_put_back_and_changes_kept() -> None:
    optimizer = sgd()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    before = Groups([optimizer])
    told = number_of(group_values([optimizer]))
    optimizer.param_groups[0]["lr"].mul_(2.0)
    optimizer.param_groups[0]["nesterov"] = True
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    changed = Groups([optimizer])
    assert number_of(group_values([optimizer])) != told
    before.put_back()
    assert number_of(group_values([optimizer])) == told
    optimizer.param_groups[0]["momentum"] = 0.3  # as a state that was loaded
    changed.put_changes(before)
    group, added = optimizer.param_groups
    assert (float(group["lr"]), group["nesterov"], group["momentum"]) == (1.0, True, 0.3)
    assert added["params"][0].shape == (3,)
