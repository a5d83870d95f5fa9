"""Seconds of computing: a roofline model of operations, and the passes of a stage for one microbatch.

Two curves over the size of an operation correct the roofline. A GPU computes a matmul in waves of tiles. This module
models the idle part of the last wave and the cost of short sums over k. The catalogue gives only the rate of large
matmuls. See docs/planner.md for the formulas and their sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from math import ceil, log2
from operator import add
from typing import Final, NamedTuple

from shoal.hardware.values import STREAM_BYTES, Curve, Device, intensity
from shoal.planner.predict.collective_time import Network
from shoal.planner.predict.experts import exchange_seconds
from shoal.planner.predict.workload import ITEMSIZE, Counts, Program, Share
from shoal.planner.profile.values import ALIGNED, NOTHING, Amount, Body, Operation, OperationKind, Phase, TensorCut

# Tiles that a GPU's matmul library chooses from, as (m, n, share of the large tile's rate). Smaller tiles read more
# operands per multiplication (NVIDIA, Matrix Multiplication Background, 2023, table 2).
_TILES: Final = (
    *((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (256, 64, 0.85), (64, 256, 0.85)),
    *((128, 64, 0.75), (64, 128, 0.75), (64, 64, 0.6)),
)
# Steps of k, at the half-precision rate, that a tile spends on filling and draining its pipeline.
K_FILL: Final = 96
# Fewest numbers of a row that is padded to a multiple of `TILE`, as vocabularies usually are.
VOCABULARY: Final = 1024
TILE: Final = 64
_SPLITS: Final = (1, 2, 4, 8, 16)
# A layer's input and its output's gradient are operands of two products each and are cast once for both. The cast reads
# 16 bits per element and writes 8, plain and transposed (Transformer Engine). A program that scales anew reads the
# largest element first (2 bytes), and casts the input again in the backward. The cast of weights, once per step, is not
# counted. float4 counts as 8 bits wherever bytes are counted.
_CAST: Final = ("float8", "float4")
# Dtypes in which a convolution of a GPU runs on tensor cores. They multiply images with channels last, so that cuDNN
# copies images with channels first to that format and the result back (docs/planner.md).
_TENSOR_CORES: Final = ("tf32", "bfloat16", "float16")
_CAST_BYTES: Final = (2 + 1 + 1) / 2
_ANEW_BYTES: Final = {"input": 2 + 2 + 1, "gradient": (2 + 2 + 1 + 1) / 2}
_ALMOST: Final = 1 - 1e-9  # slack for rounding when a bound is compared
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


# ------------------------------------------------------------------------------------------- an operation on one rank


def divided(operation: Operation, share: Share) -> float:
    """Return the factor by which tensor parallelism divides the work of an operation."""
    if operation.cut is TensorCut.NONE or (operation.cut is TensorCut.SEQUENCE and not share.sequence):
        return 1.0
    return float(share.tensor)


class MatrixRow(NamedTuple):
    """Row of a matrix: its elements on all ranks together, and the number of ranks that divide them."""

    length: int
    ranks: int = 1

    @property
    def is_aligned(self) -> bool:
        """True if, on every rank, the next row also begins at a multiple of 16 bytes.

        Each rank has the largest part or one element less, see `plans.accounting.partition`. All ranks wait for the
        slowest.
        """
        fewest, most = self.length // self.ranks, -(-self.length // self.ranks)
        return fewest % ALIGNED == 0 and most % ALIGNED == 0

    @property
    def padded(self) -> int:
        """The next length that is aligned on every rank, of a vocabulary also with whole tiles of a product."""
        step = (TILE if self.length >= VOCABULARY else ALIGNED) * self.ranks
        return -(-self.length // step) * step


def sizes_on_rank(operation: Operation, share: Share) -> tuple[float, float, float, float]:
    """Return m, n, k and batch of a product on one rank."""
    samples, cut = share.samples / share.context, operation.cut
    m, n, k = operation.m.at(samples), operation.n.at(samples), operation.k.at(samples)
    batch, size = operation.batch.at(samples), _divided_size(operation, share)
    if size == "m":
        m = ceil(m / share.tensor)
    elif size == "n":
        n = ceil(n / share.tensor)
    elif size == "k":
        k = ceil(k / share.tensor)
    elif cut is TensorCut.BATCH or cut is TensorCut.ALL:
        batch /= share.tensor
    return m, n, k, batch


def unaligned_rows(operation: Operation, share: Share) -> tuple[MatrixRow, ...]:
    """Return the rows of a product's matrices whose length is not a multiple of 8 elements.

    A product with a vector has none, since other kernels compute it. A division of the batch (heads of attention)
    leaves rows unchanged. The row stride of a view may be larger than its length. A rank's stride is then unknown and
    counts as aligned if the whole is (see `operators.py`).
    """
    if not operation.rows or min(sizes_on_rank(operation, share)[:3]) <= 1:
        return ()
    size, lengths = _divided_size(operation, share), {"m": operation.m, "n": operation.n, "k": operation.k}
    rows = (
        MatrixRow(ceil(lengths[name].at(share.samples / share.context)), share.tensor if name == size else 1)
        for name in operation.rows
    )
    return tuple(row for row in rows if not row.is_aligned)


def _divided_size(operation: Operation, share: Share) -> str:
    """Return the name of the size (m, n or k) that a tensor axis divides, or "" if it divides none."""
    if operation.cut is TensorCut.SEQUENCE:
        return "m" if share.sequence else ""
    return operation.cut.value if operation.cut in (TensorCut.M, TensorCut.N, TensorCut.K) else ""


# -------------------------------------------------------------------------------------------------------- roofline


class Cost(NamedTuple):
    """Seconds of the device and of the host that launches its work. Both overlap."""

    device: float = 0.0
    host: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of the slower side: the device waits for the host, or the host runs ahead of it."""
        return max(self.device, self.host)


