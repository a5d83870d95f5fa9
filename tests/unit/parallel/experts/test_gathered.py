"""Experts in exact mode: whose updates are those of whole parameters, what is refused, and loads of divided ones."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shoal.errors import JobError
from shoal.parallel.axis_collectives import TensorAxis
from shoal.parallel.experts.blocks import ExpertLoads, expert_blocks, refuse_mixed
from shoal.parallel.experts.gathered import ExpertGrains
from shoal.parallel.model.sharded_model import ModelDivision, ShardedModel, TensorSlice
from shoal.plans.plan import Layout


class Mixed(nn.Module):
    """A list of experts, and a second one beside it or within a layer."""

    def __init__(self, second: str) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        home = self if second == "beside" else nn.Module()
        home.other_experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.layer = home if second == "within" else None


@pytest.mark.parametrize(("second", "gathers", "is_refused"), [
    ("beside", False, True), ("beside", True, True), ("within", False, False), ("within", True, True)
])  # fmt: skip
def test_two_lists_of_experts_in_one_forward(second: str, gathers: bool, is_refused: bool) -> None:
    model = Mixed(second)
    blocks = expert_blocks(model)
    assert len(blocks) == 2
    with pytest.raises(JobError, match="computes both") if is_refused else contextlib.nullcontext():
        refuse_mixed(model, blocks[0], blocks, gathers=gathers)


def test_experts_of_a_list_that_are_frozen_in_part() -> None:
    model = Mixed("none")
    (block,) = expert_blocks(model)
    for expert in model.experts:
        expert.bias.requires_grad_(False)
    refuse_mixed(model, block, [block], gathers=True)
    model.experts[1].weight.requires_grad_(False)
    with pytest.raises(JobError, match="some are trained and others frozen"):
        refuse_mixed(model, block, [block], gathers=True)


def test_the_busiest_rank_over_the_mean_since_the_last_call() -> None:
    loads = ExpertLoads(counts=True)
    loads.add((6, 2))
    loads.add((0, 4))
    loads.counts = False  # a filler, or a metric that differentiates
    loads.add((9, 0))
    assert loads.imbalance() == 10 / 6
    assert loads.imbalance() is None


def test_gradients_of_a_metric_are_no_gradients_of_a_step() -> None:
    sums = grains_of(torch.float32, 4)
    whole = nn.Parameter(torch.zeros(2, 2, 4))
    sums._blocks[0].wholes = [[whole]]
    whole.sum().backward()
    sums.begin()
    assert whole.grad is None


def grains_of(dtype: torch.dtype, width: int) -> ExpertGrains:
    """The sums of a rank with one of two experts, [1, 2, width]."""
    model = nn.Module()
    model.up = nn.Parameter(torch.zeros(1, 2, width, dtype=dtype))
    block: Any = SimpleNamespace(axis=TensorAxis(2, 0), wholes=[])
    part = TensorSlice.whole((2, 2, width)).narrow(0, 0, 1)
    mesh: Any = SimpleNamespace(device=torch.device("cpu"), rank=0, layout=Layout(data=2, expert=2))
    division = ModelDivision(parts={"up": part}, experts={"up"}, gathered=[block])
    return ExpertGrains(ShardedModel(mesh, model, division), 4, torch.float32)


def test_16_bit_parts_with_elements_that_cpu_kernels_round_otherwise_are_refused() -> None:
    with pytest.raises(JobError, match="multiple of 64"):
        grains_of(torch.bfloat16, 33)
    for dtype, width in ((torch.bfloat16, 32), (torch.float32, 33)):
        assert list(grains_of(dtype, width).parameters) == ["up"]
