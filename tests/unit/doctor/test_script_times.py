"""Parts of a script's steps follow from the clocks and traces of its ranks, on a CPU and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.doctor.script_causes import script_causes
from shoal.doctor.script_times import both, joined, profiled_steps, script_times, without

STEP = 100_000.0  # microseconds


def event(name: str, began: float, lasted: float, kind: str = "cpu_op", **arguments: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "pid": 7, "tid": 7, "ts": began, "dur": lasted, "args": arguments}


def cpu_trace(steps: int = 3) -> dict[str, Any]:
    """Steps of 100 ms: 10 of data, 20 of operators, 5 of Python, a backward of 30 and its wait of 25, an update."""
    events = []
    for began in (number * (STEP + 1000.0) for number in range(steps)):
        events += [
            event("shoal:step", began, STEP, "user_annotation"),
            event("shoal:data", began, 10_000.0, "user_annotation"),
            event("aten::mm", began + 10_000.0, 20_000.0),
            event("shoal:backward", began + 35_000.0, 55_000.0, "user_annotation"),
            event("autograd::engine::evaluate_function: MmBackward0", began + 35_000.0, 30_000.0),
            event("aten::mm", began + 35_000.0, 28_000.0),
            event("c10d::allreduce_", began + 63_000.0, 100.0),
            event("aten::add_", began + 63_100.0, 1900.0),
            event("torch.distributed.ddp.reducer::copy_bucket_to_grad", began + 89_900.0, 100.0),
            event("shoal:optimizer", began + 90_000.0, 10_000.0, "user_annotation"),
            event("aten::addcdiv_", began + 92_000.0, 8000.0),
        ]
    return {"traceEvents": events}


SECONDS = {"data": 0.01, "step": 0.0225, "backward": 0.05, "optimizer": 0.01}


def record(rank: int = 0, **more: Any) -> dict[str, Any]:
    """The record of a rank whose clock, without the profiler, measures less of operators and Python."""
    steps = [
        {"seconds": SECONDS, "counts": {"rows": 8, "elements": 80, "backwards": 1}, "profiled": number < 3}
        for number in range(8)
    ]
    optimizer = {"class": "AdamW", "parameters": 4, "elements": 100, "bytes": 400, "sharded": False, "trial": None}
    return {
        "rank": rank,
        "updates": 9,
        "steps": steps,
        "device": "cpu",
        "capability": None,
        "matmul_precision": "highest",
        "threads": 1,
        "cores": 8,
        "loaders": [{"workers": 0, "pinned": False, "persistent": False}],
        "exchanges": {},
        "lines": [["step", True, "train.py:3", 90], ["step", False, "train.py:9", 10]],
        "replicas": [],
        "optimizers": [optimizer],
        **more,
    }


def test_stretches() -> None:
    assert joined([(4, 6), (0, 2), (1, 3)]) == [(0, 3), (4, 6)]
    assert without([(0, 10)], [(2, 3), (5, 20)]) == [(0, 2), (3, 5)]
    assert both([(0, 4), (6, 9)], [(3, 7)]) == [(3, 4), (6, 7)]


def test_a_step_of_a_cpu_is_divided() -> None:
    profile = profiled_steps(cpu_trace())
    assert profile.steps == 2  # the profiler starts in the first one
    assert profile.operators["rest"] == pytest.approx(0.020)
    assert profile.host["rest"] == pytest.approx(0.005)
    assert profile.waits["backward"] == pytest.approx(0.025)
    assert profile.busy[0] == pytest.approx(0.075)
    times = script_times([record(), record(1)], [cpu_trace(), cpu_trace()])
    parts = times.parts[0]
    assert parts["communication"] == pytest.approx(0.025)
    assert parts["kernels"] == pytest.approx(0.0225 * 20 / 25 + 0.025, rel=0.01)
    assert parts["optimizer"] == pytest.approx(0.01)
    assert sum(parts.values()) == pytest.approx(sum(SECONDS.values()))
    first = script_causes(times, "train.py")[0]
    assert (first.cause, round(first.regained * times.run.total, 4)) == ("larger-batch", 0.0125)


def test_a_rank_that_others_wait_for_is_named() -> None:
    late = cpu_trace()
    for one in late["traceEvents"]:  # the rank is late by 24 ms, and so does not wait for the others
        if one["name"].startswith("c10d") or one["name"] == "aten::add_":
            one["ts"] += 24_000.0
    slow = record(1, lines=[["step", False, "train.py:9", 100]])
    causes = script_causes(script_times([record(), slow], [cpu_trace(), late]), "train.py")
    assert (causes[0].cause, causes[0].title) == ("slow rank", "waiting for rank 1")
    assert "ms more in" in causes[0].seen


def gpu_trace() -> dict[str, Any]:
    """Steps of 100 ms: kernels for 40 ms, 20 ms of sums of which 5 are hidden, a read after which the GPU is idle."""
    events = []
    for number in range(3):
        began = number * (STEP + 1000.0)
        events += [
            event("shoal:step", began, STEP, "user_annotation"),
            event("shoal:optimizer", began + 90_000.0, 1000.0, "user_annotation"),
            event("cudaLaunchKernel", began + 90_500.0, 5.0, "cuda_runtime", correlation=number),
            event("sgemm_128x64", began, 40_000.0, "kernel", correlation=100 + number),
            event("ncclDevKernel_AllReduce", began + 35_000.0, 20_000.0, "kernel"),
            event("cudaStreamSynchronize", began + 20_000.0, 35_000.0, "cuda_runtime", correlation=200 + number),
            event("Memcpy HtoD (Pageable -> Device)", began + 80_000.0, 4000.0, "gpu_memcpy"),
            event("adam_kernel", began + 91_000.0, 9000.0, "kernel", correlation=number),
        ]
    return {"traceEvents": events}


def test_a_step_of_a_gpu_is_divided() -> None:
    device = profiled_steps(gpu_trace()).device
    expected = {"communication": 0.015, "kernels": 0.044, "optimizer": 0.009, "host": 0.032, "dry": 0.025}
    for name, seconds in expected.items():
        assert device[name] == pytest.approx(seconds), name
    on_gpu = record(device="NVIDIA H100", capability=[9, 0])
    times = script_times([on_gpu], [gpu_trace()])
    assert sum(times.parts[0].values()) == pytest.approx(sum(SECONDS.values()))
    causes = {one.cause: one for one in script_causes(times, "train.py")}
    assert {"tf32", "pinned", "read backs"} <= set(causes)
    assert causes["tf32"].seconds == pytest.approx(0.04)
