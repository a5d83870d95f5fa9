"""Floors against seconds by hand, and against what operations and plans take."""

from __future__ import annotations

from dataclasses import replace
from operator import mul
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.unit.planner import made
from tests.unit.planner.models import gpus, transformer

from shoal.hardware.values import Cluster, Curve, Device
from shoal.planner.predict.collective_time import Network
from shoal.planner.predict.compute_time import DeviceModel
from shoal.planner.predict.lower_bounds import BlockSize, BlockStates, Floors, PipelineShape, filled, ideal, least_peak
from shoal.planner.predict.workload import Program, Share
from shoal.planner.profile.values import Amount, OperationKind, Phase
from shoal.plans.legal import fits
from shoal.plans.schedule import Action, ActionKind, actions, simulate

ALMOST = 1 + 1e-9


def floors(cluster: Cluster) -> Floors:
    return Floors(DeviceModel(cluster.device), Network(cluster), Program(), made.work(blocks=4).profile.units)


def test_a_floor_lies_below_layers_that_are_cast() -> None:
    device = replace(gpus().device, flops={"bfloat16": 1e12, "float8": 2e12})
    units = made.work(blocks=4).profile.units
    narrow = [replace(o, dtype="bfloat16") for o in units[0].body.operations]
    body = replace(units[0].body, operations=tuple(narrow))
    computer = DeviceModel(device, layers="float8")
    program = Program(layers="float8")
    floor = Floors(computer, Network(made.cluster(8)), program, [replace(units[0], body=body)]).seconds(64.0, 1, 1, 1)
    taken = sum(cost.device for cost in computer.each(body, Share(64.0)))
    assert 0.5 * taken < floor <= taken * ALMOST


def test_the_busiest_rank_has_its_part_and_a_whole_number_of_equal_units() -> None:
    of_blocks = floors(made.cluster(8))
    assert of_blocks.seconds(1.0, 1, 1, 1) == pytest.approx(48e-3)
    assert of_blocks.seconds(5.0, 1, 2, 1) == pytest.approx(5 * 24e-3)
    assert of_blocks.seconds(1.0, 1, 3, 1) == pytest.approx(24e-3)


def test_ranks_of_a_tensor_axis_divide_the_products_and_send_their_sums() -> None:
    each = 12e-3 / 2 + 2 * 4e6 / 1e10
    assert floors(made.cluster(8)).seconds(1.0, 2, 1, 1) == pytest.approx(4 * each)


def test_a_tensor_axis_may_exchange_in_shared_memory() -> None:
    shared = replace(made.LINK, bytes_per_second=1e11)
    each = 12e-3 / 2 + 2 * 4e6 / 1e11
    on = replace(made.cluster(8), algorithms={"process_group": shared})
    assert floors(on).seconds(1.0, 2, 1, 1) == pytest.approx(4 * each)
    apart = replace(on, devices_per_host=1, num_hosts=8, within=None, between=made.LINK)
    assert floors(apart).seconds(1.0, 2, 1, 1) == pytest.approx(4 * (12e-3 / 2 + 2 * 4e6 / 1e10))


def _core(**known: Any) -> Device:
    values: dict[str, Any] = {"kind": "cpu", "memory": Curve(((1e6, 8.0), (1e8, 1.0))), **known}
    return replace(made.DEVICE, **values)


DEVICES = {
    "gpu": replace(gpus().device, sustained=0.74),
    "gpu-float32": replace(gpus().device, flops={"float32": 60e12, "float16": 120e12}, sustained=0.74),
    "core": _core(matmul={"float32": Curve(((1e6, 0.2), (1e9, 0.9)))}, sustained=0.8),
    "core-measured": _core(
        attention_lengths={"flash2_forward": Curve(((64.0, 0.1), (4096.0, 0.5)))},
        operators={"aten.norm": 0.3},
        convolution={"float32": Curve(((1.0, 0.5), (1e3, 1.2)))},
        windows={"float32": {"16-16-3-8-1": 1.5}},
    ),
}


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES.keys())
@pytest.mark.parametrize("share", [Share(1.0), Share(7.0), Share(64.0), Share(8.0, 4), Share(8.0, 3, True)])
def test_no_operation_is_faster_than_its_ideal(device: Device, share: Share) -> None:
    computer = DeviceModel(device)
    operations = [o for unit in transformer(positions=1024, width=512).units for o in unit.body.operations]
    product = operations[3]
    convolution = replace(product, kind=OperationKind.CONVOLUTION, window=(16, 16, 3, 8, 1, 0), winograd=True)
    operations += [convolution, replace(convolution, phase=Phase.BACKWARD_INPUT), replace(convolution, window=())]
    operations += [replace(o, dtype="float32") for o in operations]
    operations += [replace(product, m=Amount(7.0, 3.0), n=Amount(100.0), k=Amount(30.0), flops=Amount(0, 18000.0))]
    for operation in operations:
        taken = computer.operation(operation, share).device
        assert share.samples * ideal(computer, operation) / share.tensor <= taken * ALMOST


