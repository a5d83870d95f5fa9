"""Chains of elementwise operators of a compiled step read and write memory once."""

from dataclasses import replace

from tests.unit.planner.made import DEVICE, block, matmul

from shoal.planner.predict.compute_time import DeviceModel, fused
from shoal.planner.predict.lower_bounds import ideal
from shoal.planner.predict.workload import Share
from shoal.planner.profile.values import NOTHING, Amount, Operation, OperationKind, Phase, TensorCut

ELEMENTS = 1e8


def moves(read: float, written: float, phase: Phase = Phase.FORWARD, cut: TensorCut = TensorCut.NONE) -> Operation:
    read_bytes, written_bytes = Amount(0, read * ELEMENTS), Amount(0, written * ELEMENTS)
    return Operation("o", "", OperationKind.MEMORY, phase, read_bytes=read_bytes, written_bytes=written_bytes, cut=cut)


def test_a_chain_reads_what_it_did_not_write_and_writes_its_end():
    found = fused([moves(1, 1), moves(2, 1), moves(1, 3)])
    assert [operation.launches for operation in found] == [0, 0, 1]
    assert [operation.written_bytes for operation in found] == [NOTHING, NOTHING, Amount(0, 3 * ELEMENTS)]
    assert found[-1].read_bytes == Amount(0, 2 * ELEMENTS)  # the first's, and the second's other operand


def test_products_phases_and_cuts_end_a_chain():
    ends = [matmul("up", 10, 10, 10), moves(1, 1, Phase.BACKWARD_INPUT), moves(1, 1, cut=TensorCut.ALL)]
    for end in ends:
        given = [moves(1, 1), end, moves(1, 1)]
        assert fused(given) == tuple(given)
    norm = replace(moves(1, 1), name="aten.native_batch_norm")
    assert fused([moves(1, 1), norm, moves(1, 1)]) == (moves(1, 1), norm, moves(1, 1))


def test_a_compiled_step_is_faster_on_a_gpu_and_its_bounds_hold():
    body = replace(block(), operations=(moves(1, 1), moves(1, 1), moves(1, 1), *block().operations))

    def seconds(fuses: bool, kind: str = "gpu") -> tuple[float, float]:
        computer = DeviceModel(replace(DEVICE, kind=kind), fuses=fuses)
        least = sum(ideal(computer, o) for o in computer.operations(body))
        return sum(cost.device for cost in computer.each(body, Share(1.0))), least

    eager, compiled = seconds(False), seconds(True)
    assert compiled[0] < eager[0]
    assert compiled[1] <= compiled[0]
    assert seconds(True, kind="cpu") == seconds(False, kind="cpu")
