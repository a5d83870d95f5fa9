"""When units of pipeline stages are gathered and scattered: one process, of a world in which the others say nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.unit.planner.worlds import Transformer, world
from tests.usual import needs_zero23
from torch import Tensor

from shoal.distributed.mesh import Mesh
from shoal.distributed.traffic_meter import Traffic
from shoal.numerics.precision import Precision
from shoal.parallel.pipeline.stage_units import StageUnits
from shoal.parallel.shard.zero23 import rows, shard
from shoal.plans.plan import Layout, Plan
from shoal.plans.schedule import Action, ActionKind

pytestmark = needs_zero23()
LAYOUT = Layout(shard=2)
TOKENS = torch.zeros(1, 4, dtype=torch.int64)


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    with world(LAYOUT) as found:
        yield found


def units(mesh: Mesh, model: Transformer, *, keep: bool = False, late: bool = False) -> StageUnits:
    """Two stages on this rank: the first two blocks, and what is left."""
    plan = Plan().with_sections(layout={"shard": 2}, shard={"level": "gradients" if keep else "parameters"})
    shard(model, plan, mesh, Precision.of(plan.precision, mesh.device))
    names = [name for name, _ in model.named_parameters()]
    first = {name for name in names if name.startswith(("blocks.0", "blocks.1"))}
    return StageUnits(model, {0: first, 1: set(names) - first}, keep=keep, late=late)


def compute(model: Transformer, found: StageUnits, microbatches: int) -> list[int]:
    """The second stage's block, each microbatch forward and backward; messages of the shard axis after each."""
    own = [Action(kind, 1, m) for m in range(microbatches) for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)]
    counts = []
    with Traffic({"shard": torch.distributed.group.WORLD}) as traffic:
        found.begin(tuple(own))
        for action in own:
            if action.kind is ActionKind.FORWARD:
                with found.forward(1) as leave:
                    unit = found.inner["blocks.2"]
                    args, _ = unit.enter((torch.ones(1, 4, 12, requires_grad=True),), {})
                    out: Tensor = model.blocks[2](*args)
                    unit.leave(out)
                    total = model.head(model.norm(out)).sum()
                    leave(total)
            else:
                with found.action(action):
                    total.backward()
            counts.append(sum(volume.messages for volume in traffic.volumes.values()))
        found.end()
    return counts


def test_a_stage_uses_its_own_units_only(mesh: Mesh) -> None:
    found = units(mesh, Transformer())
    assert [unit.name for unit in found.of(0)] == ["blocks.0", "blocks.1"]
    assert [unit.name for unit in found.of(1)] == ["blocks.2", ""]


def test_a_stub_gathers_nothing(mesh: Mesh) -> None:
    model = Transformer()
    units(mesh, model)
    with Traffic() as traffic, pytest.raises(RuntimeError, match="DTensor"):
        model(TOKENS)  # a call of the module by itself is not one of a stage
    assert traffic.volumes == {}


def test_each_forward_and_backward_gathers_and_each_backward_scatters(mesh: Mesh) -> None:
    model = Transformer()
    found = units(mesh, model)
    assert compute(model, found, 2) == [2, 2 + 4, 2 + 4 + 2, 2 + 4 + 2 + 4]
    assert all(unit.group.is_sharded for unit in found.units)


def test_what_is_kept_is_gathered_once_until_the_last_backward(mesh: Mesh) -> None:
    model = Transformer()
    assert compute(model, units(mesh, model, keep=True), 2) == [2, 4, 4, 6]


def test_late_gradients_are_scattered_with_the_last_microbatch(mesh: Mesh) -> None:
    model = Transformer()
    assert compute(model, units(mesh, model, late=True), 2) == [2, 4, 6, 10]
    assert model.head.weight.grad is not None


def test_weights_in_turn_gather_and_scatter_each_unit_once(mesh: Mesh) -> None:
    model = Transformer()
    found = units(mesh, model)
    compute(model, found, 1)
    block, own = (unit.weights() for unit in found.of(1))
    with Traffic() as traffic:
        for unit in found.of(1):
            unit.group.reduce_grads = True
        turns = found.turns(1, [[block[0]], [own[0]], block[1:]])
        messages = []
        for _ in range(4):
            next(turns)
            messages.append({kind: volume.messages for (_, kind), volume in traffic.volumes.items()})
    # The block stays gathered until the third group, its last; what else there is is scattered after the second.
    assert messages[0] == {"all_gather": 1}
    assert messages[1] == {"all_gather": 2}
    assert messages[2] == {"all_gather": 2, "reduce_scatter": 1}
    assert messages[3] == {"all_gather": 2, "reduce_scatter": 2}


@pytest.mark.parametrize(("shape", "mine"), [((5, 2), (3, 2)), ((1,), (1,)), ((), ())])
def test_rows_of_what_another_stage_holds(mesh: Mesh, shape: tuple[int, ...], mine: tuple[int, ...]) -> None:
    assert rows(mesh, shape) == mine
