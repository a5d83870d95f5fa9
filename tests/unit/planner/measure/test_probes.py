"""Probes say truly how much work they do, and which are worth trying."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from shoal.distributed.mesh import Mesh
from shoal.planner.measure.probes import Call, Probe, exchanges, probes, sample
from shoal.planner.measure.worker import Budget
from shoal.plans.plan import Layout

CPU = torch.device("cpu")
SMALL = [
    probe
    for probe in probes(CPU, quick=False)
    if probe.name.split(".")[0] in ("matmul", "window") and probe.work < 3e8 and "float32" in probe.name
]


@pytest.mark.parametrize("probe", SMALL, ids=lambda p: f"{p.name}-{p.place:g}")
def test_the_work_is_what_torch_counts(probe: Probe) -> None:
    call = probe.make()
    with FlopCounterMode(display=False) as counter:
        call()
    assert counter.get_total_flops() == probe.work


def test_probes_of_a_name_grow() -> None:
    found = list(probes(CPU, quick=False))
    for a, b in pairwise(found):
        assert a.name != b.name or a.place < b.place
    assert {p.name for p in probes(CPU, quick=True)} == {p.name for p in found}


def test_samples_are_seconds_of_one_call() -> None:
    calls = []
    probe = Probe("p", 1.0, lambda: lambda: calls.append(1))
    seconds, least = sample(probe, CPU, 1e-3)
    assert seconds
    assert all(0 <= s < 1 for s in (*seconds, least))
    assert len(calls) > len(seconds)


def test_calls_whose_operands_are_to_be_cold_take_turns() -> None:
    made: list[int] = []
    called: list[int] = []

    def make() -> Call:
        made.append(len(made))
        return lambda number=made[-1]: called.append(number)

    sample(Probe("p", 1.0, make, operand_bytes=1 << 21), CPU, 1e-3)
    assert made == [0, 1, 2, 3]
    assert called[:9] == [0, 1, 2, 3, 0, 1, 2, 3, 0]


def test_what_would_take_too_long_is_not_tried() -> None:
    budget = Budget(total_seconds=4.0, rounds=1, num_probes=10)
    small, middle, large = (Probe("matmul", work, lambda: lambda: None) for work in (1e6, 1e8, 1e10))
    other = Probe("stream", 1e12, lambda: lambda: None)
    assert budget.allows(large)
    budget.note(small, 1e-3)
    budget.note(middle, 0.1)  # 1 ns a unit: the large one would take 10 s
    assert budget.allows(middle)
    assert not budget.allows(large)
    assert budget.allows(other)


def test_a_latency_is_not_taken_for_a_rate() -> None:
    budget = Budget(total_seconds=4.0, rounds=1, num_probes=10)
    tiny, small, large = (Probe("send", work, lambda: lambda: None) for work in (1e3, 1e5, 1e8))
    budget.note(tiny, 1e-3)
    budget.note(small, 1.01e-3)
    assert budget.allows(large)


def test_only_who_sends_or_receives_is_asked_how_long_it_took() -> None:
    mesh = Mesh(Layout(data=4), 3, CPU, "host")
    taking_part = {probe.name.split(".")[1]: probe.ranks for probe in exchanges(mesh, quick=True)}
    assert taking_part == {"all_reduce": 4, "all_gather": 4, "reduce_scatter": 4, "send": 2}
