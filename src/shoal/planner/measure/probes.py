"""Benchmarks of a device for its roofline curves, of exchanges by the whole tensor's bytes, and their timer."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shoal.distributed.collectives.base import Team
from shoal.distributed.collectives.choose import open_collective
from shoal.distributed.collectives.shared_memory.process_group import open_group
from shoal.distributed.mesh import COLLECTIVE_TIMEOUT, Mesh
from shoal.hardware.detect import shares_memory
from shoal.hardware.values import CHANNELS_LAST, SHARED_MEMORY, STREAM_BYTES, intensity
from shoal.numerics.precision import ProductsInFloat32, channels_last, is_slow

Call = Callable[[], Any]
Make = Callable[[], Call]
# (input channels, output channels, taps per side, side of the output, stride).
Window = tuple[int, int, int, int, int]

# Sides of square matmuls.
_SIDES = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# (input channels, output channels, side of the filter, side of the image), by increasing intensity.
_IMAGES = (
    *((1, 6, 5, 28), (1, 64, 3, 28), (6, 16, 5, 14), (16, 32, 3, 28)),
    *((32, 32, 3, 28), (64, 64, 3, 14), (128, 128, 3, 14), (256, 256, 3, 14)),
)
# For CPUs.
_WINDOWS = (
    *((1, 16, 3, 28, 1), (1, 64, 3, 28, 1), (3, 64, 7, 32, 2), (16, 16, 3, 28, 1), (16, 64, 5, 14, 1)),
    *((32, 32, 3, 28, 1), (64, 64, 3, 28, 1), (128, 128, 3, 14, 1), (256, 256, 3, 7, 1), (512, 512, 3, 4, 1)),
    *((64, 128, 3, 14, 2), (256, 512, 3, 4, 2), (64, 128, 1, 14, 2), (256, 512, 1, 4, 2), (64, 256, 1, 14, 1)),
)
# Windows for channels-last images: layers of models for which that format is chosen.
_WINDOWS_LAST = tuple(window for window in _WINDOWS if max(window[:2]) <= 128 and window[2] > 1)
# Bytes of a stream. On a CPU the middle sizes consist of many alternating tensors, as in a step, and exceed the caches.
# For a single tensor of that size the system reallocates the pages, as the largest size shows.
_STREAMS = {
    "cpu": tuple(1 << power for power in (13, 15, 17, 19, 21, 23, 25, 27, 28)),
    "cuda": tuple(1 << power for power in (15, 18, 20, 22, 24, 26, 28, 29, 30)),
}
_TURN_BYTES = 1 << 22
_IMAGES_A_BATCH, _FEW_IMAGES = 32, 16
# With two images, reading the 9 MB of weights takes most of the time.
_WEIGHTS, _FEWEST_IMAGES = (512, 512, 3, 4, 1), 2
# A chain of nearly empty layers measures the cost of starting an operator, with views and bookkeeping. A profile counts
# one product and three backward operators for each layer.
LAYER_OPERATORS, _CHAIN, _CHAIN_WIDTH = 4, 8, 8
# Positions of attention by kind of device: large enough to hide the start-up, small enough for a core.
_POSITIONS = {"cpu": (64, 128, 256, 512, 1024), "cuda": (4096,)}
_TOKENS = {"cpu": 1024, "cuda": 4096}  # total over all sequences
_PHASES = {"": (), "_backward_input": (True, False, False), "_backward_weight": (False, True, False)}
# Sizes of exchanges in bytes; in shared memory, larger ones run at the same rate.
_SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28)
_SHARED_SIZES = _SIZES[:-1]

# Shortest sample, so that reading the clock does not matter.
_SAMPLE_SECONDS = 1e-4
_GRAPH_CALLS = 20
_FEWEST_SAMPLES, _MOST_SAMPLES = 3, 400
# Number of slices after which sampling stops even with fewer than `_FEWEST_SAMPLES`.
_PATIENCE = 2


@dataclass(frozen=True)
class Probe:
    """One benchmark: `make` returns the call to time, and one call does `work` (FLOPs, bytes or operators).

    `size`: position on a curve; probes of one `name` come in increasing size.
    `operand_bytes`: operands that are not in a core's own caches when a step reaches the call. On a CPU many such calls
    with separate operands alternate, enough to cover `turn_bytes`.
    """

    name: str
    work: float
    make: Make
    size: float = 0.0  # 0: the work
    graph: bool = True  # whether a GPU can replay many calls without the host
    ranks: int = 1 << 30  # the first `ranks` ranks take part; the other ranks' calls do nothing
    operand_bytes: float = 0.0  # 0: the same operands every time
    # More than a core's own caches, less than a host's last-level cache: the working set of a small model's step.
    turn_bytes: float = float(1 << 23)

    @property
    def place(self) -> float:
        """The size or, if it is 0, the work."""
        return self.size or self.work


def probes(device: torch.device, quick: bool) -> Iterator[Probe]:
    """Yield all probes of a device, or fewer if `quick`."""
    every = 2 if quick else 1
    yield from _overheads(device)
    for dtype in _dtypes(device):
        for side in _SIDES[::every]:

            def make(side: int = side, dtype: str = dtype) -> Call:
                a, b = (_tensor(side, side, device=device, dtype=dtype) for _ in range(2))
                return _as(dtype, device, lambda: torch.mm(a, b))

            num_bytes = 3.0 * side * side * _tensor(1, device=device, dtype=dtype).itemsize
            yield Probe(f"matmul.{dtype}", 2.0 * side**3, make, operand_bytes=num_bytes)
    if device.type == "cpu":
        yield from _windows(device)
    for dtype in _dtypes(device) if device.type == "cuda" else []:
        yield from list(_convolutions(device, dtype))[::every]
    yield from list(_streams(device))[::every]
    yield from _attentions(device)


def _dtypes(device: torch.device) -> list[str]:
    return ["float32", *(["tf32"] if device.type == "cuda" else []), "bfloat16", "float16"]


def _tensor(*shape: int, device: torch.device, dtype: str = "float32") -> torch.Tensor:
    kind: torch.dtype = torch.float32 if dtype == "tf32" else getattr(torch, dtype)
    return torch.randn(*shape, device=device).to(kind)


def _overheads(device: torch.device) -> Iterator[Probe]:
    """Yield the cost of a call itself: bare, and as a part of a forward and a backward."""

    def bare() -> Call:
        x = _tensor(1, device=device)
        return lambda: torch.relu(x)

    def product() -> Call:
        a = _tensor(1, 1, device=device)
        return lambda: torch.mm(a, a)

    def chain() -> Call:
        layers = nn.Sequential(*(nn.Linear(_CHAIN_WIDTH, _CHAIN_WIDTH) for _ in range(_CHAIN))).to(device)
        x = _tensor(1, _CHAIN_WIDTH, device=device).requires_grad_()
        gradient, leaves = torch.ones_like(x), [x, *layers.parameters()]

        def call() -> None:
            layers(x).backward(gradient)
            for tensor in leaves:
                tensor.grad = None

        return call

    yield Probe("overhead.stream", 1.0, bare, graph=False)
    yield Probe("overhead.matmul", 1.0, product, graph=False)
    yield Probe("dispatch", float(LAYER_OPERATORS * _CHAIN), chain, graph=False)
    if device.type == "cuda":
        yield Probe("launch", 1.0, bare)


def _convolution(
    phase: str, window: Window, images: int, tensor: Callable[..., torch.Tensor], *, last: bool = False
) -> tuple[float, Make]:
    """Return the FLOPs of one phase of a padded convolution, and its `make`; `last`: channels-last images."""
    channels, filters, taps, side, stride = window
    around, wanted = taps // 2, list(_PHASES[phase])

    def make() -> Call:
        x = tensor(images, channels, side * stride, side * stride)
        w = tensor(filters, channels, taps, taps)
        gradient = tensor(images, filters, side, side)
        if last:
            x, gradient = channels_last(x), channels_last(gradient)
        if not wanted:
            return lambda: F.conv2d(x, w, stride=stride, padding=around)
        rest = (None, [stride, stride], [around, around], [1, 1], False, [0, 0], 1, wanted)
        if last and wanted[1]:  # gradients of weights are accumulated in contiguous format
            return lambda: torch.ops.aten.convolution_backward(gradient, x, w, *rest)[1].contiguous()
        return lambda: torch.ops.aten.convolution_backward(gradient, x, w, *rest)

    return 2.0 * images * side * side * taps * taps * channels * filters, make


def _convolutions(device: torch.device, dtype: str) -> Iterator[Probe]:
    """Yield convolutions by phase. The implicit product is pixels x (taps x input channels) x output channels."""

    def probe(phase: str, image: tuple[int, int, int, int]) -> Probe:
        channels, filters, taps, side = image
        window = (channels, filters, taps, side, 1)
        size = intensity(_IMAGES_A_BATCH * side * side, taps * taps * channels, filters)
        work, make = _convolution(phase, window, _IMAGES_A_BATCH, partial(_tensor, device=device, dtype=dtype))
        return Probe(f"convolution.{dtype}{phase}", work, lambda: _as(dtype, device, make()), size=size)

    for phase in _PHASES:
        yield from (probe(phase, image) for image in _IMAGES)


def _windows(device: torch.device) -> Iterator[Probe]:
    def probe(name: str, phase: str, window: Window, images: int, kind: str = "float32") -> Probe:
        work, make = _convolution(phase, window, images, partial(_tensor, device=device), last=kind != "float32")
        return Probe(f"{name}.{kind}{phase}:{'-'.join(map(str, window))}", work, make)

    last = f"float32{CHANNELS_LAST}"
    yield from (probe("window", phase, window, _FEW_IMAGES, last) for phase in _PHASES for window in _WINDOWS_LAST)
    yield from (probe("window", phase, window, _FEW_IMAGES) for phase in _PHASES for window in _WINDOWS)
    yield from (probe("weights", phase, _WEIGHTS, _FEWEST_IMAGES) for phase in _PHASES)


def _streams(device: torch.device) -> Iterator[Probe]:
    def probe(num_bytes: int) -> Probe:
        take_turns = device.type == "cpu" and _TURN_BYTES < num_bytes <= STREAM_BYTES
        each = _TURN_BYTES if take_turns else num_bytes

        def make() -> Call:
            x = _tensor(each // 8, device=device)
            return lambda: torch.relu(x)

        if not take_turns:
            return Probe("stream", float(num_bytes), make)
        return Probe("stream", float(each), make, size=num_bytes, operand_bytes=each, turn_bytes=num_bytes)

    return (probe(num_bytes) for num_bytes in _STREAMS[device.type])


def alone(mesh: Mesh, quick: bool) -> list[Probe]:
    """Return streams of one rank while the host's other ranks wait, which show the cost of sharing the memory."""
    if mesh.device.type != "cpu" or mesh.world_size == 1:
        return []
    return [replace(probe, name="alone", ranks=1) for probe in list(_streams(mesh.device))[:: 2 if quick else 1]]


