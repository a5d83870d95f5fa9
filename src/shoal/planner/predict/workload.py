"""Workload, program and prediction: input and output of the performance model."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from shoal.planner.profile.values import Profile

# Seconds of a step by what they are spent on; they sum to the step.
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
# Bytes of the rank that needs most, at its peak; they sum to the peak.
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

    `sample_seconds`: to fetch a sample. `places`: before which modules the model can be cut into stages; None where
    that is not known, and it is cut between any units.
    """

    profile: Profile
    global_batch: int
    num_grains: int
    sample_seconds: float = 0.0
    places: tuple[str, ...] | None = None

    @property
    def grain_size(self) -> int:
        """Samples of a grain; the last one may have fewer."""
        return ceil(self.global_batch / self.num_grains)


@dataclass(frozen=True)
class Program:
    """Behaviour of the program that executes the plan. The defaults are shoal's own engine, in eager mode.

    `gradient_bytes`: bytes an element of gradient and of the buffer that sums it, None for what the plan's precision
    gives. `contention`: the share of a hidden collective's time by which it slows the compute that hides it.
    `cut`: which blocks a stage has.
    `fragmentation`, `pipeline_fragmentation`: what a GPU's allocator holds beside the activations, as a part of them;
    `heap_share`: what a CPU's holds beside all that a rank has, since freed memory is kept for the next step.
    """

    overlap: bool = True  # gradients are summed while the backward goes on
    scatter_gradients: bool = False  # ZeRO-1: reduce_scatter and all_gather; else all_reduce and broadcast
    fast_float32: bool = False
    attention: str = "flash2"
    fuses: bool = False  # blocks are compiled: chains of their elementwise operators are one kernel each on a GPU
    layers: str | None = None  # float8 or float4: what layers of repeated blocks are cast to before they multiply
    keeps_cast: bool = False  # such a layer keeps its input as it was cast, for the backward
    # What selective recomputation keeps: products | alternate_products (attention and every second) | all_but_attention
    selective: str = "products"
    cut: str = "balanced"  # or "equal" blocks, or "thresholds" (stage_split.py)
    scatter_messages: bool = False  # between stages tensor ranks, which all have it, send a part of an activation each
    shards_context: bool = False  # ZeRO divides states over context ranks too
    divides_ends: bool = False  # context and sequence parallelism divide what is outside of the blocks too
    keeps_gathered: bool = True  # under sequence parallelism, what a column-parallel layer gathered; else again
    gradient_bytes: float | None = None
    bucket_bytes: float = 0.0  # an element, in which gradients travel between ranks, beside the gradients
    buffer_bytes: float = 0.0  # of buffers beside these, of one size whatever the model, where replicas sum
    master_bytes: float = 0.0  # an element that the optimizer keeps beside the profile's state: a float32 copy
    fused_optimizer: bool = False  # one kernel reads and writes everything once; else as the profile says
    gradient_passes: float = 3.0  # over the gradients before the update: their norm, and what scales and clips them
    host_seconds: float = 0.0  # of a step on a GPU's host besides the model's operators, beside a device that is behind
    own_buckets: bool = True  # shoal's, of which the first and the last are small; else equal ones
    # An exchange of tensor or context ranks runs in as many parts as there are ranks, beside the product or attention
    # that it feeds: only the first part is waited for.
    overlaps_exchanges: bool = False
    gathers_apart: bool = False  # ZeRO-3: each parameter of `LARGE_PARAMETER` by itself, which nothing hides
    slice_seconds: float = 0.0  # there: of copying one rank's part of a gathered or scattered parameter
    contention: float = 0.1
    call_seconds: float = 55e-6  # of the host, to start one collective: vtrain-single, tensor 2 against 1
    fragmentation: float = 0.04
    pipeline_fragmentation: float = 0.25  # where the activations of several microbatches come and go
    heap_share: float = 0.35


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds and bytes of a step. `bubble` is a fraction of it; `flops_per_device` counts no recomputation.

    `kept_bytes`: what autograd keeps at its peak between forwards and backwards, by the rank of a pipeline.
    `split`: the first unit of each stage after the first, as the stages were cut.
    `mfu`: these FLOPs, as far as they are executed (Winograd's algorithm does with fewer), over the peak of the dtype
    that multiplies them (tf32 where that serves for float32; not that which layers are cast to).
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
