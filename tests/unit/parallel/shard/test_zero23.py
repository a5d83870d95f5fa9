"""Units of a sharded model: what is gathered together is called together, and holds what it uses."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from tests.usual import needs_zero23
from torch import Tensor, nn

from shoal.distributed.mesh import alone
from shoal.errors import JobError
from shoal.numerics.precision import Precision
from shoal.parallel.shard.zero23 import UNIT_BYTES, _tensors_in, shard, units
from shoal.plans.plan import Plan


class Block(nn.Module):
    """A layer, or experts of which a sample is given to one."""

    def __init__(self, width: int, experts: int = 0) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.ffns = nn.ModuleList(Block(width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Model(nn.Module):
    """Blocks, with a head that is the embedding."""

    def __init__(self, experts: int = 0, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(Block(4, experts) for _ in range(3))
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight
        if tied:
            self.blocks[1].layer.weight = self.blocks[0].layer.weight


def names(model: nn.Module) -> list[str]:
    found = {module: name for name, module in model.named_modules()}
    return [found[unit] for unit in units(model)]


def test_blocks_are_units() -> None:
    assert names(Model()) == ["blocks.0", "blocks.1", "blocks.2"]


def test_experts_are_gathered_with_what_holds_them() -> None:
    assert names(Model(experts=2)) == ["blocks.0", "blocks.1", "blocks.2"]


def test_what_shares_a_parameter_with_the_outside_is_no_unit() -> None:
    assert names(Model(tied=True)) == ["blocks.2"]


def test_units_have_a_forward() -> None:
    """A layer may be a list of its norm and its net, which the model calls itself."""
    model = nn.Module()
    model.layers = nn.ModuleList(nn.ModuleList([nn.ModuleList([nn.LayerNorm(4)]), Block(4, 0)]) for _ in range(2))
    assert names(model) == ["layers.0.0.0", "layers.0.1", "layers.1.0.0", "layers.1.1"]


def test_without_blocks_size_decides() -> None:
    width = int((UNIT_BYTES / 4) ** 0.5) + 1
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))
    assert names(model) == ["1"]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")  # of the softmax itself
def test_clusters_of_an_adaptive_softmax_are_no_units() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.AdaptiveLogSoftmaxWithLoss(8, 20, [4, 10]))
    assert names(model) == []


@needs_zero23()
def test_sparse_gradients_are_refused_by_the_name_of_their_module() -> None:
    model, cpu = nn.Sequential(nn.EmbeddingBag(4, 2, sparse=True), nn.Linear(2, 2)), torch.device("cpu")
    plan = Plan().with_sections(layout={"shard": 2}, shard={"level": "parameters"})
    with pytest.raises(JobError, match=r"0: EmbeddingBag\(sparse=True\).*sparse=False"):
        shard(model, plan, alone(cpu), Precision.of(plan.precision, cpu))


@dataclass(slots=True)
class Kept:
    """What a block may have as an attribute: it has no `__dict__`, and may refer to itself."""

    width: int = 4
    aux: list[Tensor] = field(default_factory=list)
    parent: Kept | None = None


def test_tensors_in_dataclasses_with_slots_and_in_cycles() -> None:
    kept = Kept(aux=[torch.ones(2)])
    kept.parent = kept
    assert {id(tensor) for tensor in _tensors_in({"kept": kept})} == {id(kept.aux[0])}
    assert list(_tensors_in(Kept)) == []
