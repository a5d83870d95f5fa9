"""Roofline model of the seconds of an operation, with two curves over the size of the operation.

A GPU computes a matmul in waves of tiles. This module models the idle part of the last wave and the cost of short sums
over k. The catalogue gives only the rate of large matmuls. See docs/planner.md for the formulas and their sources.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil, log2
from typing import Final, NamedTuple

from shoal.hardware.values import STREAM_BYTES, Curve, Device, intensity
from shoal.planner.predict.fusion import fused
from shoal.planner.predict.share import Share, divided, sizes_on_rank, unaligned_rows
from shoal.planner.profile.values import NOTHING, Amount, Body, Operation, OperationKind, Phase, TensorCut

ITEMSIZE: Final = {"float64": 8, "float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "float4": 1}

# Tiles that a GPU's matmul library chooses from, as (m, n, share of the large tile's rate). Smaller tiles read more
# operands per multiplication (NVIDIA, Matrix Multiplication Background, 2023, table 2).
_TILES: Final = (
    *((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (256, 64, 0.85), (64, 256, 0.85)),
    *((128, 64, 0.75), (64, 128, 0.75), (64, 64, 0.6)),
)
# Steps of k, at the half-precision rate, that a tile spends on filling and draining its pipeline.
K_FILL: Final = 96
_SPLITS: Final = (1, 2, 4, 8, 16)
# A layer's input and its output's gradient are operands of two products each and are cast once for both. The cast reads
# 16 bits per element and writes 8, plain and transposed (Transformer Engine). The cast of weights, once per step, is
# not counted. float4 counts as 8 bits wherever bytes are counted.
_CAST: Final = ("float8", "float4")
_CAST_BYTES: Final = (2 + 1 + 1) / 2
_ALMOST: Final = 1 - 1e-9  # slack for rounding when a bound is compared


class Cost(NamedTuple):
    """Seconds of the device and of the host that launches its work. Both overlap."""

    device: float = 0.0
    host: float = 0.0

    def plus(self, other: Cost) -> Cost:
        """Return the sum of both costs."""
        return Cost(self.device + other.device, self.host + other.host)

    @property
    def seconds(self) -> float:
        """Seconds of the slower side: the device waits for the host, or the host runs ahead of it."""
        return max(self.device, self.host)


NO_COST = Cost()


def total(costs: Iterable[Cost]) -> Cost:
    """Return the sum of all costs."""
    device = host = 0.0
    for cost in costs:
        device += cost.device
        host += cost.host
    return Cost(device, host)


def is_layer(operation: Operation) -> bool:
    """Check whether an operation is a layer's matmul in 16 bits, which a program may cast to fewer bits."""
    is_product = operation.kind is OperationKind.MATMUL and operation.batch == Amount(1)
    return is_product and ITEMSIZE.get(operation.dtype) == 2


