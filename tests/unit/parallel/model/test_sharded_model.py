"""What ranks hold, told to each other: who writes what, and one optimizer document of many."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.checkpoint.state import load_optimizer, optimizer_state
from shoal.errors import JobMismatchError
from shoal.parallel.model.sharded_model import first_holders, merged


def test_each_different_part_has_one_holder() -> None:
    told = [{"w": ["f", [4], [[[0, 2]]]]}, {}, {"w": ["f", [4], [[[2, 4]]]]}, {"w": ["f", [4], [[[0, 2]]]]}]
    assert first_holders(told, "w") == [0, 2]


def test_groups_are_put_together_by_their_values() -> None:
    """Stages whose parameters the job groups by name have groups of different numbers."""
    first = {"state": {"a": 1}, "groups": [{"params": ["a"], "values": {"wd": 0.1}}]}
    second = {
        "state": {"b": 2, "a": 3},
        "groups": [{"params": ["b"], "values": {"wd": 0.0}}, {"params": ["a", "c"], "values": {"wd": 0.1}}],
    }
    found = merged([first, second])
    assert found["state"] == {"a": 1, "b": 2}
    assert found["groups"] == [
        {"params": ["a", "c"], "values": {"wd": 0.1}},
        {"params": ["b"], "values": {"wd": 0.0}},
    ]


def grouped(model: nn.Module, decays: dict[str, float]) -> torch.optim.Optimizer:
    groups = [{"params": [p], "weight_decay": decays[name]} for name, p in model.named_parameters()]
    return torch.optim.SGD(groups, lr=0.1)


def test_each_group_finds_its_own_values_again() -> None:
    model = nn.Linear(2, 1)
    _, document = optimizer_state(grouped(model, {"weight": 0.3, "bias": 0.0}), model)
    swapped = {**document, "groups": document["groups"][::-1]}
    fresh = grouped(model, {"weight": 0.0, "bias": 0.0})
    load_optimizer(fresh, model, {}, swapped)
    assert [group["weight_decay"] for group in fresh.param_groups] == [0.3, 0.0]
    with pytest.raises(JobMismatchError):
        load_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, {}, swapped)
