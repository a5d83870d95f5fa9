"""The formulas of communication, held against the collectives that really happen: one process, a world of 64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from tests.unit.planner.worlds import world
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce, wait_tensor

from shoal.data.loader import Microbatch
from shoal.distributed.collectives.fixed_tree import TreeSum
from shoal.distributed.mesh import Mesh, Report, to_row
from shoal.distributed.traffic_meter import Traffic
from shoal.parallel.base import NUM_SUMS, Flags, Strategy
from shoal.parallel.data.replicated import DataParallel, ExactDataParallel
from shoal.parallel.model.sharded_model import ShardedModel
from shoal.parallel.shard.update_division import ShardedOptimizer
from shoal.plans.accounting.collectives import (
    NUM_STEP_SUMS,
    ROW_NUMBERS,
    WORLD,
    Gradients,
    SizedCollective,
    Volume,
    Volumes,
    agreement,
    data_parallel,
    exact_data_parallel,
    sharded_optimizer,
)
from shoal.plans.accounting.model_parallel import LayerPair, tensor_parallel
from shoal.plans.grains import Grain
from shoal.plans.plan import Layout
from shoal.training.observe.metering import array

MIB = 1 << 20


# ---------------------------------------------------------------------------------------------------------- the counter


@pytest.fixture
def many() -> Iterator[Mesh]:
    with world(Layout(data=4, shard=16), rank=5) as mesh:
        yield mesh


def test_each_kind_of_collective_counts_the_larger_buffer(many: Mesh) -> None:
    shard, one, all_ = many.group("shard"), torch.zeros(6), torch.zeros(16 * 6)
    with Traffic(many.groups) as traffic:
        dist.all_reduce(one)
        dist.all_reduce(one, group=many.group("data"))
        dist.all_gather(list(all_.view(16, 6).unbind()), one, group=shard)
        dist.reduce_scatter(one, list(all_.view(16, 6).unbind()), group=shard)
        dist.all_to_all_single(all_, all_, group=shard)
        dist.broadcast(one.half(), 0)
        dist.send(one, 1)
        dist.recv(one.double(), 1)
        dist.barrier()
    dist.all_reduce(one)  # not in the count
    assert traffic.volumes == {
        (WORLD, "all_reduce"): Volume(1, 24),
        ("data", "all_reduce"): Volume(1, 24),
        ("shard", "all_gather"): Volume(1, 16 * 24),
        ("shard", "reduce_scatter"): Volume(1, 16 * 24),
        ("shard", "all_to_all"): Volume(1, 16 * 24),
        (WORLD, "broadcast"): Volume(1, 12),
        (WORLD, "send"): Volume(1, 24),
        (WORLD, "recv"): Volume(1, 48),
        (WORLD, "barrier"): Volume(1, 0),
    }


def test_functional_collectives_and_those_of_the_backward_are_seen(many: Mesh) -> None:
    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 1.0

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            return wait_tensor(all_reduce(gradient, "sum", many.group("shard")))

    weight = nn.Parameter(torch.ones(5))
    weight.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    with Traffic(many.groups) as traffic:
        Summed.apply(weight).sum().backward()
    assert traffic.volumes == {("shard", "all_reduce"): Volume(1, 20), (WORLD, "all_reduce"): Volume(1, 20)}


def test_a_count_begins_at_zero_and_can_be_repeated(many: Mesh) -> None:
    traffic = Traffic()
    for _ in range(3):
        traffic.start()
        traffic.start()
        dist.all_reduce(torch.zeros(2), group=many.group("data"))
        assert traffic.stop() == {("ranks 5,21,37,53", "all_reduce"): Volume(1, 8)}
    assert traffic.stop() == traffic.volumes


# ----------------------------------------------------------------------------------------------------- data and ZeRO-1

MODELS = {
    "small": [(3, 5), (5,), (7, 1)],
    "several buckets": [(MIB // 8,), (300, 1024), (MIB,), (7,), (3 * MIB // 2,), (MIB // 3,), (5, 5)],
}


Shapes = list[tuple[int, ...]]


def parameters(shapes: Shapes) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape)) for shape in shapes]


def undivided(mesh: Mesh, parameters: list[nn.Parameter]) -> ShardedModel:
    return ShardedModel(mesh, nn.ParameterList(parameters))


def one_step(strategy: Strategy, held: list[nn.Parameter], grains: tuple[int, ...] = (0,)) -> None:
    """A step on this rank: a microbatch a grain, the sums, and the update."""
    strategy.begin()
    for grain in grains:
        total = torch.stack([p.float().sum() for p in held]).sum()
        microbatch = Microbatch(0, (Grain(grain, 0, 1),), (), None, lambda *_: None)
        strategy.backward(microbatch, total, torch.zeros(NUM_SUMS, dtype=torch.float64), grain == grains[-1])
    strategy.finish(Flags(), NUM_SUMS, [0.0] * ROW_NUMBERS)
    strategy.update_division.update(lambda: None)


def ignore(span: str) -> None:
    """Marks of spans."""


def test_numbers_that_the_formulas_cannot_import_are_the_strategies_own() -> None:
    assert NUM_STEP_SUMS == NUM_SUMS
    assert len(to_row(Report())) == ROW_NUMBERS


@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shapes", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("world_size", [2, 4, 8, 64, 512])
def test_data_parallel_is_what_the_buckets_send(world_size: int, shapes: Shapes, reduce: torch.dtype) -> None:
    held = parameters(shapes)
    gradients = Gradients(tuple(map(array, held)), reduce.itemsize)
    with world(Layout(data=world_size)) as mesh, Traffic(mesh.groups) as traffic:
        strategy = DataParallel(undivided(mesh, held), held, reduce, ignore)
        one_step(strategy, held)
        strategy.close()
    assert traffic.volumes == Volumes.of(data_parallel(gradients, Layout(data=world_size)))
    assert sum(v.messages for v in traffic.volumes.values()) in ((3, 4) if len(shapes) > 3 else (1, 2))


def tree(model: list[nn.Parameter]) -> TreeSum:
    return TreeSum(8, torch.empty(sum(p.numel() for p in model)))


@pytest.mark.parametrize("held", [(), (0,), (5, 6, 7), (0, 1, 2, 3)])
def test_exact_mode_is_what_the_tree_sends(held: tuple[int, ...]) -> None:
    model = parameters(MODELS["small"])
    shares = [()] * 3 + [held] + [()] * 60  # that of rank 3; nobody else computes where nobody else is
    with world(Layout(data=64), rank=3) as mesh, Traffic(mesh.groups) as traffic:
        one_step(ExactDataParallel(undivided(mesh, model), model, tree(model), ignore), model, held)
    gradients = Gradients(tuple(map(array, model)))
    assert traffic.volumes == Volumes.of(exact_data_parallel(gradients, shares, 8, 3))


@pytest.mark.parametrize("layout", [Layout(shard=2), Layout(shard=64), Layout(data=4, shard=16)], ids=str)
@pytest.mark.parametrize("shapes", MODELS.values(), ids=MODELS.keys())
def test_zero_1_adds_the_owners_broadcasts(layout: Layout, shapes: Shapes) -> None:
    held = parameters(shapes)
    held.append(nn.Parameter(torch.ones(600, 1024).t()))  # large, and not in one piece
    held.append(nn.Parameter(torch.ones(9, dtype=torch.bfloat16)))
    gradients = Gradients(tuple(map(array, held)))
    with world(layout) as mesh, Traffic(mesh.groups) as traffic:
        model = undivided(mesh, held)
        strategy = DataParallel(model, held, torch.float32, ignore, ShardedOptimizer(model, held, ignore))
        one_step(strategy, held)
        strategy.close()
    sent = list(sharded_optimizer(gradients, layout))
    assert traffic.volumes == Volumes.of(data_parallel(gradients, layout), sent)
    assert Volumes.of(sent)["shard", "broadcast"].bytes == sum(p.bytes for p in gradients.parameters)
    assert Volumes.of(agreement(64)) == {(WORLD, "all_gather"): Volume(2, 64 * 12)}


# ------------------------------------------------------------------------------------------- tensor, pipeline, context


def test_tensor_pairs_by_hand() -> None:
    pairs = [LayerPair(100, 100), LayerPair(100, 100, input_needs_gradient=False)]
    assert Volumes.of(tensor_parallel(pairs, [40], 3)) == {
        ("tensor", "all_reduce"): Volume(9, 900),
        ("tensor", "all_gather"): Volume(3, 120),
    }


def test_volumes_add_up() -> None:
    one = SizedCollective("shard", "all_gather", 10, 3)
    volumes = Volumes.of([one])
    assert volumes["shard", "all_gather"] == Volume(3, 30)
    assert Volumes.of([one], [one])["shard", "all_gather"] == Volume(6, 60)
    assert volumes.to_json() == {"shard": {"all_gather": {"messages": 3, "bytes": 30}}}