def matmul_seconds(device: Device, sizes: tuple[float, float, float, float], dtype: str, curve: Curve) -> float:
    """Return the seconds of `batch` matmuls of m x k by k x n, without memory traffic. `sizes`: m, n, k, batch."""
    m, n, k, batch = sizes
    flops = 2.0 * m * n * k * batch
    if not device.multiprocessors:
        return flops / (device.flops[dtype] * curve.at(flops) * device.sustained_at(dtype))
    # Only the top of the curve applies, the rate of large products: the waste of small ones is modelled below.
    peak, processors = device.flops[dtype] * curve.most, device.multiprocessors
    if dtype not in ("float32", "float64"):  # the power that tensor cores draw lowers the clock
        peak *= device.sustained_at(dtype)
    fill = K_FILL * device.flops[dtype] / max(device.flops.get("float16", 0.0), device.flops[dtype])
    per_tile = peak / processors
    best = float("inf")
    most, groups = int(k // (4 * K_FILL)), max(1.0, batch)
    for rows, columns, share in _TILES:
        tiles = ceil(m / rows) * ceil(n / columns) * groups
        tile = 2.0 * rows * columns / (per_tile * share)
        if tiles / processors * tile * k * _ALMOST > best:
            continue  # no split of a sum can be faster, even with a full last wave
        for split in _SPLITS:
            if split > 1 and split > most:
                break
            waves = ceil(tiles * split / processors)
            # Each part of a split sum is written to memory and read again in float32.
            extra = 8.0 * m * n * batch * split / device.memory_bytes_per_second if split > 1 else 0.0
            seconds = waves * tile * (k / split + fill) + extra
            if seconds < best:
                best = seconds
    return best


@dataclass(frozen=True)
class DeviceModel:
    """Roofline model of a device under one program.

    `held`: bytes that a step touches between two uses of a tensor. Smaller working sets stay in a CPU's caches.
    """

    device: Device
    fast_float32: bool = False  # float32 matmuls on tensor cores as tf32
    attention: str = "flash2"  # which fused attention
    held: Amount = NOTHING
    layers: str | None = None  # dtype that layers of repeated blocks are cast to before they multiply
    fuses: bool = False  # elementwise operators of repeated blocks are fused on a GPU
    _alike: dict[Body, tuple[list[Operation], list[int]]] = field(default_factory=dict, compare=False, repr=False)
    _priced_whole: dict[tuple[Body, float, int], list[Cost]] = field(default_factory=dict, compare=False, repr=False)
    _priced_undivided: dict[tuple[Body, float], list[Cost | None]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def dtype(self, dtype: str) -> str:
        """Return the dtype that multiplies numbers of `dtype`: tf32 if enabled, float32 if the device lacks `dtype`."""
        flops = self.device.flops
        if dtype == "float32" and self.fast_float32 and "tf32" in flops:
            return "tf32"
        return dtype if dtype in flops else "float32"

    def operation(self, operation: Operation, share: Share) -> Cost:
        """Return the cost of one operation on one rank."""
        device = self.device
        host = operation.launches * device.dispatch_seconds
        if not operation.launches:
            return Cost(0.0, host)
        samples, parts, kind = share.local_samples, divided(operation, share), operation.kind
        read, written = operation.read_bytes.at(samples) / parts, operation.written_bytes.at(samples) / parts
        held, compute, cast = self.held.at(samples), 0.0, 0.0
        if kind is OperationKind.MATMUL or kind is OperationKind.CONVOLUTION:
            sizes = sizes_on_rank(operation, share)
            compute = self._product(operation, sizes)
            if self.is_unaligned(operation, share):
                compute /= device.unaligned
            if kind is OperationKind.MATMUL:
                m, n, k, batch = sizes
                width = batch * ITEMSIZE.get(operation.dtype, 4)
                read, written = (m * k + k * n) * width, m * n * width
                if operation.dtype in _CAST:
                    written += m * n  # the product itself has 16 bits
                    gradient = k * n if operation.phase is Phase.BACKWARD_WEIGHT else 0.0
                    cast = self.moved(_CAST_BYTES * (m * k + gradient), held)
        elif kind is OperationKind.ATTENTION:
            compute = self._attention(operation, share, parts)
        if device.kind == "cpu":
            seconds = self._on_a_core(operation, compute, (read, written), held)
        else:
            seconds = max(compute, self.moved(read + written, held, operation.name))
        return Cost(seconds + cast + operation.launches * device.launch_seconds, host)

    def _on_a_core(self, operation: Operation, compute: float, moved: tuple[float, float], held: float) -> float:
        """Return the seconds of an operation on a CPU: compute on cached operands, plus traffic from beyond the caches.

        Prefetching hides little of that traffic. A core reads a line of new memory before the write, unless it has read
        the line already. A stream writes as many new bytes as it reads.
        """
        read, written = moved
        num_bytes, device = read + written, self.device
        if operation.name == "aten.addmm":  # the bias is expanded into the result, to which the product is added
            read, written = num_bytes, 2 * written
        in_place = operation.name.endswith("_") and operation.name not in _ANEW
        traffic = (read + (1 if in_place else 2) * written) / _STREAM_TRAFFIC
        memory = self.moved(traffic, held)
        beyond = max(0.0, memory - traffic / (device.memory_bytes_per_second * device.memory.most))
        if operation.name in device.operators:
            compute = num_bytes / (device.memory_bytes_per_second * device.operators[operation.name])
        return max(memory, compute + beyond if compute else 0.0)

    def moved(self, num_bytes: float, held: float, name: str = "", *, in_place: bool = False) -> float:
        """Return the seconds in which an operator of this name reads and writes `num_bytes`.

        `held`: bytes that a step touches between two uses of a tensor. `in_place`: the operator allocates no memory.
        """
        if not num_bytes:
            return 0.0
        device = self.device
        place = num_bytes
        if device.kind == "cpu":  # operands left the caches or are new
            place = max(num_bytes, min(held, STREAM_BYTES))
            place = min(place, STREAM_BYTES) if in_place else place
        fraction = device.memory.at(place)
        return num_bytes / (device.memory_bytes_per_second * min(fraction, device.operators.get(name, fraction)))

    def rewritten(self, num_bytes: float, held: float, name: str) -> float:
        """Return the seconds of reading and writing `num_bytes`, if every written line was read before."""
        traffic = num_bytes / _STREAM_TRAFFIC if self.device.kind == "cpu" else num_bytes
        return self.moved(traffic, held, name, in_place=True)

    def _product(self, operation: Operation, sizes: tuple[float, float, float, float]) -> float:
        device, dtype = self.device, self.dtype(operation.dtype)
        phase = "" if operation.phase is Phase.FORWARD else f"_{operation.phase.value}"
        if operation.window and (windows := device.windows.get(f"{dtype}{phase}")):
            m, n, k, batch = sizes
            channels, filters, taps, width, stride, padding = operation.window  # the nearest measured one counts
            key = nearest(tuple(windows), (channels, filters, taps, width, stride))
            *_, near_taps, near_width, near_stride = map(int, key.split("-"))
            inside = _inside(near_taps, near_width, near_stride, near_taps // 2) / _inside(taps, width, stride, padding)
            rate = device.flops[dtype] * (windows[key] * _filled(channels) * _filled(filters) * min(1.0, inside))
            pixels = k if operation.phase is Phase.BACKWARD_WEIGHT else m
            taken = device.window_weights.get(f"{dtype}{phase}", 0.0) * device.memory_bytes_per_second
            weights = ITEMSIZE[dtype] * m * n * k * batch / pixels / taken if taken else 0.0
            return 2.0 * m * n * k * batch / rate + weights
        if operation.kind is OperationKind.CONVOLUTION and device.convolution:
            curve = device.convolution.get(f"{dtype}{phase}") or device.convolution.get(dtype)
            if curve is not None:  # the measured curve: a library's convolutions depend on data reuse
                m, n, k, batch = sizes
                rate = device.flops[dtype] * curve.at(intensity(m, n, k))
                return 2.0 * m * n * k * batch / rate
        seconds = matmul_seconds(device, sizes, dtype, device.matmul.get(dtype) or Curve())
        return seconds / (WINOGRAD if self._spares(operation) else 1.0)

    def is_unaligned(self, operation: Operation, share: Share) -> bool:
        """Check whether an operation is a 16-bit matmul on a GPU with rows that do not begin at multiples of 16 bytes.

        The library then uses slower kernels: NVIDIA, Matrix Multiplication Background User's Guide, "Requirements to
        use Tensor Cores". `unaligned` in gpus.toml is their relative speed.
        """
        if self.device.kind != "gpu" or self.device.unaligned == 1.0:
            return False
        return ITEMSIZE[self.dtype(operation.dtype)] == ITEMSIZE["bfloat16"] and bool(unaligned_rows(operation, share))

    def _spares(self, operation: Operation) -> bool:
        return operation.winograd and self.dtype(operation.dtype) == "float32" and self.device.multiprocessors > 0

    def spared(self, operation: Operation, samples: float) -> float:
        """Return the FLOPs of an operation that Winograd's algorithm does not execute."""
        return operation.flops.at(samples) * (1.0 - 1.0 / WINOGRAD) if self._spares(operation) else 0.0

    def _attention(self, operation: Operation, share: Share, parts: float) -> float:
        device, samples = self.device, share.local_samples
        length = max(1.0, operation.n.at(samples))
        if (curve := self.attention_lengths(operation.phase)) is not None:
            fraction = curve.at(length)
        else:
            fraction = self.attention_fraction(operation.phase)
            fraction *= self.attention_filled(length, operation.k.at(samples))
        return operation.flops.at(samples) / parts / (device.flops[self.dtype(operation.dtype)] * fraction)

    def attention_lengths(self, phase: Phase) -> Curve | None:
        """Return the fraction of the peak by the number of positions that a row attends to; None if not measured."""
        return self.device.attention_lengths.get(f"flash2_{_way(phase)}")

    def attention_fraction(self, phase: Phase) -> float:
        """Return the fraction of the peak that attention reaches with long rows and wide heads."""
        known, way = self.device.attention, _way(phase)
        return known.get(f"{self.attention}_{way}") or known.get(f"flash2_{way}", 0.5) * _FUSED[self.attention]

    def attention_filled(self, length: float, width: float) -> float:
        """Return the utilization, at most 1, of the peak attention speed with this length and head width on a GPU.

        Tiles on the diagonal are computed whole, and a short row of tiles does not fill the pipeline.
        """
        if not self.device.multiprocessors:
            return 1.0
        length = max(1.0, length)
        return length / (length + _ATTENTION_FILL) * min(1.0, float(((width or 128.0) / 128.0) ** _NARROW_HEADS))

    def each(self, body: Body, share: Share) -> list[Cost]:
        """Return the cost of each operation of a body. Equal operations are computed once."""
        if body not in self._alike:
            places: dict[Operation, int] = {}
            alike = [places.setdefault(self._priced(o), len(places)) for o in self.operations(body)]
            self._alike[body] = list(places), alike
        distinct, alike = self._alike[body]
        key = body, share.local_samples, share.tensor
        if key not in self._priced_whole:  # sequence parallelism does not divide these operations
            known = zip(self._undivided(body, share.local_samples), distinct, strict=True)
            self._priced_whole[key] = [cost or self.operation(operation, share) for cost, operation in known]
        costs = self._priced_whole[key]
        if share.sequence:
            pairs = zip(costs, distinct, strict=True)
            costs = [self.operation(o, share) if o.cut is TensorCut.SEQUENCE else cost for cost, o in pairs]
        return [costs[place] for place in alike]

    def _undivided(self, body: Body, samples: float) -> list[Cost | None]:
        """Return the cost of each distinct operation that no tensor axis divides, and None for the others."""
        key = body, samples
        if key not in self._priced_undivided:
            whole, share = (TensorCut.NONE, TensorCut.SEQUENCE), Share(samples)
            found = [self.operation(o, share) if o.cut in whole else None for o in self._alike[body][0]]
            self._priced_undivided[key] = found
        return self._priced_undivided[key]

    def operations(self, body: Body) -> Iterable[Operation]:
        """Return the operations of a body as the program runs them: with fused chains and the layers' dtype."""
        if not body.repeated:
            return body.operations
        if not (self.fuses and self.device.kind == "gpu"):
            return map(self._narrowed, body.operations)
        # Inductor pads the rows of products itself (torch._inductor.config.shape_padding, which is on by default).
        return (self._narrowed(replace(o, rows=()) if o.rows else o) for o in fused(body.operations))

    def _narrowed(self, operation: Operation) -> Operation:
        """Return a layer in the dtype that the program casts it to, if the device multiplies that dtype."""
        if self.layers is None or self.layers not in self.device.flops or not is_layer(operation):
            return operation
        return replace(operation, dtype=self.layers)

    def _priced(self, operation: Operation) -> Operation:
        """Return an operation without the fields that its seconds do not depend on."""
        named = operation.name if self.device.kind == "cpu" else ""
        operation = replace(operation, name=named, module="", saved_bytes=NOTHING, selected_bytes=NOTHING)
        if operation.kind is OperationKind.MEMORY:
            return replace(operation, phase=Phase.FORWARD, flops=NOTHING, dtype="")
        return operation


def _inside(taps: int, width: int, stride: int, padding: int) -> float:
    """Return the share of multiplications that are not with padding zeros, which kernels skip."""
    image = (width - 1) * stride + taps - 2 * padding
    firsts = [place * stride - padding for place in range(width)]
    within = sum(max(0, min(first + taps, image) - max(first, 0)) for first in firsts)
    return (max(1, within) / (taps * width)) ** 2


@lru_cache(maxsize=4096)
def nearest(known: tuple[str, ...], window: tuple[int, ...]) -> str:
    """Return the measured window with the nearest ratios of the five numbers; the stride counts most.

    A library has separate kernels per stride and width, so a measurement of one predicts no other.
    """

    def distance(key: str) -> float:
        ratios = [abs(log2(a / b)) for a, b in zip(map(int, key.split("-")), window, strict=True)]
        return sum(weight * ratio for weight, ratio in zip(_WINDOW_WEIGHTS, ratios, strict=True))

    return min(known, key=distance)


def _filled(channels: int) -> float:
    """Return the share of lanes that this many channels fill. Images with few channels have kernels of their own."""
    return channels / (_LANES * ceil(channels / _LANES)) if channels > _FEW_CHANNELS else 1.0


def _way(phase: Phase) -> str:
    return "forward" if phase is Phase.FORWARD else "backward"


# Lavin and Gray, arXiv 1509.09308: 3 x 3 convolutions need 2.25 times fewer products; transforms cost part of the gain.
WINOGRAD: Final = 1.7
# Default rates of fused attentions relative to FlashAttention-2, from Dao, arXiv 2307.08691 (causal, A100). Version 3
# exists only on Hopper; other devices run version 2.
_FUSED: Final = {"flash1": 0.55, "flash2": 1.0, "flash3": 1.0}
# Time, in key positions, that a row of attention loses at its ends. `_NARROW_HEADS`: exponent by which the rate falls
# with heads narrower than 128. Both are from the figures of Dao, FlashAttention-2, arXiv 2307.08691 (causal, A100, 512
# to 16k positions, heads of 64 and 128).
_ATTENTION_FILL: Final = 512.0
# Memory traffic of a stream over the bytes that it reads and writes: written lines are read first.
_STREAM_TRAFFIC: Final = 3 / 2
# In-place operators that do not read what they overwrite.
_ANEW: Final = ("aten.copy_", "aten.fill_", "aten.zero_", "aten.random_", "aten.bernoulli_")
# Float32 lanes of a 512-bit vector: the size of oneDNN's channel blocks, except in the first layer.
_LANES: Final = 16
_FEW_CHANNELS: Final = 4
# Weights of channels in, channels out, taps, width and stride in the distance of two windows.
_WINDOW_WEIGHTS: Final = (1.0, 1.0, 2.0, 1.0, 16.0)
_NARROW_HEADS: Final = 0.25