def _attentions(device: torch.device) -> Iterator[Probe]:
    """Yield fused attention by length: the forward, and both passes (the backward has 2.5 times the forward's FLOPs).

    It is causal on a CPU, as in a language model: its rate there includes how much masked work the kernel skips.
    """
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    heads, width, causal = 4, 64, device.type == "cpu"

    def probes(length: int) -> Iterator[Probe]:
        batch = max(1, _TOKENS[device.type] // length)
        work = (2.0 if causal else 4.0) * batch * heads * length * length * width

        def inputs() -> list[torch.Tensor]:
            return [_tensor(batch, heads, length, width, device=device, dtype=dtype) for _ in range(3)]

        def forward() -> Call:
            q, k, v = inputs()
            return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal)

        def both() -> Call:
            q, k, v = (x.requires_grad_() for x in inputs())
            gradient = torch.randn_like(q)
            return lambda: torch.autograd.grad(
                F.scaled_dot_product_attention(q, k, v, is_causal=causal), (q, k, v), gradient
            )

        yield Probe(f"attention.{dtype}.forward", work, forward, size=length)
        yield Probe(f"attention.{dtype}.both", 3.5 * work, both, size=length, graph=False)

    every = [probe for length in _POSITIONS[device.type] for probe in probes(length)]
    yield from sorted(every, key=lambda probe: probe.name)


