"""The formulas of memory, held against the storages that are really there: one process, a world of 64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.unit.planner.made import cluster, predict
from tests.unit.planner.worlds import Case, Transformer, backward, shard, sharding, tokens, world
from tests.unit.plans.accounting.test_collectives import MODELS, Shapes, ignore, one_step, parameters, tree, undivided
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from shoal.distributed.traffic_meter import Traffic
from shoal.parallel.data.replicated import DataParallel, ExactDataParallel
from shoal.planner.predict.workload import Workload
from shoal.planner.profile.profiles import profile
from shoal.plans.accounting.collectives import (
    Array,
    Gradients,
    StateShape,
    Volumes,
    bucketed,
    cut,
    exact,
    fully_sharded,
    optimizer_state,
    owned,
    scattered_gradients,
    state_shape,
    whole,
)
from shoal.plans.plan import Layout, Plan
from shoal.training.observe.metering import MemoryMeter, SavedTensors, array, optimizer_shape, storage_bytes

# ------------------------------------------------------------------------------------------------------------ gradients


def held_gradients(strategy: DataParallel | ExactDataParallel, model: list[nn.Parameter]) -> int:
    return storage_bytes([*strategy.gradient_memory()[0], *(p.grad for p in model)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shapes", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("world_size", [2, 4, 8, 64, 512])
def test_gradients_of_data_parallelism(world_size: int, shapes: Shapes, dtype: torch.dtype) -> None:
    model = [nn.Parameter(p.detach().to(dtype)) for p in parameters(shapes)]
    with world(Layout(data=world_size)) as mesh:
        strategy = DataParallel(undivided(mesh, model), model, torch.float32, ignore)
        one_step(strategy, model)
        assert held_gradients(strategy, model) == bucketed(Gradients(tuple(map(array, model))), Layout(data=world_size))
        strategy.close()


def test_one_process_has_gradients_and_no_buckets() -> None:
    from shoal.distributed.mesh import alone

    model = parameters(MODELS["several buckets"])
    strategy = DataParallel(undivided(alone(torch.device("cpu")), model), model, torch.float32, ignore)
    one_step(strategy, model)
    gradients = Gradients(tuple(map(array, model)))
    assert held_gradients(strategy, model) == bucketed(gradients, Layout()) == whole(gradients.parameters)


@pytest.mark.parametrize("held", [(), (0,), (5, 6, 7), (0, 1, 2, 3), tuple(range(8)), (3, 4, 5)])
def test_gradients_of_exact_mode(held: tuple[int, ...]) -> None:
    model = parameters(MODELS["small"])
    with world(Layout(data=64), rank=3) as mesh:
        strategy = ExactDataParallel(undivided(mesh, model), model, tree(model), ignore)
        for _ in range(2):
            one_step(strategy, model, held)
            for parameter, like in zip(model, parameters(MODELS["small"]), strict=True):
                parameter.grad = torch.zeros_like(like) if parameter.grad is None else parameter.grad
            if held:
                shares = [()] * 3 + [held] + [()] * 60
                assert held_gradients(strategy, model) == exact(Gradients(tuple(map(array, model))), shares, 8, 3)


# ------------------------------------------------------------------------------------------------------------ optimizer

OPTIMIZERS = [
    torch.optim.SGD,
    partial(torch.optim.SGD, momentum=0.9),
    torch.optim.Adam,
    partial(torch.optim.AdamW, amsgrad=True),
    partial(torch.optim.RMSprop, centered=True, momentum=0.5),
    torch.optim.RMSprop,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adadelta,
    torch.optim.Rprop,
    torch.optim.Adagrad,
    torch.optim.ASGD,
]


@pytest.mark.parametrize("make", OPTIMIZERS, ids=str)
def test_state_of_torchs_optimizers(make: Any) -> None:
    model = parameters([(4, 6), (6,), (1,)])
    optimizer = make(model, lr=0.1)
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    found = storage_bytes(v for state in optimizer.state.values() for v in state.values())
    shape = optimizer_shape(optimizer)
    assert shape is not None
    assert found == optimizer_state(map(array, model), shape)


def test_an_optimizer_that_nobody_knows_is_not_guessed() -> None:
    assert state_shape("Adafactor") is None
    assert state_shape("SparseAdam") == StateShape(2, 0)  # its step is a number, and its moments are dense

    class Own(torch.optim.SGD):
        pass

    assert optimizer_shape(Own(parameters([(2,)]), lr=0.1)) is None


def test_zero_1_divides_the_state() -> None:
    arrays = [Array((n,)) for n in (100, 60, 50, 30, 1)]
    parts = list(map(whole, owned(arrays, 3)))
    assert sum(parts) == whole(arrays)
    assert max(parts) == 400


# --------------------------------------------------------------------------------------------------------- fully_shard


def test_what_is_not_trained_is_gathered_and_not_scattered() -> None:
    model = Transformer()
    for parameter in (*model.blocks[0].parameters(), model.blocks[1].get_parameter("mix.weight")):
        parameter.requires_grad_(False)
    with world(Layout(shard=8), rank=5):
        expected, mesh = sharding(model, Case(), 8, 1), init_device_mesh("cpu", (8,), mesh_dim_names=("shard",))
        shard(model, Case(), mesh)
        optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
        meter = MemoryMeter(model, optimizer)
        for _ in range(2):
            with Traffic({"shard": mesh.get_group("shard")}, meter.collective) as traffic:
                meter.start()
                backward(model, Case())
                meter.summed()
                optimizer.step()
                found = meter.stop()
            optimizer.zero_grad()
    assert traffic.volumes == Volumes.of(fully_sharded(expected))
    assert found.gradients == scattered_gradients(expected)
    rows = [cut(array, 5, 8) for unit in expected.units for array in unit if array.trainable]
    assert found.optimizer == optimizer_state(rows, StateShape(2, 4))


# --------------------------------------------------------------------------------------------------------- activations


def saved(model: nn.Module, run: Any) -> int:
    """The peak of what autograd keeps, and that nothing is left."""
    count = SavedTensors()
    count.exclude(model.parameters())
    count.start()
    run()
    peak = count.stop()
    assert count._now == 0
    return peak


def test_a_stack_of_linear_layers_keeps_each_input_once() -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 9), nn.Sigmoid(), nn.Linear(9, 2))
    assert saved(model, lambda: model(torch.ones(5, 6)).sum().backward()) == 5 * (6 + 16 + 9) * 4


@pytest.mark.parametrize("layout", [{"shard": 64}, {"data": 4, "shard": 16}])
def test_what_is_kept_in_a_world_of_64_is_what_the_planner_says(layout: dict[str, int]) -> None:
    """Two samples a rank; what fully_shard gathers for a forward is no activation."""

    def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        return model(batch).float().sum(), 1

    work = Workload(profile(Transformer, loss, lambda n: tokens().repeat(n, 1)[:n].clone(), device="cpu"), 128, 64)
    predicted = predict(Plan().with_sections(layout=layout, shard={"level": "parameters"}), work, cluster(64))
    model = Transformer()
    with world(Layout(**layout), rank=5):
        mesh = init_device_mesh("cpu", (layout.get("data", 1), layout["shard"]), mesh_dim_names=("data", "shard"))
        shard(model, Case(), mesh if "data" in layout else mesh["shard"])
        meter = MemoryMeter(model)
        meter.start()
        backward(model, Case())
        assert meter.stop().activations == predicted.kept_bytes[0]


def test_what_no_backward_lets_go_of_is_freed_with_its_graph() -> None:
    """What an operation keeps of its own output, as tanh does."""
    count = SavedTensors()
    count.start()
    for _ in range(2):
        torch.tanh(torch.ones(4, requires_grad=True)).sum()
    count.stop()
    assert (count.peak, count._now) == (16, 0)


def test_gradients_of_gradients_are_those_without_a_count() -> None:
    def second(x: Tensor) -> Tensor:
        (first,) = torch.autograd.grad((torch.tanh(x) * x).sum(), x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)[0]

    x = torch.linspace(-1, 1, 4).requires_grad_()
    plain = second(x)
    count = SavedTensors()
    count.start()
    counted = second(x)
    count.stop()
    assert torch.equal(counted, plain)


def test_what_was_changed_in_place_is_still_refused() -> None:
    """Under hooks of saved tensors autograd does not look."""
    weight = nn.Parameter(torch.ones(3))
    count = SavedTensors()
    count.start()
    try:
        kept = weight * 2
        loss = (kept * kept).sum()
        kept.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    finally:
        count.stop()


def test_storages_are_counted_once_and_views_as_what_they_keep() -> None:
    x = torch.zeros(10)
    assert storage_bytes([x, x[2:4], x.view(2, 5)]) == 40
    assert storage_bytes([x[2:4], torch.zeros(3, dtype=torch.float64), None, 7]) == 64


def test_no_group_is_left() -> None:
    assert not dist.is_initialized()
