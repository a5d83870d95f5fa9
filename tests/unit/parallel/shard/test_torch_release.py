"""Which torch divides gradients and parameters, as the engine refuses it and as the planner knows it."""

from __future__ import annotations

import pytest
import torch
from tests.conformance.cases import job
from torch.distributed.fsdp import FSDPModule

from shoal.distributed.mesh import alone
from shoal.errors import PlanError
from shoal.numerics.precision import Precision
from shoal.parallel.shard import torch_release
from shoal.parallel.shard.zero23 import shard
from shoal.planner.answer.answer import question
from shoal.plans.plan import Plan

OLD = "2.10.0+cpu"


def test_this_torch_is_judged_by_what_it_has() -> None:
    """The release stands for a method, which is not asked for where torch.distributed would be imported for it."""
    assert hasattr(FSDPModule, "set_reduce_scatter_unused_params") == (not torch_release.missing())


@pytest.mark.parametrize(("version", "divides"), [(OLD, False), ("2.13.0a0+git1", True), ("3.0", True)])
def test_releases(version: str, divides: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert (not torch_release.missing()) == divides


def test_the_engine_refuses_what_the_planner_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", OLD)
    model = torch.nn.Linear(2, 2)
    with pytest.raises(PlanError, match=r"torch 2\.10.*2\.13 or newer"):
        shard(model, Plan(), alone(torch.device("cpu")), Precision.of(Plan().precision, torch.device("cpu")))
    here = question(job(), Plan(), "here", None).case.space
    assert torch_release.missing() in here.whole
    assert f"torch {OLD}" in here.whole
    assert question(job(), Plan(), "8xH100", None).case.space.whole == ""
