"""Which layers a trace proposes for a pair, and which of these the proof lets through."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from examples.models import GPT, Attention
from torch import Tensor, nn

from shoal.errors import PlanError
from shoal.parallel.tensor.plan import SectionCut, TensorPlan, decide, follow, set_count


def total(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    found = model(batch)
    return (found * found).sum(), len(batch)


def plan(model: nn.Module, batch: Tensor, degree: int = 2, *, proven_with_values: bool = True) -> TensorPlan:
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def values(name: str) -> Tensor:
        return held[name].detach()

    trace = follow(model, total, batch, values, degree)
    return decide(model, trace, values if proven_with_values else None, degree)


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


@pytest.mark.parametrize("name", [*RIGHT, *WRONG])
def test_without_values_a_planner_finds_the_pairs_of_the_run(name: str) -> None:
    between = RIGHT[name] if name in RIGHT else WRONG[name][0]
    model, batch = Between(between), torch.randn(3, 6)
    shapes = copy.deepcopy(model).to("meta")
    assert plan(shapes, batch, proven_with_values=False).notes == plan(model, batch).notes


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


def test_a_module_that_looks_at_positions_has_pairs() -> None:
    def choose(module: nn.Module, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[0])
        return F.relu(x) if bool((positions.diff() == 1).all()) else x.softmax(-1)

    found = plan(Between(choose), torch.randn(3, 6))
    assert [p.candidate.columns for p in found.pairs] == [("up",)]


class Masked(nn.Module):
    """A pair in a module of its own; whether it gets a mask depends on the batch's values, here or in the pair."""

    def __init__(self, looks_within: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 6)
        self.inner = Between(lambda m, x: x.relu() * (1 if m.seen is None or (looks_within and m.seen.all()) else 2))
        self.inner.seen = None
        self.looks_within = looks_within

    def forward(self, ids: Tensor) -> Tensor:
        mask = ids > 0
        self.inner.seen = mask if self.looks_within or not mask.all() else None
        found: Tensor = self.inner(self.embedding(ids))
        return found


@pytest.mark.parametrize("looks_within", [False, True])
def test_who_looks_at_the_batch_is_not_in_a_pair(looks_within: bool) -> None:
    found = plan(Masked(looks_within), torch.tensor([[0, 1, 2], [1, 2, 3]]))
    assert [p.candidate.columns for p in found.pairs] == ([] if looks_within else [("inner.up",)])
    assert ("what inner computes depends on values" in found.notes["inner.up"]) == looks_within


class Weighted(nn.Module):
    """A block with attention that returns its weights too, as Transformers' eager attention."""

    def __init__(self, uses_them: bool) -> None:
        super().__init__()
        self.attention, self.uses_them = self.Attention(), uses_them

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(6, 36), nn.Linear(12, 6)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            q, k, v = (part.unflatten(-1, (-1, 3)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            weights = (q @ k.transpose(2, 3)).softmax(-1)
            return self.out((weights @ v).transpose(1, 2).flatten(2)), weights

    def forward(self, x: Tensor) -> Tensor:
        found, weights = self.attention(x)
        return x + found * (weights.amax() if self.uses_them else 1.0)


@pytest.mark.parametrize("uses_them", [False, True])
def test_what_a_module_returns_may_be_slices_where_nobody_uses_it(uses_them: bool) -> None:
    found = plan(nn.Sequential(Weighted(uses_them), Weighted(uses_them)), torch.randn(2, 3, 6))
    assert [p.candidate.owner for p in found.pairs] == ([] if uses_them else ["0", "1"])


class Fused(nn.Module):
    """Queries, keys and values of each head beside each other; heads are counted by the config in the forward."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.qkv, self.out, self.config = nn.Linear(6, 36), nn.Linear(12, 6), config

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], self.config.num_heads, 3, 3).transpose(1, 2).unbind(3)
        mixed = F.scaled_dot_product_attention(q, k, v)
        found: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return found


def test_heads_may_be_outermost_and_counted_by_a_config() -> None:
    config = SimpleNamespace(num_heads=4)
    model = nn.Sequential(Fused(config), Fused(config))
    found = plan(model, torch.randn(2, 5, 6))
    assert len(found.pairs) == 2
    assert found.pairs[0].runs["0.qkv"] == (((0, 18),), ((18, 36),))
    for name, attribute, value in found.pairs[0].attributes[0]:
        set_count(model.get_submodule(name), attribute, value)
    assert (model[0].config.num_heads, model[1].config.num_heads, config.num_heads) == (2, 4, 4)


class Written(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight.T + self.bias


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def test_a_linear_layer_may_be_written_anew() -> None:
    model = Between(lambda m, x: x.relu())
    model.up = Written(6, 8)
    assert [p.candidate.columns for p in plan(model, torch.randn(3, 6)).pairs] == [("up",)]
    model.up = Scaled(6, 8)
    assert plan(model, torch.randn(3, 6)).notes["up"] == "whole: no rule to cut a Scaled"


def test_a_proof_of_a_large_pair_takes_the_memory_of_its_activations() -> None:
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Linear(8, 1 << 17), nn.ReLU(), nn.Linear(1 << 17, 1 << 17), nn.ReLU(), nn.Linear(1 << 17, 8)
        )
    assert len(plan(model, torch.randn(3, 8), proven_with_values=False).pairs) == 1


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
