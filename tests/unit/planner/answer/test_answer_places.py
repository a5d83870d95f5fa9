"""Where a model is cut into stages: what plan calls illegal the engine refuses; what the engine can, plan offers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import shoal
from shoal.errors import PlanError, ShoalError
from shoal.parallel.pipeline.stages import Stages
from shoal.planner.answer.answer import question
from shoal.planner.answer.outlook import Question
from shoal.planner.predict.step_time import Predictor
from shoal.planner.profile.profiles import Batches
from shoal.planner.search.search import Wanted
from shoal.planner.search.space import Degrees, MicrobatchSchedule, ModelDegrees, illegal
from shoal.plans import Plan
from shoal.training.setup.job_model import outline, with_grains
from shoal.training.setup.preflight import judged

sys.path.append(str(Path(__file__).resolve().parents[3] / "jobs"))

import layouts
import tiny


class Skip(nn.Module):
    """What the first of its list gives goes past the second: [B, 6] -> [B, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)])

    def forward(self, x: Tensor) -> Tensor:
        first = self.parts[0](x)
        out: Tensor = self.parts[3](self.parts[2](self.parts[1](first) + first))
        return out


class Outside(nn.Module):
    """Layers that no list holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x).relu())
        return out


def deep() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.ReLU())), nn.Linear(6, 3))


def nested() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)))


class Residual(nn.Module):
    """A sequence beside a way around it: [B, 6] -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x)
        return out


def residual() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), Residual(), Residual(), nn.Linear(6, 3))


# Each with the stages that the engine cuts it into at most, by itself.
JOBS: dict[str, tuple[Callable[[], shoal.Job], int]] = {
    "two layers": (tiny.job, 3),
    "nine layers": (lambda: tiny.mlp(model=deep), 9),
    "lists in a list": (lambda: tiny.mlp(model=nested), 4),
    "convolutions": (tiny.convnet, 7),
    "a skip": (lambda: tiny.mlp(model=Skip), 3),
    "layers that no list holds": (lambda: tiny.mlp(model=Outside), 1),
    "tied, no lists": (tiny.gpt, 1),
    "values decide": (tiny.conditional, 1),
    "blocks between others": (layouts.stack, 3),
    "residual blocks": (lambda: tiny.mlp(model=residual), 4),
}


def cut(job: shoal.Job, num_stages: int, split: tuple[str, ...] = ()) -> bool:
    """Whether the engine divides a job's model into so many stages; it refuses in words where it does not."""
    model, job = outline(job), with_grains(job)
    assert model is not None
    try:
        Stages.build(model, job.loss, Batches(job)(job.grain_size), num_stages=num_stages, split=split)
    except ShoalError:
        return False
    return True


def admits(job: shoal.Job, num_stages: int) -> bool:
    layout: dict[str, Any] = {"layout": {"pipeline": num_stages}, "pipeline": {"schedule": "gpipe"}}
    try:
        judged(job, Plan().with_sections(**layout))
    except PlanError:
        return False
    return True


@cache
def asked(name: str) -> Question:
    return question(JOBS[name][0](), Plan(), "4x8xH100", None)


@pytest.mark.parametrize("name", JOBS)
def test_plan_and_engine_agree(name: str) -> None:
    make, most = JOBS[name]
    job = make()
    assert most == 1 or cut(job, most)
    assert not cut(job, most + 1)
    space = asked(name).case.space
    assert space.facts.most_stages == most
    # The profile may tell fewer parts apart (a view costs nothing), but two wherever there are two.
    assert min(most, 2) <= space.num_layers <= most
    for number in range(2, space.num_layers + 1):
        assert not space.refusal(space.plan(space_place(number), MicrobatchSchedule(1, schedule="gpipe")))
    said = next(illegal for illegal in illegal(space) if illegal.what.startswith("pipeline >"))
    assert said.what == f"pipeline > {space.num_layers}"
    if space.num_layers < most:
        assert f"layout.pipeline = {most} at most may run" in said.reason
    for number in {2, most} - {1}:
        assert most == 1 or admits(job, number)


def space_place(pipeline: int) -> Degrees:
    return Degrees(1, ModelDegrees(pipeline=pipeline))


@pytest.mark.parametrize("name", [name for name, (_, most) in JOBS.items() if most > 1])
def test_what_is_predicted_is_where_the_engine_can_cut(name: str) -> None:
    """By the places alone, and with the same work in the parts as in the whole."""
    job = JOBS[name][0]()
    case = asked(name).case
    predictor = Predictor(case.work, case.cluster)
    units = case.work.profile.units
    for number in {2, case.space.num_layers}:
        plan = case.space.plan(space_place(number), MicrobatchSchedule(1, schedule="gpipe"))
        split = predictor.predict(plan).split
        assert len(split) == number - 1
        assert cut(job, number, split), split
    parts = predictor.staging.parts
    assert sum(u.body.flops(8) for u in parts) == pytest.approx(sum(u.body.flops(8) for u in units))
    weights = [w.name for u in parts for w in u.body.weights]
    assert sorted(weights) == sorted(w.name for u in units for w in u.body.weights)


def test_a_pipeline_is_among_what_is_predicted() -> None:
    search = asked("two layers").case.search()
    assert any(found.plan.layout.pipeline == 2 for found in search.take(Wanted(number=float("inf"))))
