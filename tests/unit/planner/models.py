"""Profiles and clusters by hand, for tests of what uses them."""

from __future__ import annotations

from dataclasses import replace

from shoal.hardware.values import Cluster, Curve, Device, Link
from shoal.planner.profile.values import (
    Amount,
    Body,
    Dispatch,
    Exchange,
    Operation,
    OperationKind,
    Phase,
    Profile,
    TensorCut,
    Unit,
    Weight,
)
from shoal.plans.legal import ModelFacts


def _linear(name: str, positions: int, sizes: tuple[int, int], cut: TensorCut) -> list[Operation]:
    """A linear layer over `positions` of each sample, forward and backward: in x out."""
    k, n = sizes
    flops, saved = Amount(per_sample=2.0 * positions * k * n), Amount(per_sample=2.0 * positions * k)
    m, read, written = (
        Amount(per_sample=positions),
        Amount(2.0 * k * n, 2.0 * positions * k),
        Amount(0, 2.0 * positions * n),
    )
    back = {TensorCut.N: TensorCut.K, TensorCut.K: TensorCut.N}.get(cut, cut)
    shared = {"name": "aten.mm", "module": name, "kind": OperationKind.MATMUL, "flops": flops, "dtype": "bfloat16",
              "rows": ("k", "n")}  # fmt: skip
    moved = {"read_bytes": read, "written_bytes": written}
    return [
        Operation(**shared, **moved, phase=Phase.FORWARD, m=m, n=Amount(n), k=Amount(k), saved_bytes=saved, cut=cut,
                  selected_bytes=saved),
        Operation(**shared, **moved, phase=Phase.BACKWARD_INPUT, m=m, n=Amount(k), k=Amount(n), cut=back),
        Operation(**{**shared, "rows": ("m", "n")}, **moved, phase=Phase.BACKWARD_WEIGHT, m=Amount(k), n=Amount(n), k=m,
                  cut={TensorCut.N: TensorCut.N, TensorCut.K: TensorCut.M}.get(cut, cut)),
    ]  # fmt: skip


def _elementwise(positions: int, width: int, cut: TensorCut) -> list[Operation]:
    moved = Amount(per_sample=8.0 * positions * width)
    return [
        Operation("aten.norm", "norm", OperationKind.MEMORY, phase, read_bytes=moved, written_bytes=moved, cut=cut,
                  saved_bytes=Amount(per_sample=4.0 * positions * width) if phase is Phase.FORWARD else Amount())
        for phase in (Phase.FORWARD, Phase.BACKWARD_INPUT)
    ]  # fmt: skip


def _attention(positions: int, width: int) -> list[Operation]:
    flops = 2.0 * positions * positions * width
    moved = Amount(per_sample=8.0 * positions * width)
    return [
        Operation("attention", "attention", OperationKind.ATTENTION, phase, flops=Amount(per_sample=flops * times),
                  cut=TensorCut.ALL, read_bytes=moved, written_bytes=moved, n=Amount(positions), k=Amount(128),
                  dtype="bfloat16",
                  saved_bytes=Amount(per_sample=8.0 * positions * width) if times == 1 else Amount())
        for phase, times in ((Phase.FORWARD, 1), (Phase.BACKWARD_INPUT, 2.5))
    ]  # fmt: skip