def _as(dtype: str, device: torch.device, call: Call) -> Call:
    """Wrap the call as in a run: float32 with or without TF32; narrow products in float32 on CPUs without them."""
    if device.type == "cuda":
        if dtype not in ("tf32", "float32"):
            return call

        def switched() -> Any:
            for one in (torch.backends.cuda.matmul, torch.backends.cudnn.conv):  # type: ignore[attr-defined]
                one.fp32_precision = "tf32" if dtype == "tf32" else "ieee"
            return call()

        return switched
    if not is_slow(getattr(torch, dtype)):
        return call

    def widened() -> Any:
        with ProductsInFloat32():
            return call()

    return widened


def copies(device: torch.device, num_bytes: int = 1 << 26) -> Iterator[Probe]:
    """Yield a copy from pinned host memory to a GPU."""

    def make() -> Call:
        source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return lambda: target.copy_(source, non_blocking=True)

    if device.type == "cuda":
        yield Probe("host_copy", float(num_bytes), make, graph=False)


def exchanges(mesh: Mesh, quick: bool) -> Iterator[Probe]:
    """Yield exchanges of each kind in increasing sizes.

    Every rank must make and call the same ones in the same order. Collective: all ranks.
    """
    for kind in (*_COLLECTIVES, "send"):
        for size in _SIZES[::2] if quick else _SIZES:
            ranks = 2 if kind == "send" else mesh.world_size
            yield Probe(f"exchange.{kind}", float(size), partial(_exchange, kind, mesh, size), graph=False, ranks=ranks)