def is_layer(operation: Operation, experts: bool) -> bool:
    """Return True if an operation is a layer's matmul in 16 bits, which a program may cast to fewer bits.

    `experts`: products of stacked experts are cast too; else they are no layers, also where a rank has one.
    """
    if operation.kind is not OperationKind.MATMUL or ITEMSIZE.get(operation.dtype) != 2:
        return False
    return experts if operation.of_experts else operation.batch == Amount(1)


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


def fused(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """Return the operations as a compiler such as Inductor fuses them: each chain is one kernel, at its last operation.

    A chain is consecutive operators of kind MEMORY in the same phase that tensor parallelism divides in the same way.
    An operator reads the output of the one before it from registers. The kernel's memory traffic is the other inputs
    and the last output. In the backward, another kernel computes again what autograd would have saved. Batch norms are
    in no chain: where they were, published and measured steps were no faster (docs/planner.md).
    """
    kernels: list[Operation] = []

    def chained(operation: Operation) -> tuple[Phase, TensorCut] | None:
        is_chained = operation.kind is OperationKind.MEMORY and "batch_norm" not in operation.name
        return (operation.phase, operation.cut) if is_chained else None

    for key, group in groupby(operations, chained):
        chain = tuple(group)
        if key is None or len(chain) == 1:
            kernels += chain
            continue
        before, read = NOTHING, NOTHING
        for operation in chain:
            fixed = max(0.0, operation.read_bytes.fixed - before.fixed)
            per_sample = max(0.0, operation.read_bytes.per_sample - before.per_sample)
            read = Amount(read.fixed + fixed, read.per_sample + per_sample)
            before = operation.written_bytes
        merged = (replace(o, read_bytes=NOTHING, written_bytes=NOTHING, reread_bytes=NOTHING) for o in chain[:-1])
        kernels += (replace(o, launches=0) for o in merged)
        launches = max(operation.launches for operation in chain)
        kernels.append(replace(chain[-1], read_bytes=read, reread_bytes=NOTHING, launches=launches))
    return tuple(kernels)


@dataclass(frozen=True)
class DeviceModel:
    """Roofline model of a device under one program.

    `touched`: bytes that a step touches between two uses of a tensor. Smaller working sets stay in a CPU's caches.
    """

    device: Device
    fast_float32: bool = False  # float32 matmuls on tensor cores as tf32
    attention: str = "flash2"  # which fused attention
    touched: Amount = NOTHING
    layers: str | None = None  # dtype that layers of repeated blocks are cast to before they multiply
    fuses: bool = False  # elementwise operators are fused on a GPU
    fast_convolutions: bool = False  # float32 convolutions on tensor cores as tf32
    channels_first: bool = False  # memory format of images; tensor cores multiply channels last
    scales_anew: bool = False  # see `Program.scales_anew`
    wide_weights: bool = False  # see `Program.wide_weights`
    casts_experts: bool = False  # see `Program.casts_experts`
    _distinct: dict[Body, tuple[list[Operation], list[int]]] = field(default_factory=dict, compare=False, repr=False)
    _equal: dict[Operation, Operation] = field(default_factory=dict, compare=False, repr=False)
    _costs: dict[tuple[int, float, int], Cost] = field(default_factory=dict, compare=False, repr=False)

    def dtype(self, dtype: str, kind: OperationKind = OperationKind.MATMUL) -> str:
        """Return the dtype that multiplies numbers of `dtype`: tf32 if enabled, float32 if the device lacks `dtype`."""
        flops = self.device.flops
        is_fast = self.fast_float32 or (self.fast_convolutions and kind is OperationKind.CONVOLUTION)
        if dtype == "float32" and is_fast and "tf32" in flops:
            return "tf32"
        return dtype if dtype in flops else "float32"

    def operation(self, operation: Operation, share: Share) -> Cost:
        """Return the cost of one operation on one rank."""
        device, kind = self.device, operation.kind
        host = operation.launches * device.dispatch_seconds
        if not operation.launches:
            return Cost(0.0, host)
        samples, parts = share.samples / share.context, divided(operation, share)
        read, written = operation.read_bytes.at(samples) / parts, operation.written_bytes.at(samples) / parts
        touched, compute, cast = self.touched.at(samples), 0.0, 0.0
        if kind is OperationKind.MATMUL or kind is OperationKind.CONVOLUTION:
            m, n, k, batch = sizes = sizes_on_rank(operation, share)
            compute = self._product(operation, sizes)
            if (
                self.channels_first
                and kind is OperationKind.CONVOLUTION
                and self.dtype(operation.dtype, operation.kind) in _TENSOR_CORES
            ):
                cast = self.moved(2 * (read + written), touched)
            if self.is_unaligned(operation, share):
                compute /= device.unaligned
            if kind is OperationKind.MATMUL:
                width = batch * ITEMSIZE.get(operation.dtype, 4)
                read, written = (m * k + k * n) * width, m * n * width
                if operation.dtype in _CAST:
                    written += m * n  # the product itself has 16 bits
                    of_input = of_gradient = _CAST_BYTES
                    if self.scales_anew:
                        of_input, of_gradient = _ANEW_BYTES["input"], _ANEW_BYTES["gradient"]
                    elements = (of_input if operation.phase is Phase.FORWARD else of_gradient) * m * k
                    elements += of_input * k * n if operation.phase is Phase.BACKWARD_WEIGHT else 0.0
                    cast = self.moved(elements, touched)
        elif kind is OperationKind.ATTENTION:
            length = max(1.0, operation.n.at(samples))
            if (curve := self.attention_lengths(operation.phase)) is not None:
                fraction = curve.at(length)
            else:
                fraction = self.attention_fraction(operation.phase)
                fraction *= self.attention_filled(length, operation.k.at(samples))
            compute = operation.flops.at(samples) / parts / (device.flops[self.dtype(operation.dtype)] * fraction)
        num_bytes = read + written
        if device.kind != "cpu":
            num_bytes += operation.reread_bytes.at(samples) / parts
            seconds = max(compute, self.moved(num_bytes, touched, operation.name))
        else:
            # A core computes on cached operands, plus the traffic from beyond the caches. Prefetching hides little of
            # it. A core reads a line of new memory before the write, unless it has read the line already. A stream
            # writes as many new bytes as it reads.
            if operation.name == "aten.addmm":  # the bias is expanded into the result, to which the product is added
                read, written = num_bytes, 2 * written
            in_place = operation.name.endswith("_") and operation.name not in _ANEW
            traffic = (read + (1 if in_place else 2) * written) / _STREAM_TRAFFIC
            memory = self.moved(traffic, touched)
            beyond = max(0.0, memory - traffic / (device.memory_bytes_per_second * device.memory.most))
            if operation.name in device.operators:
                compute = num_bytes / (device.memory_bytes_per_second * device.operators[operation.name])
            seconds = max(memory, compute + beyond if compute else 0.0)
        return Cost(seconds + cast + operation.launches * device.launch_seconds, host)

    def moved(self, num_bytes: float, touched: float, name: str = "", *, in_place: bool = False) -> float:
        """Return the seconds in which an operator of this name reads and writes `num_bytes`.

        `touched`: bytes that a step touches between two uses of a tensor. `in_place`: the operator allocates no memory.
        """
        if not num_bytes:
            return 0.0
        device = self.device
        place = num_bytes
        if device.kind == "cpu":  # operands left the caches or are new
            place = max(num_bytes, min(touched, STREAM_BYTES))
            place = min(place, STREAM_BYTES) if in_place else place
        fraction = device.memory.at(place)
        return num_bytes / (device.memory_bytes_per_second * min(fraction, device.operators.get(name, fraction)))

    def rewritten(self, num_bytes: float, touched: float, name: str) -> float:
        """Return the seconds of reading and writing `num_bytes`, if every written line was read before."""
        traffic = num_bytes / _STREAM_TRAFFIC if self.device.kind == "cpu" else num_bytes
        return self.moved(traffic, touched, name, in_place=True)

    def _product(self, operation: Operation, sizes: tuple[float, float, float, float]) -> float:
        """Return the seconds of a matmul or convolution, without memory traffic. `sizes`: m, n, k, batch."""
        device, dtype = self.device, self.dtype(operation.dtype, operation.kind)
        m, n, k, batch = sizes
        phase = "" if operation.phase is Phase.FORWARD else f"_{operation.phase.value}"
        if operation.window and (windows := device.windows.get(f"{dtype}{phase}")):
            channels, filters, taps, width, stride, padding = operation.window  # the nearest measured one counts
            key = nearest(tuple(windows), (channels, filters, taps, width, stride))
            *_, near_taps, near_width, near_stride = map(int, key.split("-"))
            inside = _inside(near_taps, near_width, near_stride, near_taps // 2) / _inside(taps, width, stride, padding)
            fraction = windows[key]
            for lanes in (channels, filters):  # share of lanes that are filled; few channels have kernels of their own
                fraction *= lanes / (_LANES * ceil(lanes / _LANES)) if lanes > _FEW_CHANNELS else 1.0
            rate = device.flops[dtype] * (fraction * min(1.0, inside))
            pixels = k if operation.phase is Phase.BACKWARD_WEIGHT else m
            weights_rate = device.window_weights.get(f"{dtype}{phase}", 0.0) * device.memory_bytes_per_second
            weights = ITEMSIZE[dtype] * m * n * k * batch / pixels / weights_rate if weights_rate else 0.0
            return 2.0 * m * n * k * batch / rate + weights
        if operation.kind is OperationKind.CONVOLUTION and device.convolution:
            curve = device.convolution.get(f"{dtype}{phase}") or device.convolution.get(dtype)
            if curve is not None:  # the measured curve: a library's convolutions depend on data reuse
                return 2.0 * m * n * k * batch / (device.flops[dtype] * curve.at(intensity(m, n, k)))
        seconds = matmul_seconds(device, sizes, dtype, device.matmul.get(dtype) or Curve())
        return seconds / (WINOGRAD if self.spares(operation) else 1.0)

    def is_unaligned(self, operation: Operation, share: Share) -> bool:
        """Return True for a 16-bit matmul on a GPU with rows that do not begin at multiples of 16 bytes.

        The library then uses slower kernels: NVIDIA, Matrix Multiplication Background User's Guide, "Requirements to
        use Tensor Cores". `unaligned` in gpus.toml is their relative speed.
        """
        if self.device.kind != "gpu" or self.device.unaligned == 1.0:
            return False
        return ITEMSIZE[self.dtype(operation.dtype, operation.kind)] == ITEMSIZE["bfloat16"] and bool(
            unaligned_rows(operation, share)
        )

    def spares(self, operation: Operation) -> bool:
        """Return True if Winograd's algorithm executes an operation, with `WINOGRAD` times fewer FLOPs."""
        return (
            operation.winograd
            and self.dtype(operation.dtype, operation.kind) == "float32"
            and self.device.multiprocessors > 0
        )

    def attention_lengths(self, phase: Phase) -> Curve | None:
        """Return the fraction of the peak by the number of positions that a row attends to; None if not measured."""
        return self.device.attention_lengths.get("flash2_" + ("forward" if phase is Phase.FORWARD else "backward"))

    def attention_fraction(self, phase: Phase) -> float:
        """Return the fraction of the peak that attention reaches with long rows and wide heads."""
        known, way = self.device.attention, "forward" if phase is Phase.FORWARD else "backward"
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
        if body not in self._distinct:
            places: dict[Operation, int] = {}
            order = []
            for operation in self.operations(body):  # without the fields that the seconds do not depend on
                name = operation.name if self.device.kind == "cpu" else ""
                priced = replace(operation, name=name, module="", saved_bytes=NOTHING, selected_bytes=NOTHING)
                if operation.kind is OperationKind.MEMORY:
                    priced = replace(priced, phase=Phase.FORWARD, flops=NOTHING, dtype="")
                order.append(places.setdefault(priced, len(places)))
            self._distinct[body] = [self._equal.setdefault(one, one) for one in places], order
        distinct, order = self._distinct[body]
        samples, costs = share.samples / share.context, []
        for one in distinct:
            parts = int(divided(one, share))
            key = id(one), samples, parts
            cost = self._costs.get(key)
            if cost is None:
                cost = self._costs[key] = self.operation(one, share if parts > 1 else Share(samples))
            costs.append(cost)
        return [costs[place] for place in order]

    def operations(self, body: Body) -> Iterable[Operation]:
        """Return the operations of a body as the program runs them: with fused chains and the layers' dtype."""
        operations = body.operations
        if self.fuses and self.device.kind == "gpu":
            # Inductor pads the rows of products itself (torch._inductor.config.shape_padding, which is on by default).
            operations = tuple(replace(o, rows=()) if o.rows else o for o in fused(operations))
        if not body.repeated or self.layers is None or self.layers not in self.device.flops:
            return operations
        wide = Phase.BACKWARD_WEIGHT if self.wide_weights else None
        return (
            replace(o, dtype=self.layers) if is_layer(o, self.casts_experts) and o.phase is not wide else o
            for o in operations
        )


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


# -------------------------------------------------------------------------------------------------- passes of a stage


class Pass(NamedTuple):
    """Seconds by term of one forward or backward pass over a unit or stage, on the device and on its host."""

    work: float = 0.0
    again: float = 0.0  # recomputation of the forward
    tensor: float = 0.0
    context: float = 0.0
    host: float = 0.0
    host_again: float = 0.0
    experts: float = 0.0

    @property
    def device_seconds(self) -> float:
        """Seconds of the pass on the device, where exchanges and work do not overlap."""
        return self.work + self.again + self.tensor + self.context + self.experts

    @property
    def seconds(self) -> float:
        """Seconds of the pass: the larger of device and host seconds, since both run at the same time."""
        return max(self.device_seconds, self.host + self.host_again)


class Passes:
    """Passes of one microbatch: forward, backward of inputs, and backward of weights (which may be deferred)."""

    def __init__(self, forward: Pass, backward_input: Pass, backward_weight: Pass) -> None:
        """Derive `backward`, the sum of both backward parts. Its seconds include `weight_seconds`."""
        self.forward, self.backward_input, self.backward_weight = forward, backward_input, backward_weight
        self.backward = Pass(*map(add, backward_input, backward_weight))
        self.forward_seconds, self.backward_seconds = forward.seconds, self.backward.seconds
        self.weight_seconds = backward_weight.seconds
        self.seconds = self.forward_seconds + self.backward_seconds
        # On the device alone; these seconds add up over units.
        self.device_seconds = forward.device_seconds + self.backward.device_seconds


def together(parts: Sequence[tuple[Passes, int]]) -> Passes:
    """Return the sum of all passes, each times its number."""
    sums = []
    for name in ("forward", "backward_input", "backward_weight"):
        whole: Sequence[float] = Pass()
        for passes, count in parts:
            terms: Pass = getattr(passes, name)
            whole = [before + seconds * count for before, seconds in zip(whole, terms, strict=True)]
        sums.append(Pass(*whole))
    return Passes(*sums)


class BodyWork(NamedTuple):
    """Passes of one unit without recomputation, and the costs that recomputation adds.

    `adding`: backward of weights that accumulates into the gradients of earlier microbatches.
    `again`: cost of the repeated operations, by recomputation mode ("full" or "selective").
    """

    forward: Pass
    backward_input: Pass
    backward_weight: Pass
    adding: Pass
    again: dict[str, Cost]


class StageCosts:
    """Costs of bodies on one device under one program, cached by the share of a sample."""

    def __init__(self, computer: DeviceModel, network: Network, program: Program) -> None:
        self.computer, self._network, self._program = computer, network, program
        self._bodies: dict[tuple[int, Share, str, bool], Passes] = {}
        self._stages: dict[tuple[Counts, Share, str, bool], Passes] = {}
        self._operators: dict[tuple[int, float, int, bool], tuple[Cost, ...]] = {}
        self._work: dict[tuple[int, Share], BodyWork] = {}
        self._places: dict[int, list[list[int]]] = {}  # indices of operations by phase, by body

    def stage(self, counts: Counts, share: Share, recompute: str, adds: bool) -> Passes:
        """Return the summed passes of a stage. `adds`: gradients accumulate into those of earlier microbatches."""
        key = counts, share, recompute, adds
        passes = self._stages.get(key)
        if passes is None:
            parts = [(self.body(body, share, recompute, adds), count) for body, count in counts]
            passes = self._stages[key] = together(parts)
        return passes

    def body(self, body: Body, share: Share, recompute: str, adds: bool) -> Passes:
        """Return the passes of one unit. The arguments are those of `stage`."""
        share = share.of(body, self._program.divides_ends)
        key = id(body), share, recompute, adds
        passes = self._bodies.get(key)
        if passes is not None:
            return passes
        work = self._work.get((id(body), share))
        if work is None:
            work = self._work[id(body), share] = self._work_of(body, share)
        backward, weights = work.backward_input, work.adding if adds else work.backward_weight
        if body.repeated and recompute != "none":
            again, tensor, context, experts = work.again[recompute], backward.tensor, backward.context, backward.experts
            if again.device and recompute == "full":
                tensor, context = tensor + work.forward.tensor, context * 2
            if recompute == "full" or self._program.selective == "products":  # rows are no results of products
                experts += work.forward.experts
            backward = Pass(backward.work, again.device, tensor, context, backward.host, again.host, experts)
        passes = self._bodies[key] = Passes(work.forward, backward, weights)
        return passes

    def _work_of(self, body: Body, share: Share) -> BodyWork:
        """Return the passes of a unit: its operators, its exchanges, and the host's starts of the exchanges."""
        computer, network, program = self.computer, self._network, self._program
        device, samples = computer.device, share.samples / share.context
        touched = computer.touched.at(samples)
        forward, backward, weights, selected = self._operators_of(body, share)
        tensor, starts = dict.fromkeys(Phase, 0.0), dict.fromkeys(Phase, 0)
        if share.tensor > 1:
            group = network.group(share.tensor, 1)  # its ranks are neighbours: the axis is the innermost one
            for exchange in body.exchanges:
                num_bytes = exchange.bytes.at(samples)
                if device.kind == "cpu":  # a sum works on a copy, and slices are joined by a copy
                    tensor[exchange.phase] += computer.moved(2 * num_bytes, touched)
                for kind in exchange.kinds(share.sequence):
                    tensor[exchange.phase] += network.serving(share.all_reduce, group).seconds(kind, num_bytes, group)
                starts[exchange.phase] += 2 if share.sequence else 1
        context = 0.0  # two all_to_alls over the heads per attention (inputs, output)
        if share.context > 1:
            group = network.group(share.context, share.tensor)
            for operation in body.operations:
                if operation.kind is OperationKind.ATTENTION and operation.phase is Phase.FORWARD:
                    for amount in (operation.read_bytes, operation.written_bytes):
                        context += network.seconds("all_to_all", amount.at(samples) / share.tensor, group)

        exchanges = [exchange_seconds(network, program, one, samples, share.tensor) for one in body.dispatches]
        of_experts = dict.fromkeys(Phase, 0.0)
        of_experts[Phase.FORWARD] = sum(forward for forward, _ in exchanges)
        of_experts[Phase.BACKWARD_INPUT] = sum(backward for _, backward in exchanges)
        if share.tensor > 1 and any(of_experts.values()):  # the ranks with equal tokens gather the results
            group = network.group(share.tensor, 1)
            whole_bytes = sum(one.num_bytes.at(samples) / one.chosen for one in body.dispatches)
            joined = network.seconds("all_gather", whole_bytes, group) * (not share.sequence)
            if program.expert_tensor > 1:  # each of them computes a part of an expert, for the rows of all
                rows = sum(one.num_bytes.at(samples) for one in body.dispatches)
                joined += sum(network.seconds(kind, rows, group) for kind in ("all_gather", "reduce_scatter"))
            of_experts[Phase.FORWARD] += joined
            of_experts[Phase.BACKWARD_INPUT] += joined

        def exposed(seconds: float, degree: int) -> float:
            if not program.overlaps_exchanges:
                return seconds
            return seconds / degree + program.contention * seconds * (1 - 1 / degree)

        def whole(cost: Cost, phase: Phase, of_context: float = 0.0) -> Pass:
            exchanged = exposed(tensor[phase], share.tensor)
            return Pass(cost.device, 0.0, exchanged, of_context, cost.host, experts=of_experts[phase])

        # Gradient accumulation: both gradients are read and the sum is written.
        trained = [w for w in body.weights if w.trainable]
        sizes = ((w.numel_of(share.tensor), w.itemsize, program.gradient_bytes or w.itemsize) for w in trained)
        num_bytes = sum(numel * (itemsize + 2 * gradient) for numel, itemsize, gradient in sizes)
        added = computer.moved(num_bytes, touched) + len(trained) * device.launch_seconds
        adding = Cost(weights.device + added, weights.host + len(trained) * device.dispatch_seconds)
        forward = forward._replace(host=forward.host + starts[Phase.FORWARD] * program.call_seconds)
        backward = backward._replace(host=backward.host + starts[Phase.BACKWARD_INPUT] * program.call_seconds)
        context = exposed(context, share.context)
        return BodyWork(
            whole(forward, Phase.FORWARD, context),
            whole(backward, Phase.BACKWARD_INPUT, context),
            whole(weights, Phase.BACKWARD_WEIGHT),
            whole(adding, Phase.BACKWARD_WEIGHT),
            {"full": forward, "selective": selected},
        )

    def _operators_of(self, body: Body, share: Share) -> tuple[Cost, ...]:
        """Return the cost of a unit's operators by phase, and of the operators that "selective" repeats."""
        key = id(body), share.samples / share.context, share.tensor, share.sequence
        if key not in self._operators:
            costs, operations = self.computer.each(body, share), body.operations
            if id(body) not in self._places:
                phases = [[i for i, o in enumerate(operations) if o.phase is phase] for phase in Phase]
                self._places[id(body)] = [*phases, repeated_operations(operations, self._program.selective)]
            sums = []
            for places in self._places[id(body)]:
                device = host = 0.0
                for cost in (costs[i] for i in places):
                    device += cost.device
                    host += cost.host
                sums.append(Cost(device, host))
            self._operators[key] = tuple(sums)
        return self._operators[key]


def repeated_operations(operations: Sequence[Operation], selective: str) -> list[int]:
    """Return the indices of the operations that selective recomputation repeats, see `Program.selective`."""
    forward = [(i, o) for i, o in enumerate(operations) if o.phase is Phase.FORWARD]
    if selective == "products":  # the other operations are cheap to repeat
        return [i for i, o in forward if o.kind is OperationKind.MEMORY]
    if selective == "alternate_products":
        products = [i for i, o in forward if o.kind is OperationKind.MATMUL]
        return [*(i for i, o in forward if o.kind is OperationKind.MEMORY), *products[1::2]]
    # all_but_attention: from the scores to their product with the values
    places = [n for n, (_, o) in enumerate(forward) if o.kind is OperationKind.MATMUL and o.batch.per_sample]
    if places:
        return [i for i, _ in forward[places[0] : places[-1] + 1]]
    return [i for i, o in forward if o.kind is OperationKind.ATTENTION]
