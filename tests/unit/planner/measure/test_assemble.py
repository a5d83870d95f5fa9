"""From samples to a cluster: what is made of them predicts them again."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from shoal.hardware import device as catalogued
from shoal.hardware.values import Cluster, Device, Link
from shoal.planner.measure.assemble import Measured, Quantiles, algorithms_of, device_of, divided_of, link_of, table
from shoal.planner.predict.collective_time import Network

CPU = {"kind": "cpu", "threads": 1, "torch": "2", "resident_bytes": 200}


def row(name: str, work: float, *seconds: float, size: float = 0.0) -> dict[str, Any]:
    return {"name": name, "work": work, "size": size or work, "seconds": list(seconds)}


def measured(*rows: dict[str, Any], ranks: int = 1, facts: dict[str, Any] = CPU) -> Measured:
    return Measured.of([{"facts": facts, "rows": rows}] * ranks)


def test_spread() -> None:
    spread = Quantiles.of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (spread.least, spread.quartile, spread.median, spread.p90, spread.count) == (1.0, 2.0, 3.0, 4.0, 5)
    assert Quantiles.of([7.0]) == Quantiles(7.0, 7.0, 7.0, 7.0, 1)


def test_ranks_and_rounds_are_pooled() -> None:
    found = measured(row("stream", 8.0, 1.0, 9.0), row("stream", 8.0, 1.5), ranks=2)
    assert found.spreads["stream", 8.0].count == 6
    assert table(found) == {"stream 8": [1.0, 1.0, 1.5, 9.0, 6]}


DEVICE_ROWS = (
    row("overhead.stream", 1.0, 1e-6),
    row("overhead.matmul", 1.0, 2e-6),
    row("dispatch", 32.0, 160e-6),
    row("matmul.float32", 1e6, 102e-6),  # 1e10 a second beside 2 us
    row("matmul.float32", 1e9, 50e-3 + 2e-6),  # 2e10
    row("convolution.float32", 1e6, 100e-6 + 2e-6, size=5.0),
    row("convolution.float32_backward_input", 1e6, 200e-6 + 2e-6, size=5.0),
    row("stream", 1e6, 50e-6 + 1e-6),
    row("stream", 1e7, 1e-3 + 1e-6),
    row("stream", 2e8, 40e-3 + 1e-6),
    row("attention.float32.forward", 2e9, 0.2, size=64),
    row("attention.float32.both", 7e9, 0.2 + 0.5, size=64),
    row("attention.float32.forward", 4e9, 0.25, size=128),
    row("attention.float32.both", 14e9, 0.25 + 1.0, size=128),
    row("window.float32_backward_weight:64-64-3-28-1", 1e6, 400e-6 + 2e-6),
    row("operator.aten.gelu", 1e6, 200e-6 + 1e-6),
    row("step", 10.0, 500e-6 + 50e-6, size=2),  # ten operators of 5 us, and 10 us for each of two parameters
    row("step", 100.0, 980e-6 + 500e-6, size=50),
)


def test_memory_of_a_rank_alone_is_no_slower_than_beside_others() -> None:
    alone = (row("alone", 1e7, 0.5e-3 + 1e-6), row("alone", 2e8, 80e-3 + 1e-6))
    found = device_of(measured(*DEVICE_ROWS, *alone), "core", 1000, "here")
    assert found.memory_alone is not None
    assert [round(found.memory_alone.at(size), 3) for size in (1e7, 2e8)] == [2.0, 0.5]
    assert device_of(measured(*DEVICE_ROWS), "core", 1000, "here").memory_alone is None


def test_a_cpu() -> None:
    found = device_of(measured(*DEVICE_ROWS), "core", 1000, "here")
    assert math.isclose(found.flops["float32"], 2e10, rel_tol=1e-9)
    assert math.isclose(found.matmul["float32"].at(1e6), 0.5, rel_tol=1e-3)
    assert found.convolution["float32"].points == ((5.0, 0.5),)
    assert found.convolution["float32_backward_input"].points == ((5.0, 0.25),)
    assert math.isclose(found.memory_bytes_per_second, 1e10, rel_tol=1e-9)  # of 10 MB, not of the page faults of 200
    assert [round(found.memory.at(size), 3) for size in (1e6, 1e7, 2e8)] == [2.0, 1.0, 0.5]
    assert math.isclose(found.dispatch_seconds, 5e-6)
    assert found.launch_seconds == found.dispatch_seconds
    assert found.attention == {}
    lengths = found.attention_lengths
    assert [lengths["flash2_forward"].at(n) for n in (64, 128)] == [0.5, 0.8]
    assert [lengths["flash2_backward"].at(n) for n in (64, 128)] == [0.5, 0.5]
    assert found.windows == {"float32_backward_weight": {"64-64-3-28-1": 0.125}}
    assert found.operators == {"aten.gelu": 0.5}
    assert math.isclose(found.tensor_seconds, 10e-6)
    assert math.isclose(found.step_seconds, 480e-6)
    assert (found.reserved_bytes, found.memory_bytes, found.host_bytes_per_second) == (200, 1000, 0.0)
    assert set(found.sources.values()) == {"here"}


def test_a_known_gpu_keeps_its_peaks_and_price() -> None:
    facts = {"kind": "gpu", "threads": 8, "torch": "2", "resident_bytes": 5, "multiprocessors": 132}
    rows = (
        row("matmul.bfloat16", 1e9, 100e-6),  # small: what its tiles waste is the planner's
        row("matmul.bfloat16", 1e12, 1e12 / (0.5 * 989.4e12)),
        row("stream", 1e9, 1e-3),
        row("launch", 1.0, 2e-6),
        row("dispatch", 32.0, 320e-6),
        row("host_copy", 1e6, 1e-3),
    )
    known = catalogued("H100")
    found = device_of(measured(*rows, facts=facts), "NVIDIA H100", 7, "here", known=known)
    assert found.flops == known.flops
    assert found.matmul["bfloat16"].points == ((1e12, 0.5),)
    assert found.matmul["float8"] == known.matmul["float8"]
    assert (found.launch_seconds, found.dispatch_seconds) == (2e-6, 1e-5)
    assert math.isclose(found.host_bytes_per_second, 1e9)
    assert (found.name, found.memory_bytes, found.price_per_hour) == (known.name, 7, known.price_per_hour)
    assert found.sources["launch_seconds"] == "here"
    assert found.sources["flops"] == known.sources["flops"]
    alone = device_of(measured(*rows, facts=facts), "NVIDIA Q", 7, "here")
    assert math.isclose(alone.flops["bfloat16"], 0.5 * 989.4e12)


@pytest.mark.parametrize("n", [2, 4])
def test_a_link_predicts_what_was_measured(n: int) -> None:
    latency, call, rate = 50e-6, 100e-6, 2e9
    sizes = (1e3, 1e6, 1e8)
    truth = {
        "all_reduce": lambda size: call + 2 * (n - 1) * (latency + size / n / rate),
        "all_gather": lambda size: call + (n - 1) * (latency + size / n / (rate / 2)),
        "reduce_scatter": lambda size: call + (n - 1) * (latency + size / n / rate),
        "send": lambda size: 2 * (latency + size / rate),  # there and back
    }
    rows = [row(f"exchange.{kind}", size, seconds(size)) for kind, seconds in truth.items() for size in sizes]
    link = link_of(measured(*rows, ranks=n), "gloo", "here")
    assert isinstance(link, Link)
    assert math.isclose(link.latency_seconds, latency, rel_tol=0.05)
    assert math.isclose(link.call_seconds, call, rel_tol=0.1)
    for size in sizes[1:]:
        hops = link.call_seconds + 2 * (n - 1) * link.latency_seconds
        moved = 2 * (n - 1) / n * size / link.reached("all_reduce", size, n)
        assert math.isclose(hops + moved, truth["all_reduce"](size), rel_tol=0.01)
        hops = link.call_seconds + (n - 1) * link.latency_seconds
        moved = (n - 1) / n * size / link.reached("all_gather", size, n)
        assert math.isclose(hops + moved, truth["all_gather"](size), rel_tol=0.01)


def test_a_lone_rank_has_no_link() -> None:
    assert link_of(measured(*DEVICE_ROWS), "none", "here") is None


def test_an_algorithm_predicts_what_was_measured() -> None:
    def truth(size: float) -> float:
        return 50e-6 + size / 4e9

    rows = [row("algorithm.shared_memory", size, truth(size)) for size in (1e3, 1e6, 1e8)]
    (found,) = algorithms_of(measured(*rows, ranks=2), "here").items()
    assert found[0] == "shared_memory"
    for size in (1e6, 1e8):
        assert math.isclose(found[1].sum_seconds(size, 2), truth(size), rel_tol=0.01)
    assert algorithms_of(measured(*DEVICE_ROWS), "here") == {}


def test_a_process_group_has_a_link_of_its_own() -> None:
    rates = {"all_reduce": 2e9, "all_gather": 8e9, "reduce_scatter": 4e9}
    rows = [row(f"group.{kind}", size, 50e-6 + size / rate) for kind, rate in rates.items() for size in (1e3, 1e6, 1e8)]
    found = algorithms_of(measured(*rows, ranks=2), "here")
    assert list(found) == ["process_group"]
    network = Network(Cluster("here", Device("core", "cpu", 1, 1.0, {}), 2, within=found["process_group"]))
    for kind, rate in rates.items():
        seconds = network.seconds(kind, 1e8, network.group(2, 1))
        assert math.isclose(seconds, 50e-6 + 1e8 / rate, rel_tol=0.01)


def test_the_engines_own_time_leaves_out_what_is_counted_as_sums() -> None:
    rows = (*DEVICE_ROWS, row("algorithm.shared_memory", 1e3, 80e-6))
    assert math.isclose(device_of(measured(*rows, ranks=2), "core", 1000, "here").step_seconds, 400e-6)


def test_the_engines_own_time_on_an_axis_leaves_out_what_is_counted_as_exchanges() -> None:
    # An operator starts in 5 us, an exchange in 100 + 2 x 10 us in the host's link, 40 + 1 x 10 us in the group's.
    steps = (row("step", 5.0, 1000e-6 + 5 * 5e-6, size=8), row("step", 101.0, 5000e-6 + 101 * 5e-6, size=48))
    host, group = (Link("a link", 1e9, 10e-6, call) for call in (100e-6, 40e-6))
    found = divided_of(measured(*steps, ranks=2), "shard", 5e-6, host, group)
    # 100 us a parameter, of which each block of four has three exchanges; three small sums beside.
    assert math.isclose(found["tensor_seconds"], 100e-6 - 0.75 * 50e-6)
    assert found["step_seconds"] == 0.0  # 200 us of a step without parameters are less than those sums
    pipeline = divided_of(measured(*steps, ranks=2), "pipeline", 5e-6, replace(host, call_seconds=0.0), group)
    assert math.isclose(pipeline["tensor_seconds"], 100e-6)
    assert math.isclose(pipeline["step_seconds"], 200e-6 - 3 * 20e-6 - 4 * 10e-6)
    assert found["reserved_bytes"] == 200
