"""A model whose weights, gradients and optimizer state are more than a rank's memory is refused before a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shoal.errors import OutOfMemoryError
from shoal.plans import Plan
from shoal.training.setup import memory_check
from shoal.training.setup.memory_check import refuse_too_large
from shoal.training.update.job_optimizer import Parameters

MODEL = nn.Linear(1000, 1000, bias=False)  # 4 MB
CPU = torch.device("cpu")


def check(monkeypatch: pytest.MonkeyPatch, megabytes: float, plan: Plan, kind: Any = torch.optim.Adam) -> None:
    monkeypatch.setattr(memory_check, "usable_memory_bytes", lambda: int(megabytes * 1e6))
    division = SimpleNamespace(own_bytes=lambda num_bytes: num_bytes)
    strategy: Any = SimpleNamespace(update_division=division, sparse=())
    refuse_too_large(plan, strategy, Parameters(MODEL), kind(MODEL.parameters(), lr=0.1), CPU)


def test_states_are_counted_by_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam needs 16 bytes a parameter, SGD 8, one of the user's own at least 8."""
    check(monkeypatch, 17.0, Plan())
    with pytest.raises(OutOfMemoryError, match=r"1,000,000 parameters, with Adam.*without activations"):
        check(monkeypatch, 15.0, Plan())
    check(monkeypatch, 9.0, Plan(), torch.optim.SGD)
    with pytest.raises(OutOfMemoryError, match="with SGD"):
        check(monkeypatch, 7.0, Plan(), torch.optim.SGD)


def test_ranks_of_a_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(OutOfMemoryError, match="a rank's share of this host, of 2"):
        check(monkeypatch, 31.0, Plan().with_sections(layout={"data": 2}))
    check(monkeypatch, 31.0, Plan().with_sections(layout={"shard": 2}))


def test_ranks_need_no_even_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage with most of the model, and the owner of its only parameter, take what the other ranks leave."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    check(monkeypatch, 17.0, Plan().with_sections(layout={"pipeline": 2}))
    with pytest.raises(OutOfMemoryError):
        check(monkeypatch, 15.0, Plan().with_sections(layout={"pipeline": 2}))
    divided = Plan().with_sections(layout={"shard": 2}, shard={"level": "optimizer"})
    check(monkeypatch, 25.0, divided)  # 12 MB a rank: weights, gradients, and half of the states
    with pytest.raises(OutOfMemoryError):
        check(monkeypatch, 23.0, divided)
