"""Inputs and output of the performance model: workload, program, a rank's share of a body, and prediction."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from math import ceil
from typing import Any, NamedTuple

from shoal.planner.profile.values import Body, Profile
from shoal.plans.plan import LayoutSection

ITEMSIZE = {"float64": 8, "float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "float4": 1}
# Parts of a step's seconds. Their sum is the step.
TERMS = (
    "compute",
    "launch",
    "recompute",
    "tensor",
    "context",
    "pipeline",
    "bubble",
    "gradients",
    "parameters",
    "optimizer",
    "data",
    "host",
)
LARGE_PARAMETER = 100_000  # elements; smaller ones stay whole (DeepSpeed's stage3_param_persistence_threshold)
# Parts of the peak bytes of the rank that needs most. Their sum is the peak.
CATEGORIES = (
    "parameters",
    "gathered",
    "gradients",
    "optimizer",
    "activations",
    "communication",
    "allocator",
    "reserved",
)


@dataclass(frozen=True)
class Workload:
    """One step of a job: its profile, and the global batch in samples and grains.

    `sample_seconds`: seconds to fetch a sample.
    `places`: modules before which the model can be cut into stages. None if unknown; cuts then fall between any units.
    """

    profile: Profile
    global_batch: int
    num_grains: int
    sample_seconds: float = 0.0
    places: tuple[str, ...] | None = None
    grain_size: int = field(init=False)  # samples per grain; the last grain may have fewer

    def __post_init__(self) -> None:
        object.__setattr__(self, "grain_size", ceil(self.global_batch / self.num_grains))


@dataclass(frozen=True)
class Program:
    """Behaviour of the program that executes the plan. The defaults describe shoal's own engine in eager mode.

    `gradient_bytes`: bytes per gradient element with its sum buffer; None takes the reduce dtype of the plan.
    `contention`: fraction of a hidden collective's time by which it slows the compute that hides it.
    `fragmentation`, `pipeline_fragmentation`: overhead of a GPU's allocator, as a fraction of the activations.
    `heap_share`: overhead of a CPU's allocator, as a fraction of all bytes of a rank. Freed memory stays reserved
    for the next step.
    """

    overlap: bool = True  # gradient sums overlap with the backward
    scatter_gradients: bool = False  # ZeRO-1: reduce_scatter and all_gather; else all_reduce and broadcast
    fast_float32: bool = False
    attention: str = "flash2"
    fuses: bool = False  # blocks are compiled: each chain of elementwise operators is one GPU kernel
    layers: str | None = None  # float8 or float4: layers of repeated blocks are cast before they multiply
    keeps_cast: bool = False  # a cast layer saves its cast input for the backward
    # What selective recomputation keeps: products | alternate_products (attention and every second) | all_but_attention
    selective: str = "products"
    cut: str = "balanced"  # or "equal" blocks, or "thresholds" (stage_split.py)
    scatter_messages: bool = False  # each tensor rank sends a part of an activation to the next stage
    shards_context: bool = False  # ZeRO divides states over context ranks too
    divides_ends: bool = False  # context and sequence parallelism also divide units outside of the blocks
    keeps_gathered: bool = (
        True  # sequence parallelism: column-parallel layers save their gathered input; else they gather again
    )
    gradient_bytes: float | None = None
    bucket_bytes: float = 0.0  # bytes of communication buckets per gradient element, beside the gradients
    buffer_bytes: float = 0.0  # bytes of further buffers of replicas, whatever the model
    master_bytes: float = 0.0  # bytes per element of a float32 copy in the optimizer, beside the state
    fused_optimizer: bool = False  # one kernel reads and writes everything once; else the profile counts
    gradient_passes: float = 3.0  # over the gradients before the update: norm, scaling, clipping
    host_seconds: float = 0.0  # per step on a GPU's host, besides operators; hidden while the device is behind
    own_buckets: bool = True  # shoal's buckets, with a small first and last one; else equal buckets
    # An exchange of tensor or context ranks runs in one part per rank and overlaps with the product or attention that
    # it feeds: only the first part is exposed.
    overlaps_exchanges: bool = False
    gathers_apart: bool = False  # ZeRO-3: one exposed gather per parameter of `LARGE_PARAMETER` elements or more
    slice_seconds: float = 0.0  # then: copy of one rank's part of a gathered or scattered parameter
    contention: float = 0.1
    call_seconds: float = 55e-6  # host seconds per collective: vtrain-single, tensor 2 against 1
    fragmentation: float = 0.04
    pipeline_fragmentation: float = 0.25  # activations of several microbatches
    heap_share: float = 0.35


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds and bytes of a step.

    `bubble`: fraction of the step. `flops_per_device`: FLOPs without recomputation.
    `kept_bytes`: peak bytes that autograd saves between forwards and backwards, by pipeline rank.
    `split`: first unit of each stage after the first.
    `mfu`: executed part of the FLOPs (Winograd's algorithm executes fewer) over the peak of the dtype that multiplies.
    This dtype is tf32 if tf32 serves for float32, but never the dtype that layers are cast to.
    """

    step_seconds: float
    terms: dict[str, float]
    memory: dict[str, float]
    peak_bytes: float
    fits: bool
    missing_bytes: float
    bubble: float
    flops_per_device: float
    mfu: float | None
    kept_bytes: tuple[int, ...] = ()
    split: tuple[str, ...] = ()


