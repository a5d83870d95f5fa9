"""Roofline model of an operation's seconds, with two curves over the operation's size.

A GPU computes a matmul in waves of tiles: what the last wave leaves idle and what a short sum over k wastes is counted
here; the catalogue says only how fast a large matmul is. See docs/planner.md for the formulas and their sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil, log2
from typing import Final, NamedTuple

from shoal.hardware.values import STREAM_BYTES, Curve, Device, intensity
from shoal.planner.predict.fusion import fused
from shoal.planner.predict.product_sizes import sizes_on_rank, unaligned_rows
from shoal.planner.predict.share import Share, divided
from shoal.planner.profile.values import NOTHING, Amount, Body, Operation, OperationKind, Phase, TensorCut

ITEMSIZE: Final = {"float64": 8, "float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "float4": 1}

# Tiles that a GPU's matmul library chooses from, as (m, n), and the share of the large tile's rate that each reaches:
# smaller tiles read more operands for each multiplication (NVIDIA, Matrix Multiplication Background, 2023, table 2).
_TILES: Final = (
    *((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (256, 64, 0.85), (64, 256, 0.85)),
    *((128, 64, 0.75), (64, 128, 0.75), (64, 64, 0.6)),
)
# Steps of k, at the rate of half precision, that a tile takes before its multipliers are fed, and after.
K_FILL: Final = 96
_SPLITS: Final = (1, 2, 4, 8, 16)
# A layer's input and its output's gradient are operands of two products each, and cast for both at once: 16 bits of an
# element are read, and 8 are written as they lie and 8 transposed (Transformer Engine). Weights are cast once a step,
# which is not counted, and float4 counts as 8 bits wherever bytes are.
_CAST: Final = ("float8", "float4")
_CAST_BYTES: Final = (2 + 1 + 1) / 2
_ALMOST: Final = 1 - 1e-9  # of a bound that is compared: what rounding may take from it


class Cost(NamedTuple):
    """Seconds of the device, and of the host that launches the work; the slower of the two counts."""

    device: float = 0.0
    host: float = 0.0

    def plus(self, other: Cost) -> Cost:
        """Both, one after the other."""
        return Cost(self.device + other.device, self.host + other.host)

    @property
    def seconds(self) -> float:
        """Seconds of the slower one: the host runs ahead of the device, or the device waits for it."""
        return max(self.device, self.host)


NO_COST = Cost()


def total(costs: Iterable[Cost]) -> Cost:
    """All of them, one after the other."""
    device = host = 0.0
    for cost in costs:
        device += cost.device
        host += cost.host
    return Cost(device, host)


def is_layer(operation: Operation) -> bool:
    """Whether an operation is a product of a layer in 16 bits, which a program may cast to fewer."""
    is_product = operation.kind is OperationKind.MATMUL and operation.batch == Amount(1)
    return is_product and ITEMSIZE.get(operation.dtype) == 2


def matmul_seconds(device: Device, sizes: tuple[float, float, float, float], dtype: str, curve: Curve) -> float:
    """Seconds of `batch` matmuls of m x k by k x n, without their memory traffic."""
    m, n, k, batch = sizes
    flops = 2.0 * m * n * k * batch
    if not device.multiprocessors:
        return flops / (device.flops[dtype] * curve.at(flops) * device.sustained_at(dtype))
    # The curve's rise is the waste of small products, which is counted here by itself; its top is that of large ones.
    peak, processors = device.flops[dtype] * curve.most, device.multiprocessors
    if dtype not in ("float32", "float64"):  # tensor cores draw the power that holds the clock down
        peak *= device.sustained_at(dtype)
    fill = K_FILL * device.flops[dtype] / max(device.flops.get("float16", 0.0), device.flops[dtype])
    per_tile = peak / processors
    best = float("inf")
    most, groups = int(k // (4 * K_FILL)), max(1.0, batch)
    for rows, columns, share in _TILES:
        tiles = ceil(m / rows) * ceil(n / columns) * groups
        tile = 2.0 * rows * columns / (per_tile * share)
        if tiles / processors * tile * k * _ALMOST > best:
            continue  # however it is split, and its last wave were full
        for split in _SPLITS:
            if split > 1 and split > most:
                break
            waves = ceil(tiles * split / processors)
            # Each part of a split sum is written and read once more in float32.
            extra = 8.0 * m * n * batch * split / device.memory_bytes_per_second if split > 1 else 0.0
            seconds = waves * tile * (k / split + fill) + extra
            if seconds < best:
                best = seconds
    return best


@dataclass(frozen=True)
class DeviceModel:
    """Roofline model of a device under one program.

    `held`: the bytes that a step goes through between two uses of a tensor. A CPU's caches serve what is smaller.
    """

    device: Device
    fast_float32: bool = False  # float32 matmuls on tensor cores as tf32
    attention: str = "flash2"  # which fused attention
    held: Amount = NOTHING
    layers: str | None = None  # what the layers of repeated blocks are cast to before they multiply
    fuses: bool = False  # elementwise operators of repeated blocks, on a GPU
    _alike: dict[Body, tuple[list[Operation], list[int]]] = field(default_factory=dict, compare=False, repr=False)
    _priced_whole: dict[tuple[Body, float, int], list[Cost]] = field(default_factory=dict, compare=False, repr=False)
    _priced_undivided: dict[tuple[Body, float], list[Cost | None]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def dtype(self, dtype: str) -> str:
        """The dtype that multiplies numbers of a dtype: a device without it uses the next it has."""
        flops = self.device.flops
        if dtype == "float32" and self.fast_float32 and "tf32" in flops:
            return "tf32"
        return dtype if dtype in flops else "float32"

    def operation(self, operation: Operation, share: Share) -> Cost:
        """Seconds of one operation on one rank."""
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
        """Seconds of computing, as measured on operands in the caches, and then of what comes from beyond them.

        A core's prefetching hides little of it. A line of new memory is read before it is written, of one that was
        read it is not; a stream writes as many bytes anew as it reads.
        """
        read, written = moved
        num_bytes, device = read + written, self.device
        if operation.name == "aten.addmm":  # the bias is laid out as the result, to which the product is added
            read, written = num_bytes, 2 * written
        in_place = operation.name.endswith("_") and operation.name not in _ANEW
        traffic = (read + (1 if in_place else 2) * written) / _STREAM_TRAFFIC
        memory = self.moved(traffic, held)
        beyond = max(0.0, memory - traffic / (device.memory_bytes_per_second * device.memory.most))
        if operation.name in device.operators:
            compute = num_bytes / (device.memory_bytes_per_second * device.operators[operation.name])
        return max(memory, compute + beyond if compute else 0.0)

    def moved(self, num_bytes: float, held: float, name: str = "", *, in_place: bool = False) -> float:
        """Seconds of reading and writing so many bytes, by an operator of this name; a step goes through `held`.

        `in_place`: no memory is asked for.
        """
        if not num_bytes:
            return 0.0
        device = self.device
        place = num_bytes
        if device.kind == "cpu":  # its operands were last touched long ago, or are new
            place = max(num_bytes, min(held, STREAM_BYTES))
            place = min(place, STREAM_BYTES) if in_place else place
        fraction = device.memory.at(place)
        return num_bytes / (device.memory_bytes_per_second * min(fraction, device.operators.get(name, fraction)))

    def rewritten(self, num_bytes: float, held: float, name: str) -> float:
        """Seconds of reading and writing so many bytes, where nothing is written that was not read."""
        traffic = num_bytes / _STREAM_TRAFFIC if self.device.kind == "cpu" else num_bytes
        return self.moved(traffic, held, name, in_place=True)

    def _product(self, operation: Operation, sizes: tuple[float, float, float, float]) -> float:
        device, dtype = self.device, self.dtype(operation.dtype)
        phase = "" if operation.phase is Phase.FORWARD else f"_{operation.phase.value}"
        if operation.window and (windows := device.windows.get(f"{dtype}{phase}")):
            m, n, k, batch = sizes
            rate = device.flops[dtype] * _window_rate(windows, operation.window)
            pixels = k if operation.phase is Phase.BACKWARD_WEIGHT else m
            taken = device.window_weights.get(f"{dtype}{phase}", 0.0) * device.memory_bytes_per_second
            weights = ITEMSIZE[dtype] * m * n * k * batch / pixels / taken if taken else 0.0
            return 2.0 * m * n * k * batch / rate + weights
        if operation.kind is OperationKind.CONVOLUTION and device.convolution:
            curve = device.convolution.get(f"{dtype}{phase}") or device.convolution.get(dtype)
            if curve is not None:  # as measured: a library's convolutions depend on what they reuse
                m, n, k, batch = sizes
                rate = device.flops[dtype] * curve.at(intensity(m, n, k))
                return 2.0 * m * n * k * batch / rate
        seconds = matmul_seconds(device, sizes, dtype, device.matmul.get(dtype) or Curve())
        return seconds / (WINOGRAD if self._spares(operation) else 1.0)

    def is_unaligned(self, operation: Operation, share: Share) -> bool:
        """Whether an operation is a product in 16 bits of which a row does not begin at 16 bytes, on a GPU.

        Its library then takes older kernels: NVIDIA, Matrix Multiplication Background User's Guide, "Requirements to
        use Tensor Cores"; `unaligned` in gpus.toml has by how much they are slower.
        """
        if self.device.kind != "gpu" or self.device.unaligned == 1.0:
            return False
        return ITEMSIZE[self.dtype(operation.dtype)] == ITEMSIZE["bfloat16"] and bool(unaligned_rows(operation, share))

    def _spares(self, operation: Operation) -> bool:
        return operation.winograd and self.dtype(operation.dtype) == "float32" and self.device.multiprocessors > 0

    def spared(self, operation: Operation, samples: float) -> float:
        """FLOPs of an operation that are counted and not executed."""
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
        """The fraction of the peak over the positions that a row attends to, where it was measured so."""
        return self.device.attention_lengths.get(f"flash2_{_way(phase)}")

    def attention_fraction(self, phase: Phase) -> float:
        """The fraction of the peak that long rows of wide heads reach."""
        known, way = self.device.attention, _way(phase)
        return known.get(f"{self.attention}_{way}") or known.get(f"flash2_{way}", 0.5) * _FUSED[self.attention]

    def attention_filled(self, length: float, width: float) -> float:
        """Utilization of a GPU's peak attention speed by so many positions and heads so wide; 1 at most.

        The tiles on the diagonal are computed whole, and a short row of them leaves the pipeline unfilled.
        """
        if not self.device.multiprocessors:
            return 1.0
        length = max(1.0, length)
        return length / (length + _ATTENTION_FILL) * min(1.0, float(((width or 128.0) / 128.0) ** _NARROW_HEADS))

    def each(self, body: Body, share: Share) -> list[Cost]:
        """Each operation of a body; equal ones are computed once."""
        if body not in self._alike:
            places: dict[Operation, int] = {}
            alike = [places.setdefault(self._priced(o), len(places)) for o in self.operations(body)]
            self._alike[body] = list(places), alike
        distinct, alike = self._alike[body]
        key = body, share.local_samples, share.tensor
        if key not in self._priced_whole:  # sequence parallelism divides nothing of these
            known = zip(self._undivided(body, share.local_samples), distinct, strict=True)
            self._priced_whole[key] = [cost or self.operation(operation, share) for cost, operation in known]
        costs = self._priced_whole[key]
        if share.sequence:
            pairs = zip(costs, distinct, strict=True)
            costs = [self.operation(o, share) if o.cut is TensorCut.SEQUENCE else cost for cost, o in pairs]
        return [costs[place] for place in alike]

    def _undivided(self, body: Body, samples: float) -> list[Cost | None]:
        """The operations that no tensor axis divides by itself; None for the others."""
        key = body, samples
        if key not in self._priced_undivided:
            whole, share = (TensorCut.NONE, TensorCut.SEQUENCE), Share(samples)
            found = [self.operation(o, share) if o.cut in whole else None for o in self._alike[body][0]]
            self._priced_undivided[key] = found
        return self._priced_undivided[key]

    def operations(self, body: Body) -> Iterable[Operation]:
        """The operations of a body in the dtypes in which they are computed, and the kernels."""
        if not body.repeated:
            return body.operations
        if not (self.fuses and self.device.kind == "gpu"):
            return map(self._narrowed, body.operations)
        # Inductor pads the rows of products itself (torch._inductor.config.shape_padding, which is on by default).
        return (self._narrowed(replace(o, rows=()) if o.rows else o) for o in fused(body.operations))

    def _narrowed(self, operation: Operation) -> Operation:
        """A layer's product in the dtype that the program casts it to, where the device multiplies that."""
        if self.layers is None or self.layers not in self.device.flops or not is_layer(operation):
            return operation
        return replace(operation, dtype=self.layers)

    def _priced(self, operation: Operation) -> Operation:
        """An operation without what its seconds do not depend on."""
        named = operation.name if self.device.kind == "cpu" else ""
        operation = replace(operation, name=named, module="", saved_bytes=NOTHING, selected_bytes=NOTHING)
        if operation.kind is OperationKind.MEMORY:
            return replace(operation, phase=Phase.FORWARD, flops=NOTHING, dtype="")
        return operation


