"""Recomputation: the same bits from fewer kept bytes, whatever a block does besides computing."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from shoal.errors import PlanError, SettingWarning
from shoal.numerics.grain_randomness import GrainScope
from shoal.numerics.precision import ProductsInFloat32
from shoal.parallel.base import run_backward
from shoal.parallel.blocks.recompute import recompute
from shoal.parallel.model.structure import parts, repeated_blocks
from shoal.plans.grains import Grain

KINDS = ("selective", "full")
GRAINS = [Grain(0, 0, 3), Grain(1, 3, 3), Grain(2, 6, 2)]
ROWS = 8


class Block(nn.Module):
    """Attention, dropout, a perceptron: [B, T, width] -> [B, T, width]."""

    def __init__(self, width: int = 16, dropout: float = 0.3) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(self.norm(x)).chunk(3, -1)
        x = x + self.dropout(F.scaled_dot_product_attention(query, key, value, is_causal=True))
        return x + self.dropout(self.down(F.gelu(self.up(x))))


class Transformer(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Residual(nn.Module):
    """Convolutions with BatchNorm around a shortcut; what they gave is changed in place."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.conv3 = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.relu(self.conv2(out))
        out = self.conv3(out)
        out += x
        return self.relu(out)


def stage(width: int) -> nn.Sequential:
    return nn.Sequential(Residual(width), Residual(width))


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), stage(8), nn.Conv2d(8, 4, 3, 2), stage(4), nn.Flatten(), nn.Linear(4 * 36, 3)
    )


def lenet() -> nn.Module:
    first = (nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*first, nn.Linear(200, 32), nn.Dropout(0.4), nn.ReLU(), nn.Linear(32, 3))


def token_ids() -> Tensor:
    return torch.randint(32, (ROWS, 12))


def pictures() -> Tensor:
    return torch.randn(ROWS, 1, 16, 16)


class Live(TorchDispatchMode):
    """Counts the bytes of everything computed in it that is still held."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self._given = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in self._given:
                self._seen[leaf.untyped_storage()._cdata] = StorageWeakRef(leaf.untyped_storage()), leaf.nbytes
        self.peak = max(self.peak, self.num_bytes)
        return out

    @property
    def num_bytes(self) -> int:
        self._seen = {k: (ref, size) for k, (ref, size) in self._seen.items() if not ref.expired()}
        return sum(size for _, size in self._seen.values())


def gradients(model: nn.Module, inputs: Tensor, scoped: bool = True) -> list[Tensor]:
    """Of one microbatch, then the buffers after its forward and again after its backward."""
    scope = GrainScope(3, 1, GRAINS)
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)
    model.zero_grad()
    with scope if scoped else torch.enable_grad():
        total = model(inputs).float().square().sum()
        after = [b.clone() for b in model.buffers()]
        run_backward(total)
        assert not scoped or not scope.leaked()
    return [*(p.grad for p in model.parameters() if p.grad is not None), *after, *(b.clone() for b in model.buffers())]


def both(make: Callable[[], nn.Module], kind: str) -> tuple[nn.Module, nn.Module]:
    """A model, and the same with recomputation."""
    torch.manual_seed(0)
    plain = make().train()
    other = copy.deepcopy(plain)
    assert recompute(other, kind)
    return plain, other


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("make", "data"), [(Transformer, token_ids), (resnet, pictures), (lenet, pictures)])
def test_no_bit_changes(make: Callable[[], nn.Module], data: Callable[[], Tensor], kind: str) -> None:
    plain, other = both(make, kind)
    for _ in range(2):  # the first forward learns which buffers it changes
        inputs = data()
        assert_same(gradients(other, inputs), gradients(plain, inputs))
    assert [n for n, _ in other.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert other.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("kind", KINDS)
def test_no_bit_changes_under_autocast_and_float32_products(kind: str) -> None:
    plain, other = both(Transformer, kind)
    inputs = token_ids()
    with ProductsInFloat32(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(gradients(other, inputs), gradients(plain, inputs))


@pytest.mark.parametrize(("make", "data"), [(Transformer, token_ids), (resnet, pictures), (lenet, pictures)])
def test_fewer_bytes_are_kept_for_more_flops(make: Callable[[], nn.Module], data: Callable[[], Tensor]) -> None:
    kept, flops, peaks = {}, {}, {}
    inputs = data()
    for kind in ("none", *KINDS):
        model = make()
        recompute(model, kind)
        with GrainScope(0, 0, GRAINS), Live(model) as live:
            total = model(inputs).square().sum()
            kept[kind] = live.num_bytes
            run_backward(total)
            peaks[kind] = live.peak
        with FlopCounterMode(display=False) as counter, GrainScope(0, 0, GRAINS):
            run_backward(model(inputs).square().sum())
        flops[kind] = counter.get_total_flops()
    assert kept["full"] < kept["none"]
    if make is not lenet:  # where a ReLU follows each convolution, only the ReLU's result is kept in any case
        assert kept["full"] < kept["selective"] < kept["none"]
        assert peaks["full"] < peaks["none"]
    assert flops["full"] > flops["selective"] == flops["none"]


class Counting(nn.Module):
    """What it computes depends on a buffer that it changes; it also draws from Python's and numpy's generators."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.ones(()))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        self.mean = self.mean * 0.9 + x.detach().mean(0)
        x = torch.tanh(self.linear(x) * self.count + self.mean)
        return torch.tanh(x * (random.random() + float(np.random.rand())))


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_is_computed_again_from_what_it_started_with(kind: str) -> None:
    plain, other = both(lambda: nn.Sequential(Counting(), Counting(), Counting()), kind)
    for _ in range(3):
        inputs = torch.randn(ROWS, 4)
        assert_same(gradients(other, inputs, scoped=False), gradients(plain, inputs, scoped=False))
        assert random.random() + np.random.rand()  # not those that the recomputation drew
    assert float(other[0].count) == 4.0


