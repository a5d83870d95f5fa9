"""Experts in exact mode: which parts of them have the updates of whole parameters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shoal.errors import JobError
from shoal.parallel.axis_collectives import TensorAxis
from shoal.parallel.experts.gathered import ExpertGrains
from shoal.parallel.model.sharded_model import ModelDivision, ShardedModel, TensorSlice
from shoal.plans.plan import Layout


def grains_of(dtype: torch.dtype, width: int) -> ExpertGrains:
    """The sums of a rank with one of two experts, [1, 2, width]."""
    model = nn.Module()
    model.up = nn.Parameter(torch.zeros(1, 2, width, dtype=dtype))
    block: Any = SimpleNamespace(axis=TensorAxis(2, 0))
    part = TensorSlice.whole((2, 2, width)).narrow(0, 0, 1)
    mesh: Any = SimpleNamespace(device=torch.device("cpu"), rank=0, layout=Layout(data=2, expert=2))
    division = ModelDivision(parts={"up": part}, experts={"up"}, gathered=[block])
    return ExpertGrains(ShardedModel(mesh, model, division), 4, torch.float32)


def test_16_bit_parts_with_elements_that_cpu_kernels_round_otherwise_are_refused() -> None:
    with pytest.raises(JobError, match="multiple of 64"):
        grains_of(torch.bfloat16, 33)
    for dtype, width in ((torch.bfloat16, 32), (torch.float32, 33)):
        assert list(grains_of(dtype, width).parameters) == ["up"]
