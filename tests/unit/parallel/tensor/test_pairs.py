"""Which layers a trace proposes for a pair, and which of these the proof lets through."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from examples.models import GPT, Attention
from torch import Tensor, nn

from shoal.errors import PlanError
from shoal.parallel.tensor.pairs import SectionCut
from shoal.parallel.tensor.plan import TensorPlan, decide, follow


def total(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    found = model(batch)
    return (found * found).sum(), len(batch)


def plan(model: nn.Module, batch: Tensor, degree: int = 2) -> TensorPlan:
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def values(name: str) -> Tensor:
        return held[name].detach()

    return decide(model, follow(model, total, batch, values, degree), values, degree)


class Between(nn.Module):
    """Two layers and something between them."""

    def __init__(self, between: Any, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, width), nn.Linear(width, 6)
        self.scale = nn.Parameter(torch.ones(()))
        self.features = nn.Parameter(torch.ones(width))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.between(self, self.up(x)))
        return out


RIGHT: dict[str, Any] = {
    "gelu": lambda m, x: F.gelu(x),
    "a parameter of one element": lambda m, x: torch.tanh(x * m.scale),
    "clamp and square": lambda m, x: x.clamp(-1, 1).square(),
    "two uses": lambda m, x: x * torch.sigmoid(x),
}
WRONG: dict[str, tuple[Any, str]] = {
    "softmax over the features": (lambda m, x: x.softmax(-1), "differs as a slice"),
    "a mean over the features": (lambda m, x: x - x.mean(-1, keepdim=True), "differs as a slice"),
    "flipped features": (lambda m, x: x.flip(-1), "differs as a slice"),
    "a parameter for each feature": (lambda m, x: x * m.features, "raises as a slice"),
    "a width in a view": (lambda m, x: x.view(-1, 2, 4).transpose(1, 2).reshape(-1, 8), "raises as a slice"),
    "a norm": (lambda m, x: F.layer_norm(x, (8,)), ""),
    "dropout by a function": (lambda m, x: F.dropout(x, 0.5), "whose mask cannot be cut"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_acts_on_features_by_themselves_is_a_pair(name: str) -> None:
    found = plan(Between(RIGHT[name]), torch.randn(3, 6))
    assert [p.candidate.columns for p in found.pairs] == [("up",)]
    assert found.pairs[0].partial == (("scale",) if "parameter" in name else ())


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_is_gathered(name: str) -> None:
    between, why = WRONG[name]
    found = plan(Between(between), torch.randn(3, 6))
    assert not found.pairs
    assert set(found.gathered) == {"up", "down"}
    assert why in found.notes["up"]


def test_a_slice_that_gets_out_is_none() -> None:
    class Leaks(Between):
        def forward(self, x: Tensor) -> Tensor:
            inner = self.up(x)
            return self.down(F.relu(inner)) + inner.sum(-1, keepdim=True)

    assert not plan(Leaks(None), torch.randn(3, 6)).pairs


def test_a_module_that_looks_at_values_has_no_pairs() -> None:
    def choose(module: nn.Module, x: Tensor) -> Tensor:
        return F.relu(x) if bool(x.sum() > 0) else F.gelu(x)

    found = plan(Between(choose), torch.randn(3, 6))
    assert not found.pairs
    assert "depends on values" in found.notes["up"] or "gathered" in found.notes["up"]


def test_heads_are_not_cut() -> None:
    found = plan(Attention(24, 4, 0.1), torch.randn(2, 5, 24), 3)
    runs = found.pairs[0].runs["query"]
    assert [[stop - start for start, stop in place] for place in runs] == [[6], [6], [12]]
    assert "raises" not in str(found.notes)
    assert not plan(Attention(24, 2, 0.1), torch.randn(2, 5, 24), 3).pairs


def test_equal_blocks_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.parallel.tensor import plan as tensor_plan

    tried = []
    original = tensor_plan.Bench

    def bench(*args: Any) -> Any:
        tried.append(args[2].owner)
        return original(*args)

    monkeypatch.setattr(tensor_plan, "Bench", bench)
    found = plan(GPT(layers=3, width=16, heads=2, block=8), torch.randint(256, (2, 8)))
    assert len(found.pairs) == 6
    assert tried == ["blocks.0.attention", "blocks.0"]


def test_a_plan_survives_json() -> None:
    found = plan(GPT(layers=1, width=16, heads=2, block=8), torch.randint(256, (2, 8)))
    assert TensorPlan.from_json(found.to_json()) == found


def test_a_weight_that_others_use_stays_whole() -> None:
    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.linear = nn.Embedding(10, 4), nn.Linear(4, 4)

        def forward(self, ids: Tensor) -> Tensor:
            return self.linear(self.embedding(ids)) @ self.embedding.weight.t()

    found = plan(Shares(), torch.randint(10, (2, 3)))
    assert "its parameter is used by" in found.notes["embedding"]
    assert found.rows == ()


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(PlanError, match="the widest has 4 outputs"):
        plan(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(2, 3), 5)


def test_sections_are_cut_each() -> None:
    cut = SectionCut({"qkv": (8, 4, 4)}, 4, 2)
    assert cut.runs("qkv", 0) == ((0, 4), (8, 10), (12, 14))
    assert cut.runs("qkv", 1) == ((4, 8), (10, 12), (14, 16))