# ------------------------------------------------------------------------------------------------- a rank's share


class Share(NamedTuple):
    """One rank's share of a body: its microbatch in samples, and the degrees that divide each sample.

    A rank has samples / context samples: a part of the positions of a sample counts as that fraction of it.
    """

    samples: float
    tensor: int = 1
    sequence: bool = False
    context: int = 1
    all_reduce: str = "native"  # algorithm of the tensor axis

    def of(self, body: Body, divides_ends: bool) -> Share:
        """Return the share of one body. Context and sequence parallelism may divide only blocks."""
        return self if body.repeated or divides_ends else self._replace(context=1, sequence=False)


# ------------------------------------------------------------------------------------------- errors of published rows

# Error bars of predictions, from the errors of similar published rows (docs/planner.md). The command `python -m
# benchmarks.published errors` writes `published_errors.toml` from predictions of published rows, which use only the
# catalogue.

FEWEST_ROWS = 8  # fewest rows for a quantile
BEYOND = 2.0  # ratio of measured to predicted seconds above which a row is not in the quantiles
ANY = "any"
_APART = 3.0  # largest ratio of parameters to the nearest published model that counts as similar
_SIZES = ((1e9, "below 1 B parameters"), (1e10, "1 to 10 B parameters"))


class Likeness(NamedTuple):
    """Group of rows by the device's family, the model's size and the layout's kind. Each may be `ANY`."""

    family: str
    size: str
    layout: str

    def wider(self) -> Iterable[Likeness]:
        """Yield this group and its supersets, the narrowest first. The device matters most, the size least."""
        yield self
        yield self._replace(size=ANY)
        yield self._replace(size=ANY, layout=ANY)
        yield self._replace(family=ANY, size=ANY)
        yield Likeness(ANY, ANY, ANY)


class ErrorBar(NamedTuple):
    """Range of factors of the predicted seconds that contains four of five published steps of language models.

    `num_rows`: number of rows in the group `like`. `parameters`: sizes of its smallest and largest model. `num_beyond`:
    further rows that took over twice the predicted time, through stalls that no prediction covers.
    """

    low: float
    high: float
    num_rows: int
    num_beyond: int
    like: Likeness
    parameters: tuple[float, float]


def likeness(device: str, parameters: float, layout: LayoutSection) -> Likeness:
    """Return the group of a prediction for a model with this many parameters on a device of the catalogue."""
    family = re.split(r"[-_@ ]", device)[0].upper()
    size = next((name for most, name in _SIZES if parameters < most), "over 10 B parameters")
    if layout.pipeline > 1:
        kind = "pipeline"
    elif layout.tensor * layout.context > 1:
        kind = "tensor or context"
    elif layout.shard > 1:
        kind = "sharded"
    else:
        kind = "replicas"
    return Likeness(family, size, kind)


def error_bar(like: Likeness, parameters: float) -> ErrorBar | None:
    """Return the error bar of the narrowest group of the device with enough rows and similar model sizes.

    Returns None if no published row is similar.
    """
    for group in like.wider():
        if group.family != ANY and group in _groups():
            bar = _bar(group)
            if bar.parameters[0] / _APART <= parameters <= bar.parameters[1] * _APART:
                return bar
    return None


def of_device(like: Likeness) -> ErrorBar | None:
    """Return the error bar of all rows of the device, or None if there are none."""
    group = Likeness(like.family, ANY, ANY)
    return _bar(group) if group in _groups() else None


def _bar(group: Likeness) -> ErrorBar:
    row = _groups()[group]
    sizes = row["least_parameters"], row["most_parameters"]
    return ErrorBar(row["low"], row["high"], row["rows"], row["beyond"], group, sizes)


@cache
def _groups() -> Mapping[Likeness, Mapping[str, Any]]:
    text = files("shoal.planner.predict").joinpath("published_errors.toml").read_text(encoding="utf-8")
    return {Likeness(one["family"], one["size"], one["layout"]): one for one in tomllib.loads(text)["group"]}