class Late(Counting):
    """Changes its buffers only after some forwards."""

    begun = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.begun else torch.tanh(self.linear(x))


@pytest.mark.parametrize("kind", KINDS)
def test_a_buffer_that_begins_to_change_is_written_once(kind: str) -> None:
    model = nn.Sequential(Late(), Late(), Late())
    recompute(model, kind)
    for step in range(4):
        Late.begun = step > 1
        model(torch.randn(ROWS, 4)).square().sum().backward()
    assert [float(block.count) for block in model] == [3.0] * 3


def test_a_forward_without_a_backward_is_the_plain_one() -> None:
    plain, other = both(Transformer, "full")
    inputs = token_ids()
    with torch.no_grad():
        assert torch.equal(other.eval()(inputs), plain.eval()(inputs))


def test_a_retained_graph_may_be_gone_through_twice() -> None:
    for kind in KINDS:
        model = Transformer(2).eval()
        recompute(model, kind)
        total = model(token_ids()).square().sum()
        first, second = (torch.autograd.grad(total, model.embedding.weight, retain_graph=True)[0] for _ in range(2))
        assert torch.equal(first, second)


def test_a_copy_of_the_model_is_a_model_of_its_own() -> None:
    model = Transformer(2)
    recompute(model, "full")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert twin(token_ids()).abs().sum() > 0.0


# ------------------------------------------------------------------------------------------------------------- blocks


def names(model: nn.Module) -> list[str]:
    return [block.name for block in repeated_blocks(model)]


def test_blocks_are_what_a_model_repeats() -> None:
    assert names(Transformer(3)) == ["blocks.0", "blocks.1", "blocks.2"]
    assert names(resnet()) == ["1.0", "1.1", "3.0", "3.1"]
    assert names(nn.Transformer(8, 2, 2, 2, 16, batch_first=True)) == [
        f"{side}.layers.{i}" for side in ("encoder", "decoder") for i in range(2)
    ]
    assert names(lenet()) == []
    assert names(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []


def test_experts_are_within_their_block() -> None:
    def block() -> nn.Module:
        experts = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(4))
        return nn.ModuleDict({"gate": nn.Linear(2, 4), "experts": experts})

    assert names(nn.ModuleList([block(), block()])) == ["0", "1"]


def test_without_repeated_blocks_a_sequence_is_cut() -> None:
    assert [(b.name, b.children) for b in parts(lenet())] == [("[0:6]", (0, 6))]
    deep = nn.Sequential(*(nn.Linear(2, 2) for _ in range(9)))
    assert [b.children for b in parts(deep)] == [(0, 3), (3, 6)]

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = Block(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    assert [b.name for b in parts(Two())] == ["body"]


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))])
def test_where_nothing_fits_it_says_so(model: nn.Module) -> None:
    with pytest.warns(SettingWarning, match="has no effect on .*: it repeats no block"):
        assert recompute(model, "full") == []


def test_blocks_that_compute_again_by_themselves_are_left_alone() -> None:
    model = Transformer(3)
    model.blocks[1].gradient_checkpointing = True
    assert recompute(model, "full") == ["blocks.0", "blocks.2"]
    model = Transformer(2)
    model.gradient_checkpointing = True
    with pytest.warns(SettingWarning, match="gradient checkpointing"):
        assert recompute(model, "selective") == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert recompute(model, "none") == []


# ---------------------------------------------------------------------------------------------------------- refusals


class Eager(nn.Module):
    """Begins with a change of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(F.relu_(x))


def test_a_block_that_changes_its_input_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Eager(), Eager())
    recompute(model, "full")
    with pytest.raises(PlanError, match="1, which changes its input in place"):
        model(torch.randn(2, 4))


class Cache:
    """As transformers': a layer adds to it."""

    def __init__(self, *held: Tensor) -> None:
        self.held = list(held)

    def get_seq_length(self) -> int:
        return sum(len(h) for h in self.held)


class Caching(Block):
    def forward(self, x: Tensor, past_key_values: Cache | None = None, use_cache: bool = False) -> Tensor:
        if past_key_values is not None and use_cache:
            past_key_values.held.append(x)
            x = torch.cat(past_key_values.held)
        return super().forward(x)


def test_keys_and_values_are_not_added_twice() -> None:
    layers = nn.ModuleList([Caching(), Caching()])
    recompute(layers, "full")
    cache = Cache()
    layers[0](torch.randn(2, 3, 16), past_key_values=cache, use_cache=True).sum().backward()
    assert cache.held == []
    with pytest.raises(PlanError, match="past_key_values of 2 tokens for 1"):
        layers[1](torch.randn(2, 3, 16), past_key_values=Cache(torch.randn(2, 3, 16)), use_cache=True)