def transformer(layers: int = 32, width: int = 4096, ffn: int = 14336, vocabulary: int = 128256, positions: int = 8192,
                heads: int = 32) -> Profile:  # fmt: skip
    """A decoder in bfloat16 with Adam; the defaults are those of an 8-billion model."""
    stream = Amount(per_sample=2.0 * positions * width)
    operations = [
        *_elementwise(positions, width, TensorCut.SEQUENCE),
        *_linear("qkv", positions, (width, width * 3 // 2), TensorCut.N),
        *_attention(positions, width),
        *_linear("out", positions, (width, width), TensorCut.K),
        *_elementwise(positions, width, TensorCut.SEQUENCE),
        *_linear("up", positions, (width, 2 * ffn), TensorCut.N),
        *_linear("down", positions, (ffn, width), TensorCut.K),
    ]
    weights = (
        Weight("qkv", (width * 3 // 2, width), tensor_dim=0),
        Weight("out", (width, width), tensor_dim=1),
        Weight("up", (2 * ffn, width), tensor_dim=0),
        Weight("down", (width, ffn), tensor_dim=1),
    )
    exchanges = tuple(Exchange("all_reduce", phase, stream) for phase in (Phase.FORWARD, Phase.BACKWARD_INPUT) * 2)
    block = Body(tuple(operations), weights, exchanges, stream, stream, repeated=True)
    embedding = Body((), (Weight("embedding", (vocabulary, width)),), output_bytes=stream)
    head = Body(
        tuple(_linear("head", positions, (width, vocabulary), TensorCut.N)),
        (Weight("head", (vocabulary, width), tensor_dim=0),),
        input_bytes=stream,
    )
    units = [Unit("embedding", embedding), *(Unit(f"blocks.{i}", block) for i in range(layers)), Unit("head", head)]
    return Profile(tuple(units), sample_bytes=8 * positions, heads=heads)


def mixture(dense: Profile, experts: int = 4, chosen: int = 2) -> Profile:
    """The same decoder with so many experts in place of each MLP, of which so many compute each token."""
    block = next(unit.body for unit in dense.units if unit.body.repeated)

    def rows(amount: Amount) -> Amount:
        return Amount(amount.fixed * experts, amount.per_sample * chosen)

    def size(amount: Amount) -> Amount:
        return Amount(amount.fixed, amount.per_sample * chosen / experts)

    operations = [
        replace(
            one, of_experts=True, cut=TensorCut.NONE, name="aten._grouped_mm", batch=Amount(experts),
            flops=rows(one.flops), read_bytes=rows(one.read_bytes), written_bytes=rows(one.written_bytes),
            saved_bytes=rows(one.saved_bytes), selected_bytes=rows(one.selected_bytes),
            m=size(one.m), n=one.n, k=size(one.k),
        ) if one.module.partition(".")[0] in ("up", "down") else one
        for one in block.operations
    ]  # fmt: skip
    weights = [
        Weight(w.name, (experts, *w.shape), of_experts=True) if w.name in ("up", "down") else w for w in block.weights
    ]
    sent = Dispatch(rows(Amount(per_sample=block.output_bytes.per_sample)), experts, chosen)
    divided = replace(block, operations=tuple(operations), weights=tuple(weights), dispatches=(sent,))
    return replace(
        dense, units=tuple(replace(unit, body=divided if unit.body is block else unit.body) for unit in dense.units)
    )


def facts(grains: int, layers: int = 32, heads: int = 32, positions: int = 8192, grain_size: int = 1) -> ModelFacts:
    """What a layout has to fit of such a decoder."""
    blocks = tuple(f"blocks.{i}" for i in range(layers))
    return ModelFacts(grains, grain_size, blocks, (*blocks, "head"), heads, heads, (4096, 14336), positions)


def gpus(num_hosts: int = 1, per_host: int = 8, gib: float = 80.0) -> Cluster:
    """Hosts of GPUs like an H100, in round numbers."""
    device = Device(
        "gpu",
        "gpu",
        int(gib * (1 << 30)),
        3.3e12,
        {"bfloat16": 989e12, "float32": 67e12},
        matmul={"bfloat16": Curve(((1e6, 0.05), (1e9, 0.3), (1e12, 0.75)))},
        attention={"flash2_forward": 0.5, "flash2_backward": 0.4},
        multiprocessors=132,
        launch_seconds=3e-6,
        dispatch_seconds=5e-6,
        reserved_bytes=1 << 30,
        price_per_hour=2.5,
    )
    within = Link("nvlink", 3.5e11, 3e-6, 1e-5)
    between = Link("infiniband", 3.2e11, 6e-6, 2e-5) if num_hosts > 1 else None
    return Cluster(f"{num_hosts * per_host}xGPU", device, per_host, num_hosts, within, between)
