"""Hardware description: devices, links and clusters as values in SI units, converted from and to TOML.

Their numbers are in the TOML files beside this one, each with its source, or in a file that `shoal bench` wrote.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from itertools import pairwise
from math import inf, log
from typing import Annotated, Any, TypeVar, cast

from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer, TypeAdapter, ValidationError

from shoal.errors import HardwareError, nearest

# Axes whose ranks have a part of the model each.
DIVIDED = ("shard", "tensor", "pipeline")


def kind_of(device_type: str) -> str:
    """A device's kind, "gpu" or "cpu", from the type that torch gives it."""
    return "gpu" if device_type == "cuda" else "cpu"


@dataclass(frozen=True)
class Curve:
    """Efficiency by size: linear between its points in the size's logarithm, constant beyond them."""

    points: tuple[tuple[float, float], ...] = ((1.0, 1.0),)

    def at(self, size: float) -> float:
        """The fraction at `size`, in the unit of the points."""
        place = bisect_right(self._sizes, size)
        if place == 0 or place == len(self._sizes):
            return self.points[max(0, place - 1)][1]
        (x0, y0), (x1, y1) = self.points[place - 1], self.points[place]
        return y0 + (y1 - y0) * log(size / x0) / log(x1 / x0)

    @cached_property
    def most(self) -> float:
        """The largest fraction of any size."""
        return max(fraction for _, fraction in self.points)

    @cached_property
    def _sizes(self) -> list[float]:
        return [x for x, _ in self.points]


def _curve(value: Any) -> Curve:
    """A curve from a list of TOML's. Raises: ValueError."""
    if isinstance(value, list) and value and all(isinstance(p, list) and len(p) == 2 for p in value):
        sizes = [size for size, _ in value]
        are_numbers = all(type(x) in (int, float) and 0 <= x < inf for point in value for x in point)
        if are_numbers and sizes[0] > 0 and all(a < b for a, b in pairwise(sizes)):
            return Curve(tuple((float(size), float(fraction)) for size, fraction in value))
    raise ValueError("a list of [size, fraction], the sizes above 0 and growing")


def _whole(value: Any) -> Any:
    """A number; pydantic would take a text, or true, for a whole one too. Raises: ValueError."""
    if isinstance(value, bool | str):
        raise ValueError("a whole number")
    return value


# As they stand in TOML.
Number = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Whole = Annotated[int, BeforeValidator(_whole), Field(ge=0)]
Count = Annotated[int, BeforeValidator(_whole), Field(ge=1)]
Points = Annotated[Curve, BeforeValidator(_curve), PlainSerializer(lambda curve: [list(p) for p in curve.points])]


def weight_bytes(window: str) -> float:
    """Bytes of the float32 weights of a convolution, by its window's name."""
    channels, filters, taps, *_ = map(int, window.split("-"))
    return 4.0 * channels * filters * taps * taps


def intensity(m: float, n: float, k: float) -> float:
    """Half the FLOPs for each element that a product of m x k by k x n reads or writes."""
    return 1.0 / (1.0 / m + 1.0 / n + 1.0 / k)


