"""Hardware description: devices, links and clusters as values in SI units, converted from and to TOML.

The numbers are in the TOML files of this folder, each with its source, or in a file that `shoal bench` wrote.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from itertools import pairwise
from math import inf, log
from typing import Annotated, Any, TypeVar, cast

from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer, TypeAdapter, ValidationError

from shoal.errors import HardwareError, nearest

# Axes along which each rank has only a part of the model.
DIVIDED = ("shard", "tensor", "pipeline")


def kind_of(device_type: str) -> str:
    """Return a device's kind, "gpu" or "cpu", for torch's device type."""
    return "gpu" if device_type == "cuda" else "cpu"


@dataclass(frozen=True)
class Curve:
    """Efficiency by size: linear in the logarithm of the size between the points, constant beyond them."""

    points: tuple[tuple[float, float], ...] = ((1.0, 1.0),)

    def at(self, size: float) -> float:
        """Return the fraction at `size`, in the unit of the points."""
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
    """Convert a list from TOML to a curve. Raises: ValueError."""
    if isinstance(value, list) and value and all(isinstance(p, list) and len(p) == 2 for p in value):
        sizes = [size for size, _ in value]
        are_numbers = all(type(x) in (int, float) and 0 <= x < inf for point in value for x in point)
        if are_numbers and sizes[0] > 0 and all(a < b for a, b in pairwise(sizes)):
            return Curve(tuple((float(size), float(fraction)) for size, fraction in value))
    raise ValueError("a list of [size, fraction], the sizes above 0 and growing")


def _whole(value: Any) -> Any:
    """Return the number, and refuse texts and booleans, which pydantic would accept. Raises: ValueError."""
    if isinstance(value, bool | str):
        raise ValueError("a whole number")
    return value


# Types of the fields in TOML.
Number = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Whole = Annotated[int, BeforeValidator(_whole), Field(ge=0)]
Count = Annotated[int, BeforeValidator(_whole), Field(ge=1)]
Points = Annotated[Curve, BeforeValidator(_curve), PlainSerializer(lambda curve: [list(p) for p in curve.points])]


def weight_bytes(window: str) -> float:
    """Return the bytes of a convolution's float32 weights, given its window's name."""
    channels, filters, taps, *_ = map(int, window.split("-"))
    return 4.0 * channels * filters * taps * taps


def intensity(m: float, n: float, k: float) -> float:
    """Return half the FLOPs per element that a product of m x k by k x n reads or writes."""
    return 1.0 / (1.0 / m + 1.0 / n + 1.0 / k)


@dataclass(frozen=True)
class Device:
    """One GPU, or the CPU cores that one process may use.

    `flops` is the dense peak of a dtype in FLOP/s (a multiply-add counts two). `matmul` is the fraction of it that a
    matmul reaches, by its FLOPs, before the waste of tiles, which follows from `multiprocessors` and `tile`. `memory`
    is the fraction of `memory_bytes_per_second` that an operation reaches, by the bytes that it reads and writes (above
    1 if a cache serves it).
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # for readers of TOML

    name: str
    kind: str  # "gpu" | "cpu"
    memory_bytes: Whole
    memory_bytes_per_second: Number
    flops: Mapping[str, Number]  # "float32", "bfloat16", "float16", "float8", "float4"; "tf32" if matmuls may use it
    matmul: Mapping[str, Points] = field(default_factory=dict)
    # Measured separately, else as a matmul: by `intensity`, since few channels slow a convolution of any FLOPs. Keys
    # are dtype and phase: "float32" (forward), "float32_backward_input", "float32_backward_weight".
    convolution: Mapping[str, Points] = field(default_factory=dict)
    # Replaces `convolution` on CPUs: {the same key: {window: fraction}}. A window, "channels in-out-taps-width-stride",
    # is a measured convolution; other convolutions are as fast as the nearest window.
    windows: Mapping[str, Mapping[str, Number]] = field(default_factory=dict)
    # By the same keys, the fraction of `memory_bytes_per_second` at which a convolution reads or writes its weights,
    # for any number of images. If a key is here, its `windows` exclude this time.
    window_weights: Mapping[str, Number] = field(default_factory=dict)
    # Fraction of the peak that fused attention reaches, by kernel and phase: "flash2_forward", "flash2_backward".
    attention: Mapping[str, Number] = field(default_factory=dict)
    # Replaces `attention` if measured by length, as on CPUs: over the positions to which a row attends.
    attention_lengths: Mapping[str, Points] = field(default_factory=dict)
    memory: Points = Curve()
    memory_alone: Points | None = None  # for a CPU that ranks share: `memory` while the others move nothing
    # For a CPU: operators whose computation takes longer than their memory traffic. By name ("aten.gelu"), the fraction
    # of `memory_bytes_per_second` at which they read and write cached data; "update": an optimizer's update.
    # Here and in `windows`, names with "_channels_last" are for images in that memory format.
    operators: Mapping[str, Number] = field(default_factory=dict)
    sustained: Number = 1.0  # of the matmul rate: what whole steps reach, for any shapes, since clocks fall
    sustained_dtypes: Mapping[str, Number] = field(default_factory=dict)  # replaces `sustained` for a named dtype
    # For a GPU, in 16 bits: the fraction of its rate that a product reaches if a row is not a multiple of 16 bytes.
    unaligned: Annotated[float, Field(strict=True, gt=0, le=1)] = 1.0
    multiprocessors: Whole = 0  # 0: no waves of tiles (a CPU)
    tile: tuple[Whole, Whole] = (128, 256)
    launch_seconds: Number = 0.0  # the least time of a kernel on the device
    dispatch_seconds: Number = 0.0  # the host's time for one operator in eager mode
    step_seconds: Number = 0.0  # for a CPU: the engine's time in a step besides the model's operators ...
    tensor_seconds: Number = 0.0  # ... and for each parameter
    host_bytes_per_second: Number = 0.0  # copy from pinned host memory; 0: no copy
    # The same by name, and `reserved_bytes`, for an axis that divides the model: "shard", "tensor", "pipeline".
    divided: Mapping[str, Mapping[str, Number]] = field(default_factory=dict)
    reserved_bytes: Whole = 0  # memory of the driver, the context and the communication library
    price_per_hour: Number | None = None  # US dollars
    watts: Number | None = None  # the power limit as sold, or the cap that is set
    guesses: tuple[str, ...] = ()  # notes on numbers that are neither published for this device nor measured
    sources: Mapping[str, str] = field(default_factory=dict)

    def with_channels_last(self) -> Device:
        """Return the device for images in channels-last format, as far as it was measured."""
        operators, windows = dict(self.operators), dict(self.windows)
        for name, rate in self.operators.items():
            operators[name.removesuffix(CHANNELS_LAST)] = rate if CHANNELS_LAST in name else operators[name]
        for kind in [kind for kind in self.windows if CHANNELS_LAST in kind]:  # others stay as channels first
            first = kind.replace(CHANNELS_LAST, "")
            windows[first] = {**windows.get(first, {}), **self.windows[kind]}
        return replace(self, operators=operators, windows=windows)

    def in_faster_format(self) -> Device:
        """Return the device with each operator's rate in its faster memory format."""
        last = self.with_channels_last()
        return replace(self, operators={name: max(rate, last.operators[name]) for name, rate in self.operators.items()})

    def beside(self, axis: str) -> tuple[float, float, float]:
        """Return a rank's `step_seconds`, `tensor_seconds`, `reserved_bytes`. `axis`: "" or one that divides models."""
        own = self.divided.get(axis, {})
        plain = {
            "step_seconds": self.step_seconds,
            "tensor_seconds": self.tensor_seconds,
            "reserved_bytes": self.reserved_bytes,
        }
        step, tensor, reserved = (max(own.get(name, 0.0), value) for name, value in plain.items())
        return step, tensor, reserved

    def sustained_at(self, dtype: str) -> float:
        """Return the fraction of a large product's rate that whole steps reach in a dtype."""
        return self.sustained_dtypes.get(dtype, self.sustained)