def test_a_gpus_ideal_is_what_a_large_product_takes() -> None:
    computer = DeviceModel(DEVICES["gpu"])
    product = replace(made.matmul("x", 8192, 4096, 4096), dtype="bfloat16")
    taken = computer.operation(product, Share(64.0)).device
    assert 64.0 * ideal(computer, product) == pytest.approx(taken, rel=0.03)


# ---------------------------------------------------------------------------------------------------------- its memory


# Bytes, of which there are none or some: nothing holds the smallest numbers that floats have.
def some(most: float) -> st.SearchStrategy[float]:
    return st.just(0.0) | st.floats(0.01, most)


@example(number=10, block=9.625, once=0.0, saved=0.0, pipeline=1, microbatches=1)  # exactly all of the memory
@given(
    number=st.integers(1, 40),
    block=some(30),
    once=some(60),
    saved=some(10),
    pipeline=st.integers(1, 12),
    microbatches=st.integers(1, 20),
)
def test_blocks_are_crowded_where_their_peak_is_above_the_memory(
    number: int, block: float, once: float, saved: float, pipeline: int, microbatches: int
) -> None:
    states, size = BlockStates(number, block, once, 1.25), BlockSize(saved, 3.0)
    peak = least_peak(states, size, pipeline, microbatches, 100.0)
    assert states.is_crowded(size, pipeline, microbatches, 100.0) == (peak > 100.0)
    # No division of the blocks over the ranks needs less on its fullest rank.
    each = [block + min(pipeline - rank, microbatches) * 1.25 * saved for rank in range(pipeline)]
    blocks = [0] * pipeline
    for _ in range(number):
        rank = min(range(pipeline), key=lambda rank: (blocks[rank] + 1) * each[rank])
        blocks[rank] += 1
    fullest = once + 1.25 * 3.0 + max(map(mul, blocks, each))
    assert peak <= max(fullest, 100.0) * ALMOST
    assert fullest > 100.0 or peak <= 100.0


# -------------------------------------------------------------------------------------------------- a pipeline's bound

ONE = st.tuples(st.floats(0.01, 1), st.floats(0.01, 1), st.floats(0.01, 1))  # forward, for inputs, for weights


@given(
    schedule=st.sampled_from(("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")),
    ranks=st.integers(2, 4),
    per=st.integers(1, 3),
    microbatches=st.integers(1, 9),
    data=st.data(),
)
def test_no_division_into_stages_goes_below(
    schedule: str, ranks: int, per: int, microbatches: int, data: st.DataObject
) -> None:
    per = {"gpipe": per, "interleaved_1f1b": per + 1}.get(schedule, 1)
    if not fits(schedule, ranks, microbatches):
        return
    stages = data.draw(st.lists(ONE, min_size=ranks * per, max_size=ranks * per))

    def of(action: Action) -> float:
        forward, inputs, weights = stages[action.stage]
        kinds = {ActionKind.FORWARD: forward, ActionKind.BACKWARD: inputs + weights, ActionKind.BACKWARD_INPUT: inputs}
        return kinds.get(action.kind, weights)

    makespan = simulate(actions(schedule, ranks, per, microbatches), of)[0]
    through = sum(forward + inputs for forward, inputs, _ in stages)
    bound = filled(sum(map(sum, stages)), PipelineShape(schedule, ranks, per, microbatches), through=through)
    assert bound <= makespan * (1 + 1e-9)


def test_equal_stages_wait_for_the_first_microbatch() -> None:
    assert filled(4.0, PipelineShape("1f1b", 1, 1, 3)) == 12.0
    assert filled(4.0, PipelineShape("1f1b", 4, 1, 1)) == 4.0  # one microbatch passes all stages alone
    assert filled(4.0, PipelineShape("zero_bubble", 8, 1, 4), through=2.5) == 2.5
    assert 4.5 < filled(4.0, PipelineShape("1f1b", 4, 1, 4)) <= 7.0  # of which 7 are those of equal stages
