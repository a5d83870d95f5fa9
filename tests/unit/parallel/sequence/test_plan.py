"""What a trace says of a model's blocks, and how they are divided."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from examples.models import GPT
from tests.conformance.cases import Blocks, next_token, tokens
from torch import Tensor, nn

from shoal.errors import JobError, PlanError
from shoal.parallel.sequence.plan import ContextPlan, decide
from shoal.parallel.sequence.trace import observe


def planned(model: nn.Module, batch: Any, degree: int = 2) -> ContextPlan:
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    traces = observe(model, next_token, batch, degree, lambda name: held[name].detach())
    names = {id(p): name for name, p in model.named_parameters()}
    owned = {name: [names[id(p)] for p in model.get_submodule(name).parameters()] for name in traces[0].blocks}
    return decide(traces, owned, degree)


@pytest.mark.parametrize("length", [64, 16, 12, 4])
def test_blocks_in_a_row_are_one_stack(length: int) -> None:
    plan = planned(Blocks(), tokens(2, length=length))
    assert list(plan.blocks) == ["blocks.0", "blocks.1", "blocks.2"]
    assert [block.opens for block in plan.blocks.values()] == [True, False, False]
    assert [block.closes for block in plan.blocks.values()] == [False, False, True]
    for block in plan.blocks.values():
        assert block.hidden == (0, 0)
        assert block.cuts == {(0, 1): 0}
        assert block.dropouts == {3: 1}
        assert set(block.outputs.values()) == {1}
    assert all(name.startswith("blocks.") for name in plan.partial)
    assert len(plan.partial) == 3 * 10


class Between(Blocks):
    """Looks at what the first block gives."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        rotation = torch.ones(ids.shape[1], 4).to(x)
        first = self.blocks[0](x, rotation)
        x = self.blocks[1](first, rotation)
        x = self.blocks[2](x, rotation) + first
        logits: Tensor = self.head(x)
        return logits


def test_what_something_else_uses_goes_out_whole() -> None:
    plan = planned(Between(), tokens(2, length=16))
    assert [(block.opens, block.closes) for block in plan.blocks.values()] == [
        (True, True),
        (True, False),
        (False, True),
    ]


class Sharing(Blocks):
    """Uses a parameter of a block at the end."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + self.blocks[0].out.bias.sum()


def test_a_parameter_in_and_outside_of_blocks_is_refused() -> None:
    with pytest.raises(JobError, match=r"uses blocks\.0\.out\.bias inside of its blocks and past them"):
        planned(Sharing(), tokens(2, length=16))


def test_a_model_without_blocks_is_refused() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.head(self.embed(ids))
            return out

    with pytest.raises(PlanError, match="repeats no blocks"):
        planned(Flat(), tokens(2))


def test_more_ranks_than_heads_are_refused() -> None:
    model = GPT(layers=2, width=16, heads=2, block=16)
    with pytest.raises(PlanError, match="a context of at most 2"):
        planned(model, tokens(2), 3)
