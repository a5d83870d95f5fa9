"""Schedule: each torch scheduler gives the rates that it gives in a plain loop, at any step and in any order."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.training.callbacks.test_calls import job, trained
from torch.optim import lr_scheduler as torchs

import shoal
from shoal.errors import JobError, ShoalError, UserCodeError
from shoal.jobs.job import Progress

STEPS = 24


def warm(optimizer: Any, num_steps: int) -> Any:
    first = torchs.LinearLR(optimizer, 0.1, total_iters=4)
    return torchs.SequentialLR(optimizer, [first, torchs.CosineAnnealingLR(optimizer, num_steps - 4)], [4])


SCHEDULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "step": (torchs.StepLR, {"step_size": 5, "gamma": 0.5}),
    "milestones": (torchs.MultiStepLR, {"milestones": [3, 9]}),
    "exponential": (torchs.ExponentialLR, {"gamma": 0.9}),
    "cosine": (torchs.CosineAnnealingLR, {"T_max": STEPS, "eta_min": 0.01}),
    "restarts": (torchs.CosineAnnealingWarmRestarts, {"T_0": 5}),
    "one cycle": (torchs.OneCycleLR, {"max_lr": 0.4, "total_steps": STEPS}),
    "cyclic": (torchs.CyclicLR, {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 4}),
    "lambda": (torchs.LambdaLR, {"lr_lambda": [lambda n: 1 / (1 + n), lambda n: 0.9**n]}),
    "polynomial": (torchs.PolynomialLR, {"total_iters": STEPS}),
    "a function": (warm, {}),
    "another name": (lambda optimizer, n: warm(optimizer, n), {}),
}


def optimizer(kind: str = "SGD") -> torch.optim.Optimizer:
    one, two = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    groups = [{"params": [one], "lr": 0.1}, {"params": [two], "lr": 0.02}]
    return torch.optim.SGD(groups, momentum=0.9) if kind == "SGD" else torch.optim.AdamW(groups)


def values(of: torch.optim.Optimizer) -> list[tuple[Any, ...]]:
    return [(g["lr"], g.get("momentum"), g.get("betas")) for g in of.param_groups]


def plain(name: str, kind: str) -> list[Any]:
    own = optimizer(kind)
    make, settings = SCHEDULES[name]
    scheduler = make(own, **settings) if isinstance(make, type) else make(own, STEPS)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(STEPS):
            found.append(values(own))
            own.step()
            scheduler.step()
    return found


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_as_in_a_plain_loop(name: str, kind: str) -> None:
    wanted, own = plain(name, kind), optimizer(kind)
    make, settings = SCHEDULES[name]
    rates = shoal.Schedule(make, **settings).rates(own)
    for step in (*range(STEPS), 3, 17, 0):  # a rollback or a resume goes anywhere
        assert rates.set(Progress(step, STEPS, 0)) == wanted[step][0][0]
        assert values(own) == wanted[step]


def test_in_a_run_and_across_a_resume(tmp_path: Path) -> None:
    def changes(**more: Any) -> dict[str, Any]:
        return {"schedule": shoal.Schedule(torchs.OneCycleLR, max_lr=0.3, total_steps=6), **more}

    class Ends(shoal.Callback):
        def on_step(self, run: Any, record: Any) -> None:
            if record.step == 4:
                run.request_end()

    whole = trained(job(**changes()))[0]
    trained(job(Ends(), **changes()), tmp_path)
    assert trained(job(**changes()), tmp_path, resume=True)[0] == whole
    assert whole != trained(job())[0]


def test_steps_each_so_many_steps() -> None:
    own = optimizer()
    rates = shoal.Schedule(torchs.ExponentialLR, gamma=0.5, every=3).rates(own)
    assert [rates.set(Progress(step, 9, 0)) for step in (0, 2, 3, 8)] == [0.1, 0.1, 0.05, 0.025]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: shoal.Schedule(torchs.ReduceLROnPlateau), "it follows a metric"),
        (lambda: shoal.Schedule(torchs.StepLR(optimizer(), 3)), "every rank makes its own scheduler"),
        (lambda: shoal.Schedule(torchs.StepLR, every=0), "every is a number of steps"),
        (lambda: trained(job(schedule=shoal.Schedule(lambda optimizer: 3))), "follows from the step alone"),
        (lambda: trained(job(schedule=shoal.Schedule(torchs.StepLR))), "the schedule of this job"),
    ],
)
def test_refuses(make: Any, said: str) -> None:
    with pytest.raises(ShoalError, match=said) as caught:
        make()
    assert isinstance(caught.value, JobError | UserCodeError)