def algorithms(mesh: Mesh, quick: bool) -> Iterator[Probe]:
    """Yield all_reduces of shoal's own between processes that share memory. Collective: all ranks."""
    if mesh.device.type != "cpu" or not shares_memory(mesh.world_size):
        return
    opened = open_collective(SHARED_MEMORY, Team(), mesh.device)

    def make(size: int) -> Call:
        return partial(opened.all_reduce, opened.allocate(max(1, size // 4), torch.float32))

    for size in _SHARED_SIZES[:: 2 if quick else 1]:
        yield Probe(f"algorithm.{SHARED_MEMORY}", float(size), partial(make, size), graph=False)


def process_group(mesh: Mesh, quick: bool) -> Iterator[Probe]:
    """Yield torch's collectives through shared memory, on torch's own tensors. Collective: all ranks."""
    if mesh.device.type != "cpu" or not shares_memory(mesh.world_size):
        return
    group = open_group([range(mesh.world_size)], COLLECTIVE_TIMEOUT)
    for kind in _COLLECTIVES:
        for size in _SHARED_SIZES[:: 2 if quick else 1]:
            yield Probe(f"group.{kind}", float(size), partial(_exchange, kind, mesh, size, group), graph=False)


# torch is renaming these two functions; the new name is used if it exists.
_gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Callable[..., object] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")


def _exchange(kind: str, mesh: Mesh, num_bytes: int, group: dist.ProcessGroup | None = None) -> Call:
    """Return an exchange of a float32 tensor whose number of elements is a multiple of the ranks.

    "send" is a round trip between ranks 0 and 1 while the others wait: two sends per call.
    """
    whole = torch.zeros(max(1, num_bytes // 4 // mesh.world_size) * mesh.world_size, device=mesh.device)
    if kind == "all_reduce":
        return partial(dist.all_reduce, whole, group=group)
    if kind in ("all_gather", "reduce_scatter"):
        part = whole.chunk(mesh.world_size)[mesh.rank].clone()
        gathers = kind == "all_gather"
        return partial(_gather, whole, part, group=group) if gathers else partial(_scatter, part, whole, group=group)

    def round_trip() -> None:
        if mesh.rank == 0:
            dist.send(whole, 1)
            dist.recv(whole, 1)
        elif mesh.rank == 1:
            dist.recv(whole, 0)
            dist.send(whole, 0)

    return round_trip


# --------------------------------------------------------------------------------------------------------------- timer


def sample(probe: Probe, device: torch.device, slice_seconds: float) -> tuple[list[float], float]:
    """Return samples of one call's seconds, taken for about `slice_seconds` after a warm-up, and its least seconds.

    The second value decides what to try next: on a CPU it may be processor time divided by threads. With one CPU thread
    the samples are processor time too, which other programs do not affect.
    """
    clock = time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    call: Call
    calls = 1  # the probe's calls in one timed call
    if device.type == "cpu" and probe.operand_bytes:  # equal calls in turn, each with its own operands and result
        equal = [probe.make() for _ in range(max(1, int(probe.turn_bytes / probe.operand_bytes)))]
        results: list[Any] = [one() for one in equal]
        places = itertools.cycle(range(len(equal)))

        def next_one() -> None:
            place = next(places)
            results[place] = equal[place]()

        call = next_one
    else:
        call = probe.make()
        if device.type == "cuda" and probe.graph:  # many calls in one graph, which excludes the host
            call()
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(_GRAPH_CALLS):
                    call()
            call, calls = graph.replay, _GRAPH_CALLS
    _timed(call, 1, device)  # caches, allocator, a library's choice of algorithm
    began = time.process_time()
    once = _timed(call, 1, device)
    own = once if device.type == "cuda" else min(once, (time.process_time() - began) / torch.get_num_threads())
    repeats = max(1, min(10_000, int(_SAMPLE_SECONDS / max(once, 1e-9))))
    samples: list[float] = []
    begun = time.perf_counter()
    while len(samples) < _MOST_SAMPLES:
        samples.append(_timed(call, repeats, device, clock) / repeats / calls)
        slices = (time.perf_counter() - begun) / slice_seconds
        if slices > (1 if len(samples) >= _FEWEST_SAMPLES else _PATIENCE):
            break
    return samples, min(own, *samples)


def sample_together(probe: Probe, device: torch.device, count: int) -> list[float]:
    """Return the seconds of each of `count` calls that all ranks make together.

    Collective: the ranks of the probe.
    """
    call = probe.make()
    call()
    return [_timed(call, 1, device) for _ in range(count)]


def _timed(call: Call, repeats: int, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> float:
    begun = clock()
    for _ in range(repeats):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - begun