def _window_rate(known: Mapping[str, float], window: tuple[int, ...]) -> float:
    """The fraction of the peak of a convolution in two dims, from that of the nearest one that was measured."""
    channels, filters, taps, width, stride, padding = window
    key = nearest(tuple(known), (channels, filters, taps, width, stride))
    *_, near_taps, near_width, near_stride = map(int, key.split("-"))
    inside = _inside(near_taps, near_width, near_stride, near_taps // 2) / _inside(taps, width, stride, padding)
    return known[key] * _filled(channels) * _filled(filters) * min(1.0, inside)


def _inside(taps: int, width: int, stride: int, padding: int) -> float:
    """The share of a convolution's products that are not with the zeros around an image, which kernels leave out."""
    image = (width - 1) * stride + taps - 2 * padding
    firsts = [place * stride - padding for place in range(width)]
    within = sum(max(0, min(first + taps, image) - max(first, 0)) for first in firsts)
    return (max(1, within) / (taps * width)) ** 2


@lru_cache(maxsize=4096)
def nearest(known: tuple[str, ...], window: tuple[int, ...]) -> str:
    """Which of these windows is nearest: by the ratios of its five numbers, the stride's counting most.

    A library has other kernels for other strides and rows: what is measured of one says nothing of another.
    """

    def distance(key: str) -> float:
        ratios = [abs(log2(a / b)) for a, b in zip(map(int, key.split("-")), window, strict=True)]
        return sum(weight * ratio for weight, ratio in zip(_WINDOW_WEIGHTS, ratios, strict=True))

    return min(known, key=distance)


def _filled(channels: int) -> float:
    """The share of a block's lanes that so many channels fill; images of a few channels have kernels of their own."""
    return channels / (_LANES * ceil(channels / _LANES)) if channels > _FEW_CHANNELS else 1.0


def _way(phase: Phase) -> str:
    return "forward" if phase is Phase.FORWARD else "backward"


# Lavin and Gray, arXiv 1509.09308: 3 x 3 convolutions with 2.25 times fewer products, of which transforms take a part.
WINOGRAD: Final = 1.7
# Rates of other fused attentions relative to FlashAttention-2's, where a device has no figure of its own: from those of
# Dao, arXiv 2307.08691 (causal, A100). Version 3 is of Hopper; elsewhere it is version 2 that runs.
_FUSED: Final = {"flash1": 0.55, "flash2": 1.0, "flash3": 1.0}
# Key positions whose time a row of attention loses at its ends, and how its rate falls with heads narrower than 128:
# from the figures of Dao, FlashAttention-2, arXiv 2307.08691 (causal, A100, 512 to 16k positions, heads of 64 and 128).
_ATTENTION_FILL: Final = 512.0
# Of what a stream reads and writes, its traffic: what it writes is read before.
_STREAM_TRAFFIC: Final = 3 / 2
# Operators that write over what they have not read.
_ANEW: Final = ("aten.copy_", "aten.fill_", "aten.zero_", "aten.random_", "aten.bernoulli_")
# Float32 numbers of a 512-bit vector: oneDNN lays channels out in blocks of so many, but for the first layer's.
_LANES: Final = 16
_FEW_CHANNELS: Final = 4
# Of channels in and out, taps, width and stride.
_WINDOW_WEIGHTS: Final = (1.0, 1.0, 2.0, 1.0, 16.0)
_NARROW_HEADS: Final = 0.25
