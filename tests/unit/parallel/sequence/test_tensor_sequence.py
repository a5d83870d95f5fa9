"""What a model that is cut over a tensor axis sends, held against the formulas: one process of 63."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from examples.models import GPT
from tests.unit.planner.worlds import world
from torch import Tensor, nn

from shoal.distributed.traffic_meter import Traffic
from shoal.parallel.axis_collectives import TensorAxis
from shoal.parallel.model.trial import ModelTrial
from shoal.parallel.sequence.tensor_sequence import FeatureStream, PairByPositions, SequenceBlock, SequencePlan
from shoal.parallel.tensor.heads import with_sliced
from shoal.parallel.tensor.plan import TensorPlan, decide, follow
from shoal.parallel.tensor.tensor_parallel import apply
from shoal.plans.accounting.collectives import Volume, Volumes
from shoal.plans.accounting.model_parallel import LayerPair, Positions, sharded_loss, stream, tensor_parallel
from shoal.plans.plan import Layout

ROWS, LENGTH, WIDTH, VOCABULARY, BLOCKS, DEGREE = 2, 9, 16, 256, 3, 3
HIDDEN = ROWS * LENGTH * WIDTH * 4
PAIRS = [LayerPair(HIDDEN, HIDDEN)] * (2 * BLOCKS)
# The head's input, and the outputs of two embeddings, of tokens and of places.
EDGES = [LayerPair(HIDDEN, 0), *(LayerPair(0, size, input_needs_gradient=False) for size in (HIDDEN, HIDDEN // ROWS))]


def batch() -> tuple[Tensor, Tensor]:
    found = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return found[:, :-1], found[:, 1:]


def loss(model: nn.Module, given: Any) -> Tensor:
    return F.cross_entropy(model(given[0]).flatten(0, 1), given[1].flatten(), label_smoothing=0.1)


def squares(model: nn.Module, given: Any) -> Tensor:
    out: Tensor = model(given[0]).square().sum()
    return out


def made() -> nn.Module:
    return GPT(layers=BLOCKS, width=WIDTH, heads=4, block=LENGTH)


@pytest.fixture(scope="module")
def planned() -> tuple[nn.Module, TensorPlan]:
    torch.manual_seed(0)
    model = made()
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    subject = ModelTrial(model, loss, batch(), lambda name: values[name].detach())
    trace = follow(model, loss, subject.batch, subject.values, DEGREE)
    return model, with_sliced(decide(model, trace, subject.values, DEGREE), subject, trace, DEGREE)


def sent(planned: tuple[nn.Module, TensorPlan], function: Any, sequence: bool = False) -> Traffic:
    """Forward and backward twice, as two microbatches, on rank 5 of 63."""
    template, plan = planned
    assert len(plan.pairs) == 2 * BLOCKS
    assert plan.sliced == ("head",)
    with world(Layout(data=21, tensor=DEGREE), rank=5) as mesh:
        model = made()
        model.load_state_dict(template.state_dict())
        axis = TensorAxis.of(mesh)
        apply(model, plan, axis)
        if sequence:
            SequencePlan(blocks(), ()).apply(model, axis)
        with Traffic(mesh.groups) as traffic:
            for _ in range(2):
                function(model, batch()).backward()
    return traffic


def blocks() -> dict[str, SequenceBlock]:
    """What the proof finds on real ranks, whose numbers mean something."""
    attention = tuple(f"attention.{name}" for name in ("query", "key", "value"))
    pairs = (PairByPositions(attention, "attention.out"), PairByPositions(("up",), "down"))
    last = BLOCKS - 1
    found = SequenceBlock(True, True, (0, 0), (), pairs, ())
    return {f"blocks.{i}": replace(found, opens=i == 0, closes=i == last) for i in range(BLOCKS)}


def test_pairs_and_a_sharded_loss(planned: tuple[nn.Module, TensorPlan]) -> None:
    expected = Volumes.of(tensor_parallel([*PAIRS, *EDGES], [], 2), sharded_loss(ROWS * LENGTH, 2, smoothed=True))
    assert sent(planned, loss).volumes == expected


def test_logits_that_are_asked_for(planned: tuple[nn.Module, TensorPlan]) -> None:
    widest = -(-VOCABULARY // DEGREE)
    expected = Volumes.of(tensor_parallel([*PAIRS, *EDGES], [DEGREE * ROWS * LENGTH * widest * 4], 2))
    assert sent(planned, squares).volumes == expected


def test_parts_of_sequences(planned: tuple[nn.Module, TensorPlan]) -> None:
    """Nine positions on three ranks: three each."""
    positions = Positions(LENGTH, DEGREE)
    assert positions.padded(HIDDEN) == HIDDEN
    assert Positions(LENGTH, 4).padded(HIDDEN) == HIDDEN // 9 * 12
    expected = Volumes.of(
        tensor_parallel(PAIRS, [], 2, positions=positions),
        tensor_parallel(EDGES, [], 2),
        [stream(HIDDEN, positions, 2)],
        sharded_loss(ROWS * LENGTH, 2, smoothed=True),
    )
    assert sent(planned, loss, sequence=True).volumes == expected


def test_as_many_bytes_travel_by_positions_as_in_whole_sums() -> None:
    """A ring's all-reduce is a reduce-scatter and an all-gather."""
    plain = Volumes.of(tensor_parallel(PAIRS, [], 1))
    parts = Volumes.of(tensor_parallel(PAIRS, [], 1, positions=Positions(12, 4)))
    assert plain["tensor", "all_reduce"] == Volume(4 * BLOCKS, 4 * BLOCKS * HIDDEN)
    assert sum(v.bytes for v in parts.values()) == 2 * plain["tensor", "all_reduce"].bytes * 1


def test_a_copy_has_a_stream_of_its_own() -> None:
    import copy

    pair = [FeatureStream(TensorAxis(2, 0))] * 2
    first, second = copy.deepcopy(pair)
    assert first is second
    assert first is not pair[0]
