"""Losses, metrics and models that differentiate: trained, evaluated and predicted as a plain loop does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.launching import JOBS, Run, run
from tests.ranks.test_relayout import plan
from tests.usual import parametrize

import shoal

pytestmark = pytest.mark.ranks

JOB = f"{JOBS / 'derivatives.py'}:job"
NAMES = ["penalty", "equation", "forces", "critic", "adapted", "directional", "curvature", "stepwise"]


@pytest.fixture(autouse=True)
def _jobs_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(JOBS))


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch's own, behind jvp and hessian
@parametrize("name", NAMES, usual=["penalty", "forces", "adapted", "curvature"])
def test_two_processes_give_the_weights_of_a_plain_loop(tmp_path: Path, name: str) -> None:
    """Also the mean loss of the evaluation, which differentiates as well."""
    import derivatives

    ended = run(Run(JOB, tmp_path / "run", 2, settings={"name": name})).expect(0)
    wanted, loss = derivatives.plain(name)
    weights = shoal.load(ended.out)
    for key, value in wanted.items():
        torch.testing.assert_close(weights[key], value, rtol=1e-4, atol=1e-5)
    assert ended.result["metrics"]["loss"] == pytest.approx(loss, rel=1e-4)
    assert ended.result["metrics"]["same"] == ended.result["metrics"]["loss"]


@parametrize(
    ("layout", "given"),
    [
        ({"layout": {"shard": 2}, "shard": {"level": "parameters"}}, "a loss that differentiates the model, with"),
        ({"layout": {"pipeline": 2}}, "a pipeline of a job that differentiates the model"),
    ],
    usual=[],
    ids=["ZeRO-3", "pipeline"],
)
def test_a_layout_that_cannot_differentiate_says_so_before_the_first_step(
    tmp_path: Path, layout: dict[str, Any], given: str
) -> None:
    arguments = plan(tmp_path / "plan.toml", layout)
    ended = run(Run(JOB, tmp_path / "run", None, arguments=arguments)).fails(2)
    assert ended.message.given.startswith(given)
