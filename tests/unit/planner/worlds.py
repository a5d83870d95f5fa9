"""One process that takes itself for a rank of many, by torch's fake process group; and a model that is cut for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shoal.distributed.mesh import Mesh, open_groups
from shoal.plans.accounting.collectives import Array, Sharding
from shoal.plans.plan import Layout
from shoal.training.observe.metering import array


@contextlib.contextmanager
def world(layout: Layout, rank: int = 0) -> Iterator[Mesh]:
    """The mesh of `rank`; collectives return at once, with values that mean nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        yield Mesh(layout, rank, torch.device("cpu"), "here", open_groups(layout))
    finally:
        dist.destroy_process_group()


class Block(nn.Module):
    """A transformer block, pre-norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        mixed = self.mix(self.first(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*mixed.unbind(), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.second(x))))
        return out


class Transformer(nn.Module):
    """int64 [B, T] -> [B, T, V]."""

    def __init__(self, vocabulary: int = 50, width: int = 12, heads: int = 2, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out

    def units(self) -> tuple[tuple[Array, ...], ...]:
        """What fully_shard makes a unit of: each block, and last the rest."""
        inside = {id(p) for block in self.blocks for p in block.parameters()}
        rest = tuple(array(p) for p in self.parameters() if id(p) not in inside)
        return (*(tuple(map(array, block.parameters())) for block in self.blocks), rest)


def tokens() -> Tensor:
    return torch.randint(50, (2, 8), generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Case:
    """How a model is cut: level, microbatches, and whether each of them is scattered."""

    level: str = "parameters"
    microbatches: int = 1
    reduce_every: bool = True
    bf16: bool = False


CASES = [
    Case(),
    Case("gradients"),
    Case("parameters", 3),
    Case("gradients", 3),
    Case("parameters", 3, reduce_every=False),
    Case("parameters", 2, bf16=True),
    Case("parameters", 2, reduce_every=False, bf16=True),
]
# (replicas, degree, case): every case in the smallest world, and two in the others; the rest is slow.
LARGE = [
    pytest.param(
        replicas,
        degree,
        case,
        id=f"{replicas}-{degree}-{case}",
        marks=() if (replicas, degree) == (1, 8) or case in (CASES[2], CASES[5]) else pytest.mark.slow,
    )
    for replicas, degree in [(1, 8), (1, 64), (4, 16), (32, 16)]
    for case in CASES
]


def sharding(model: Transformer, case: Case, degree: int, replicas: int) -> Sharding:
    units = model.units()
    kept = range(len(units)) if case.level == "gradients" else []
    return Sharding(
        units,
        degree,
        replicas,
        case.microbatches,
        resident=frozenset(kept),
        gather_itemsize=2 if case.bf16 else 4,
        reduce_every=case.reduce_every,
        root_early=sum(p.numel() for p in (*model.norm.parameters(), *model.head.parameters())),
    )


def shard(model: Transformer, case: Case, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if case.bf16 else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=case.level == "parameters")
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=case.level == "parameters")


def backward(model: Transformer, case: Case) -> None:
    for number in range(case.microbatches):
        model.set_requires_gradient_sync(case.reduce_every or number == case.microbatches - 1)
        model(tokens()).float().sum().backward()
