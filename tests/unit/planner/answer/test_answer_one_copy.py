"""Plans of CPU ranks that sum through shared memory have one copy of the parameters, where the job allows it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tests.conformance import cases

import shoal
from shoal.planner.answer import answer
from shoal.plans.plan import Plan


class Own(torch.optim.SGD):
    """An optimizer that is not torch's."""


class Mine(shoal.Callback):
    """A callback of a job's own."""


def reads_values(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=float(next(iter(parameters)).sum()))


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({}, True),
        ({"callbacks": [shoal.EMA(0.9)]}, True),
        ({"model": cases.mlp}, False),
        ({"optimizer": partial(Own, lr=0.1)}, False),
        ({"callbacks": [Mine()]}, False),
        ({"optimizer": reads_values}, False),
    ],
    ids=["torch's", "EMA", "small", "own optimizer", "own callback", "not known"],
)
def test_where_the_job_allows_it(changes: dict[str, Any], allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "fastest_on", lambda cluster, ranks: "shared_memory")
    job = cases.job(**{"model": partial(cases.mlp, 40_000), **changes})
    assert answer.question(job, Plan(), "here", None).case.space.one_copy is allowed


def test_not_where_sums_go_over_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "fastest_on", lambda cluster, ranks: "native")
    job = cases.job(model=partial(cases.mlp, 40_000))
    assert not answer.question(job, Plan(), "here", None).case.space.one_copy
