"""Small profiles, devices and clusters, made by hand, whose costs can be told in the head."""

from __future__ import annotations

from dataclasses import replace

from shoal.hardware.values import Cluster, Curve, Device, Link
from shoal.planner.predict.step_time import Predictor
from shoal.planner.predict.workload import Prediction, Program, Workload
from shoal.planner.profile.values import (
    Amount,
    Body,
    Exchange,
    Operation,
    OperationKind,
    Phase,
    Profile,
    TensorCut,
    Unit,
    Weight,
)
from shoal.plans.plan import Plan

# 1 TFLOP/s and 1 TB/s without any waste; a matmul of 1e9 multiply-adds takes 2 ms.
DEVICE = Device(
    name="made",
    kind="gpu",
    memory_bytes=10**9,
    memory_bytes_per_second=1e12,
    flops={"float32": 1e12},
)
# 10 GB/s, and nothing for a hop or a call.
LINK = Link("made", bytes_per_second=1e10, latency_seconds=0.0)


def cluster(devices: int, hosts: int = 1, device: Device = DEVICE, link: Link = LINK) -> Cluster:
    return Cluster("made", device, devices, hosts, link, replace(link, bytes_per_second=1e9))


def matmul(
    name: str, m: float, n: float, k: float, phase: Phase = Phase.FORWARD, cut: TensorCut = TensorCut.NONE
) -> Operation:
    """m rows a sample."""
    flops = Amount(0, 2 * m * n * k)
    return Operation(name, name, OperationKind.MATMUL, phase, flops, m=Amount(0, m), n=Amount(n), k=Amount(k), cut=cut)


def block(width: int = 1000, cut: bool = True) -> Body:
    """Two matmuls of 1000 rows a sample, and their backward: at width 1000 12e9 FLOPs, 8 MB of weights, 8 MB saved."""
    first, second = (TensorCut.N, TensorCut.K) if cut else (TensorCut.NONE, TensorCut.NONE)
    operations = [
        replace(matmul("up", 1000, width, width, cut=first), saved_bytes=Amount(0, 4000 * width)),
        replace(matmul("down", 1000, width, width, cut=second), saved_bytes=Amount(0, 4000 * width)),
        *(
            matmul(n, 1000, width, width, Phase.BACKWARD_INPUT, c)
            for n, c in (("down.dx", TensorCut.N), ("up.dx", TensorCut.K))
        ),
        *(
            replace(matmul(n, 1000, width, width, Phase.BACKWARD_WEIGHT, c), m=Amount(width), k=Amount(0, 1000))
            for n, c in (("down.dw", TensorCut.N), ("up.dw", TensorCut.M))
        ),
    ]
    if not cut:
        operations = [replace(o, cut=TensorCut.NONE) for o in operations]
    whole = Amount(0, 4000 * width)
    return Body(
        operations=tuple(operations),
        weights=(Weight("up", (width, width), tensor_dim=0), Weight("down", (width, width), tensor_dim=1)),
        exchanges=(Exchange("all_reduce", Phase.FORWARD, whole), Exchange("all_reduce", Phase.BACKWARD_INPUT, whole)),
        input_bytes=whole,
        output_bytes=whole,
        repeated=True,
    )


def work(blocks: int = 4, batch: int = 8, body: Body | None = None) -> Workload:
    """So many equal blocks on a global batch of as many grains."""
    shared = body or block()
    units = tuple(Unit(f"blocks.{i}", shared) for i in range(blocks))
    return Workload(Profile(units, optimizer_passes=0.0, heads=4), batch, batch)


def flat(value: float) -> Curve:
    return Curve(((1.0, value),))


def predict(plan: Plan, work: Workload, cluster: Cluster, program: Program | None = None) -> Prediction:
    """What a step of one plan takes."""
    return Predictor(work, cluster, program).predict(plan)