@dataclass(frozen=True)
class Link:
    """Interconnect between devices of one host, or network between hosts.

    `bytes_per_second`: what one device can send while it receives as much (within a host), or what all devices of a
    host send together (between hosts); as achieved, not as advertised. `latency_seconds`: time of one hop of a ring.
    `call_seconds`: time to start a collective. `bandwidth`: the fraction that a message reaches, by its bytes.
    `shared`: all devices share the link (a PCIe root, a CPU's memory), so n devices at once get an n-th each.

    Every size is that of the whole tensor: the input of all_reduce and reduce_scatter, the output of all_gather, the
    message of a send. Fractions exclude the time of latency and call, and refer to the bus bandwidth:
    2 (n-1)/n x size / seconds for all_reduce, (n-1)/n x size / seconds for the other two, size / seconds for a send.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # for readers of TOML

    name: str
    bytes_per_second: Number
    latency_seconds: Number
    call_seconds: Number = 0.0
    bandwidth: Points = Curve()
    collectives: Mapping[str, Points] = field(default_factory=dict)  # replaces `bandwidth` for a named collective
    counts: Mapping[str, Points] = field(default_factory=dict)  # factor by ranks (between: hosts), or "any"
    shared: Annotated[bool, Field(strict=True)] = False
    sources: Mapping[str, str] = field(default_factory=dict)

    def reached(self, kind: str, num_bytes: float, count: int) -> float:
        """Return the bus bandwidth in bytes/s that a collective (or "send") reaches among `count` ranks or hosts."""
        by_count = self.counts.get(kind, self.counts.get("any"))
        by_size = self.collectives.get(kind, self.bandwidth)
        return self.bytes_per_second * by_size.at(num_bytes) * (by_count.at(count) if by_count else 1.0)

    def best(self, kind: str, count: int) -> float:
        """Return the maximum of `reached` over all sizes."""
        by_size = self.collectives.get(kind, self.bandwidth)
        largest = max(by_size.points, key=lambda point: point[1])[0]
        return self.reached(kind, largest, count)

    def sum_seconds(self, num_bytes: float, count: int) -> float:
        """Return the seconds of a ring all_reduce among `count` ranks that only this link connects."""
        moved = (count - 1) / count * num_bytes / self.reached("all_reduce", num_bytes, count)
        return self.call_seconds + 2 * ((count - 1) * self.latency_seconds + moved)


# Names among a cluster's algorithms: sums in slots that ranks share, and a process group that copies in and out.
SHARED_MEMORY, PROCESS_GROUP = "shared_memory", "process_group"
# From this size on a CPU's caches do not matter; beyond it the curve of a CPU's memory shows page faults.
STREAM_BYTES = float(1 << 27)
CHANNELS_LAST = "_channels_last"


# Share of a device's memory that plans leave free. With this share no published run that ended out of memory is planned
# (docs/planner.md), although it covers only the prediction's own error.
MEMORY_MARGIN = 0.06


@dataclass(frozen=True)
class Cluster:
    """`num_hosts` hosts of `devices_per_host` devices each. A single device needs no link.

    `device` is a rank's device if every device has a rank. With fewer ranks on a host of CPU cores each rank gets more:
    `alternatives` has a rank's device by the number of ranks on a host, and `device_for` chooses. `algorithms`: the
    speed of all_reduce within a host by shoal's own algorithms; others are as fast as `within`.
    `kinds`: the parts of a cluster with several kinds of devices, in the order of its ranks. `device`,
    `devices_per_host` and `within` are then those of the first kind, unless one host has all kinds (`num_hosts` is 1).
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # for readers of TOML

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
    kinds: tuple[Cluster, ...] = ()

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        if self.kinds:
            return sum(kind.num_devices for kind in self.kinds)
        return self.devices_per_host * self.num_hosts

    def with_device(self, change: Callable[[Device], Device]) -> Cluster:
        """Return the cluster with a change of its device, and of that of each kind."""
        return replace(self, device=change(self.device), kinds=tuple(kind.with_device(change) for kind in self.kinds))

    def usable_bytes(self, device: Device) -> float:
        """Return the bytes of a device's memory that a plan may use."""
        return device.memory_bytes * (1.0 - self.memory_margin)

    def device_for(self, ranks_per_host: int) -> Device:
        """Return the device of each of `ranks_per_host` ranks; the next larger measured count applies."""
        counts = sorted(n for n in self.alternatives if n >= ranks_per_host)
        if counts and (ranks_per_host < self.devices_per_host or counts[0] == ranks_per_host):
            return self.alternatives[counts[0]]
        return self.device


T = TypeVar("T", Cluster, Device, Link)
# By the kind of pydantic's error; messages of other kinds are shown unchanged.
_WANTED = {
    "dataclass_type": "a name of the catalogue or a table",
    "dict_type": "a table",
    "tuple_type": "a list",
    "string_type": "a text",
    "bool_type": "true or false",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
}
# The classes of a cluster's tables.
_KINDS = {"device": Device, "alternatives": Device, "within": Link, "between": Link, "algorithms": Link}


def checked(kind: type[T], table: Mapping[str, Any], source: str) -> T:
    """Convert a table to a value. Raises: HardwareError with all mistakes, each under the name of its key."""
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
    """Return the TOML table of a cluster or a device, without default values."""
    table: dict[str, Any] = _adapter(cast(Hashable, type(value))).dump_python(value, mode="json", exclude_defaults=True)
    return table


@cache  # lazy: detection alone reads no table
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