@dataclass(frozen=True)
class Device:
    """One GPU, or the CPU cores that one process may use.

    `flops` is the dense peak of a dtype in FLOP/s (a multiply-add counts two); `matmul` the fraction of it that a
    matmul of so many FLOPs reaches, before the waste of tiles that `multiprocessors` and `tile` tell. `memory` is the
    fraction of `memory_bytes_per_second` that an operation reading and writing so many bytes reaches (above 1 where a
    cache serves it).
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # of readers of TOML

    name: str
    kind: str  # "gpu" | "cpu"
    memory_bytes: Whole
    memory_bytes_per_second: Number
    flops: Mapping[str, Number]  # "float32", "bfloat16", "float16", "float8", "float4"; "tf32" where matmuls may use it
    matmul: Mapping[str, Points] = field(default_factory=dict)
    # Where measured apart, else as a matmul: over `intensity`, since few channels slow a convolution of any FLOPs. By
    # dtype and phase: "float32" (forward), "float32_backward_input", "float32_backward_weight".
    convolution: Mapping[str, Points] = field(default_factory=dict)
    # In its place on CPUs: {the same name: {window: fraction}}. A window is "channels in-out-taps-width-stride" of a
    # convolution that was measured; others are as fast as the nearest.
    windows: Mapping[str, Mapping[str, Number]] = field(default_factory=dict)
    # By the same names, the fraction of `memory_bytes_per_second` at which such a convolution takes in or gives out its
    # weights, however few the images. Where it is here, `windows` are without it.
    window_weights: Mapping[str, Number] = field(default_factory=dict)
    # Fraction of the peak that fused attention reaches, by kernel and phase: "flash2_forward", "flash2_backward".
    attention: Mapping[str, Number] = field(default_factory=dict)
    # In its place where measured by length, as on CPUs: over the positions that a row attends to.
    attention_lengths: Mapping[str, Points] = field(default_factory=dict)
    memory: Points = Curve()
    memory_alone: Points | None = None  # of a CPU that ranks share: the same while the others move nothing
    # Of a CPU: operators that compute longer than they move. By name ("aten.gelu") the fraction of
    # `memory_bytes_per_second` at which they take in and give out what is in the caches; "update": an optimizer's.
    # Here and in `windows` names with "_channels_last" are of images that lie in memory so.
    operators: Mapping[str, Number] = field(default_factory=dict)
    sustained: Number = 1.0  # of that: what the products of a whole step reach, whatever their shapes, as clocks fall
    sustained_dtypes: Mapping[str, Number] = field(default_factory=dict)  # in its place for a named dtype
    # Of a GPU, in 16 bits: what a product reaches of its rate where a row of a matrix is no multiple of 16 bytes.
    unaligned: Annotated[float, Field(strict=True, gt=0, le=1)] = 1.0
    multiprocessors: Whole = 0  # 0: no waves of tiles (a CPU)
    tile: tuple[Whole, Whole] = (128, 256)
    launch_seconds: Number = 0.0  # the least time of a kernel on the device
    dispatch_seconds: Number = 0.0  # the host's time for one operator in eager mode
    step_seconds: Number = 0.0  # of a CPU: what the engine does in a step besides the model's operators ...
    tensor_seconds: Number = 0.0  # ... and for each parameter
    host_bytes_per_second: Number = 0.0  # copy from pinned host memory; 0: no copy
    # The same by name, and `reserved_bytes`, of an axis that divides the model: "shard", "tensor", "pipeline".
    divided: Mapping[str, Mapping[str, Number]] = field(default_factory=dict)
    reserved_bytes: Whole = 0  # of the memory, held by the driver, the context and the communication library
    price_per_hour: Number | None = None  # US dollars
    watts: Number | None = None  # the most that it draws: its power limit as sold, or the cap that is set
    guesses: tuple[str, ...] = ()  # what is neither published of this device nor measured, for whoever reads an answer
    sources: Mapping[str, str] = field(default_factory=dict)

    def with_channels_last(self) -> Device:
        """The device for images with their channels last, as far as that was measured."""
        operators, windows = dict(self.operators), dict(self.windows)
        for name, rate in self.operators.items():
            operators[name.removesuffix(CHANNELS_LAST)] = rate if CHANNELS_LAST in name else operators[name]
        for kind in [kind for kind in self.windows if CHANNELS_LAST in kind]:  # of other windows as channels first
            first = kind.replace(CHANNELS_LAST, "")
            windows[first] = {**windows.get(first, {}), **self.windows[kind]}
        return replace(self, operators=operators, windows=windows)

    def in_faster_format(self) -> Device:
        """The device for images in whichever memory format an operator is faster."""
        last = self.with_channels_last()
        return replace(self, operators={name: max(rate, last.operators[name]) for name, rate in self.operators.items()})

    def beside(self, axis: str) -> tuple[float, float, float]:
        """`step_seconds`, `tensor_seconds`, `reserved_bytes` of a rank; `axis`: one that divides its model, or ""."""
        own = self.divided.get(axis, {})
        plain = {
            "step_seconds": self.step_seconds,
            "tensor_seconds": self.tensor_seconds,
            "reserved_bytes": self.reserved_bytes,
        }
        step, tensor, reserved = (max(own.get(name, 0.0), value) for name, value in plain.items())
        return step, tensor, reserved

    def sustained_at(self, dtype: str) -> float:
        """The fraction of a large product's rate that whole steps reach in a dtype."""
        return self.sustained_dtypes.get(dtype, self.sustained)


@dataclass(frozen=True)
class Link:
    """An interconnect between devices of one host, or a network between hosts.

    `bytes_per_second`: what one device can send while it receives as much (within a host), or what all devices of a
    host send together (between hosts); as achieved, not as printed. `latency_seconds`: of one hop of a ring.
    `call_seconds`: of starting a collective at all. `bandwidth`: the fraction reached by a message of so many bytes.
    `shared`: all devices share it (a PCIe root, a CPU's memory), so n at once get an n-th each.

    Every size is that of the whole tensor: what all_reduce sums, what all_gather ends with, what reduce_scatter starts
    from, what is sent. Fractions hold after the time that latency and call take, and are of the bus bandwidth:
    2 (n-1)/n x size / seconds for all_reduce, (n-1)/n x size / seconds for the other two, size / seconds for a send.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # of readers of TOML

    name: str
    bytes_per_second: Number
    latency_seconds: Number
    call_seconds: Number = 0.0
    bandwidth: Points = Curve()
    collectives: Mapping[str, Points] = field(default_factory=dict)  # in place of `bandwidth` for a named collective
    counts: Mapping[str, Points] = field(default_factory=dict)  # times the fraction by ranks (between: hosts), or "any"
    shared: Annotated[bool, Field(strict=True)] = False
    sources: Mapping[str, str] = field(default_factory=dict)

    def reached(self, kind: str, num_bytes: float, count: int) -> float:
        """Bytes per second of bus bandwidth that a collective (or "send") reaches among `count` ranks, or hosts."""
        by_count = self.counts.get(kind, self.counts.get("any"))
        by_size = self.collectives.get(kind, self.bandwidth)
        return self.bytes_per_second * by_size.at(num_bytes) * (by_count.at(count) if by_count else 1.0)

    def best(self, kind: str, count: int) -> float:
        """The most that `reached` is for any size."""
        by_size = self.collectives.get(kind, self.bandwidth)
        largest = max(by_size.points, key=lambda point: point[1])[0]
        return self.reached(kind, largest, count)

    def sum_seconds(self, num_bytes: float, count: int) -> float:
        """Seconds of an all_reduce among `count` ranks that this link alone connects, by a ring."""
        moved = (count - 1) / count * num_bytes / self.reached("all_reduce", num_bytes, count)
        return self.call_seconds + 2 * ((count - 1) * self.latency_seconds + moved)


# Names among a cluster's algorithms: sums in slots that ranks share, and a process group that copies in and out.
SHARED_MEMORY, PROCESS_GROUP = "shared_memory", "process_group"
# From here on a CPU's caches do not matter; beyond it the curve of a CPU's memory is of page faults.
STREAM_BYTES = float(1 << 27)
CHANNELS_LAST = "_channels_last"


# Of a device's memory, left free by plans: with it none of the published runs that ended out of memory is planned
# (docs/planner.md), though it is what a prediction's own error leaves open and no more.
MEMORY_MARGIN = 0.06


@dataclass(frozen=True)
class Cluster:
    """`num_hosts` hosts of `devices_per_host` devices each. A lone device has no use for a link.

    `device` is what a rank gets where every device has one. Fewer ranks on a host of CPU cores get more of it each:
    `alternatives` has what a rank gets where so many run on a host, and `device_for` chooses. `algorithms`: how fast
    all_reduce is within a host by an algorithm of shoal's own; what is not there is as fast as `within`.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # of readers of TOML

    name: str
    device: Device
    devices_per_host: Count = 1
    num_hosts: Count = 1
    within: Link | None = None
    between: Link | None = None
    storage_bytes_per_second: Number | None = None  # writing checkpoints, per host
    mean_hours_between_failures: Number | None = None  # of one device
    memory_margin: Annotated[float, Field(strict=True, ge=0, lt=1)] = MEMORY_MARGIN  # of each device's memory
    prices: Mapping[str, Number] = field(default_factory=dict)
    alternatives: Mapping[Annotated[int, Field(ge=1)], Device] = field(default_factory=dict)
    algorithms: Mapping[str, Link] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def num_devices(self) -> int:
        """All devices."""
        return self.devices_per_host * self.num_hosts

    def usable_bytes(self, device: Device) -> float:
        """Bytes of a device's memory that a plan may need."""
        return device.memory_bytes * (1.0 - self.memory_margin)

    def device_for(self, ranks_per_host: int) -> Device:
        """The device of one rank where so many run on a host; of counts not measured, the next larger one's."""
        counts = sorted(n for n in self.alternatives if n >= ranks_per_host)
        if counts and (ranks_per_host < self.devices_per_host or counts[0] == ranks_per_host):
            return self.alternatives[counts[0]]
        return self.device


T = TypeVar("T", Cluster, Device, Link)
# By the kind of pydantic's error; others say it themselves.
_WANTED = {
    "dataclass_type": "a name of the catalogue or a table",
    "dict_type": "a table",
    "tuple_type": "a list",
    "string_type": "a text",
    "bool_type": "true or false",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
}
# What a cluster's tables are of.
_KINDS = {"device": Device, "alternatives": Device, "within": Link, "between": Link, "algorithms": Link}


def checked(kind: type[T], table: Mapping[str, Any], source: str) -> T:
    """The value in a table. Raises: HardwareError with all of its mistakes, each under the name of its key."""
    try:
        value: T = _adapter(cast(Hashable, kind)).validate_python(table)
        return value
    except ValidationError as error:
        raise HardwareError(
            given=source,
            conflict="\n".join(_mistake(item, kind) for item in error.errors(include_url=False)),
            remedy="mend these keys; docs/hardware.md describes the format",
        ) from None


def to_table(value: Cluster | Device) -> dict[str, Any]:
    """The TOML table of a cluster or a device; what is as by default is left out."""
    table: dict[str, Any] = _adapter(cast(Hashable, type(value))).dump_python(value, mode="json", exclude_defaults=True)
    return table


@cache  # who only asks what is here reads no table
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _mistake(item: Any, kind: type[Any]) -> str:
    path = [str(part) for part in item["loc"] if part != "[key]"]
    where = ".".join(path)
    if item["type"] == "missing":
        return f"{where} is missing"
    if item["type"] == "unexpected_keyword_argument":
        known = [field.name for field in fields(_KINDS.get(path[0], kind) if path[1:] else kind)]
        return f"{where} is unknown{nearest(path[-1], known)}"
    said = item["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return f"{where} = {item['input']!r:.60} is not {_WANTED.get(item['type'], said)}"
