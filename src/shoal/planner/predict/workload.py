"""Inputs and output of the performance model: workload, program, a rank's share of a body, and prediction.

The units of a workload's model are divided into pipeline stages between modules before which the engine can cut. The
stages follow the names in a plan, have equally many blocks, or are balanced by seconds.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib.resources import files
from itertools import chain, groupby, islice, pairwise, repeat
from math import ceil
from typing import Any, NamedTuple, TypeVar

from shoal.planner.profile.values import Amount, Body, Phase, Profile, Unit
from shoal.plans.plan import Layout

ITEMSIZE = {"float64": 8, "float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "float4": 1}
# Parts of a step's seconds. Their sum is the step.
TERMS = (
    *("compute", "launch", "recompute", "tensor", "context", "experts", "pipeline", "bubble"),
    *("gradients", "parameters", "optimizer", "data", "host"),
)
LARGE_PARAMETER = 100_000  # elements; smaller ones stay whole (DeepSpeed's stage3_param_persistence_threshold)
# Parts of the peak bytes of the rank that needs most. Their sum is the peak.
CATEGORIES = (
    *("parameters", "gathered", "gradients", "optimizer"),
    *("activations", "communication", "allocator", "reserved"),
)


@dataclass(frozen=True)
class Workload:
    """One step of a job: its profile, and the global batch in samples and grains.

    `sample_seconds`: seconds to fetch a sample.
    `places`: modules before which the model can be cut into stages. None if unknown; cuts then fall between any units.
    `output_bytes`: bytes of a sample's outputs that a loss over the global batch gathers.
    `imbalance`: rows of the busiest rank over the mean of the ranks that divide experts. 1 is balanced routing.
    """

    profile: Profile
    global_batch: int
    num_grains: int
    sample_seconds: float = 0.0
    places: tuple[str, ...] | None = None
    output_bytes: float = 0.0
    imbalance: float = 1.0
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
    fast_convolutions: bool = True  # float32 convolutions on tensor cores as tf32, torch's default
    channels_first: bool = True  # images of a plan without `channels_last`: tensor cores copy them to that format
    fuses: bool = False  # the model is compiled: each chain of elementwise operators is one GPU kernel
    layers: str | None = None  # float8 or float4: layers of repeated blocks are cast before they multiply
    keeps_cast: bool = False  # a cast layer saves its cast input for the backward
    scales_anew: bool = False  # a cast reads the tensor's largest element first; the backward casts the input again
    casts_experts: bool = False  # products of stacked experts are cast too
    wide_weights: bool = False  # gradients of cast layers' weights stay in the dtype of the compute
    # What selective recomputation keeps: products | alternate_products (attention and every second) | all_but_attention
    selective: str = "products"
    cut: str = "balanced"  # or "equal" blocks, or `thresholds`
    scatter_messages: bool = False  # each tensor rank sends a part of an activation to the next stage
    shards_context: bool = False  # ZeRO divides states over context ranks too
    dispatch: str = "all_to_all"  # how rows travel to experts, see `experts.py`
    dispatch_share: float = 0.5  # fraction of the bandwidth within a host that an all_to_all of rows reaches (fitted)
    shards_experts: bool = False  # ZeRO divides experts over the ranks with the same ones; else each keeps its experts
    expert_tensor: int = 1  # tensor ranks that divide each expert
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
    `split`: first unit of each stage after the first. `fullest_kind`: index of the fullest rank's kind of devices.
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
    fullest_kind: int = 0


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


def likeness(device: str, parameters: float, layout: Layout) -> Likeness:
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


# Units that no cut divides. A stage is a run of segments.
Segment = tuple[Unit, ...]


def segments(units: Sequence[Unit], places: Sequence[str] | None) -> tuple[Segment, ...]:
    """Return the units between the places, in order. Each unit is a segment if `places` is None.

    A unit that is no block and has places within it is divided there, by the modules of its operations.
    """
    if places is None:
        return tuple((unit,) for unit in units)
    segments: list[Segment] = []
    left = list(places)
    for unit in units:
        for part in _divided(unit, places):
            # The first part within a place begins there. Of nested lists the outer one is the place.
            start = next((place for place in left if _within(part.name, place)), None)
            if start is not None:
                left.remove(start)
            if segments and start is None:
                segments[-1] = (*segments[-1], part)
            else:
                segments.append((part,))
    return tuple(segments)


def _within(module: str, place: str) -> bool:
    return module == place or module.startswith(f"{place}.")


def _divided(unit: Unit, places: Sequence[str]) -> tuple[Unit, ...]:
    """Return the parts of a unit. The first part keeps the unit's name."""
    body = unit.body
    if body.repeated:
        return (unit,)

    def innermost(module: str) -> int:
        """Return 1 + the index of the innermost place that contains a module, or 0 if none does."""
        return max((number for number, place in enumerate(places, 1) if _within(module, place)), default=0)

    # For each operation, the number of the place before it, or 0 before all places. Forwards go up, backwards down.
    numbers, number, highest = [], 0, 0
    for operation in body.operations:
        inner = innermost(operation.module)
        if operation.phase is Phase.FORWARD:
            number = highest = max(highest, inner)
        elif inner or operation.module:
            number = inner
        numbers.append(number)
    starts = sorted(set(numbers))
    if len(starts) < 2:
        return (unit,)
    first: dict[str, int] = {}  # by module: the place before its first operation
    for operation, number in zip(body.operations, numbers, strict=True):
        first.setdefault(operation.module, number)
    modules = [weight.name.rpartition(".")[0] for weight in body.weights]
    homes = [first.get(module, innermost(module)) for module in modules]
    # The module of an exchange is unknown, so that each part has an even share of all exchanges.
    exchanges = tuple(
        replace(e, bytes=Amount(e.bytes.fixed / len(starts), e.bytes.per_sample / len(starts))) for e in body.exchanges
    )
    parts: list[Unit] = []
    incoming = body.input_bytes
    for start in starts:
        own = tuple(o for o, number in zip(body.operations, numbers, strict=True) if number == start)
        is_last, outgoing = start == starts[-1], body.output_bytes
        if not is_last:  # the last forward operation's output, since an activation crosses a cut as it was made
            written = [o.written_bytes for o in own if o.phase is Phase.FORWARD]
            outgoing = next((a for a in reversed(written) if a.fixed or a.per_sample), Amount())
        weights = zip(body.weights, homes, strict=True)
        part = replace(
            body,
            operations=own,
            weights=tuple(weight for weight, home in weights if home == start or (is_last and home > start)),
            exchanges=exchanges,
            input_bytes=incoming,
            output_bytes=outgoing,
        )
        parts.append(Unit(places[start - 1] if parts else unit.name, part))
        incoming = outgoing
    return tuple(parts)


def flat(parts: Sequence[Segment]) -> Segment:
    """Return all units in order."""
    return tuple(unit for part in parts for unit in part)


# ----------------------------------------------------------------------------------------------------------- divisions

# Relative tolerance of the slowest stage's seconds above the optimum.
_NEARLY = 1e-6

_Part = TypeVar("_Part")
Stages = tuple[tuple[Unit, ...], ...]
Run = tuple[float, int]  # seconds of a unit, and the number of consecutive units like it
Counts = tuple[tuple[Body, int], ...]


@dataclass(frozen=True, eq=False)
class ModelPart:
    """Units of one rank, how often each body occurs among them, and the number of their trained parameters."""

    units: tuple[Unit, ...]

    @cached_property
    def counts(self) -> Counts:
        """Each distinct body in the order of the units, with its number of units."""
        return _counted(self.units)

    @cached_property
    def num_tensors(self) -> int:
        """Number of trained parameters."""
        return sum(weight.trainable for unit in self.units for weight in unit.body.weights)

    @cached_property
    def num_shared(self) -> int:
        """Number of trained parameters that all replicas have: without experts that an expert axis divides."""
        return sum(weight.trainable and not weight.apart for unit in self.units for weight in unit.body.weights)


@dataclass(frozen=True, eq=False)
class StageDivision:
    """Units of a model, stage by stage."""

    stages: Stages
    # Cache of parts by bodies, shared by all divisions of a model, so that costs are computed once. The first rank has
    # its own entries, since only that rank keeps the batch.
    known: dict[tuple[bool, tuple[Body, ...]], ModelPart] = field(default_factory=dict, repr=False)
    _parts: dict[int, tuple[ModelPart, ...]] = field(default_factory=dict, repr=False)

    def each(self, measured: Callable[[Counts], _Part]) -> list[_Part]:
        """Return a value per stage. Stages with equal bodies share one call of `measured`."""
        distinct, places = self._distinct
        known = [measured(counts) for counts in distinct]
        return [known[place] for place in places]

    @cached_property
    def _distinct(self) -> tuple[list[Counts], list[int]]:
        """The distinct bodies of stages with their number of units, and the index of each stage's among them."""
        known: dict[Counts, int] = {}
        places = [known.setdefault(_counted(stage), len(known)) for stage in self.stages]
        return list(known), places

    def parts(self, ranks: int) -> tuple[ModelPart, ...]:
        """Return the units of each of `ranks` ranks. Stage s is on rank s % ranks."""
        if ranks not in self._parts:
            own = (tuple(chain.from_iterable(self.stages[rank::ranks])) for rank in range(ranks))
            self._parts[ranks] = tuple(
                self.known.setdefault((rank == 0, tuple(unit.body for unit in units)), ModelPart(units))
                for rank, units in enumerate(own)
            )
        return self._parts[ranks]


def _counted(units: Sequence[Unit]) -> Counts:
    return tuple(Counter(unit.body for unit in units).items())


def by_names(units: Sequence[Unit], split: Sequence[str]) -> Stages:
    """Begin a stage at each named unit. Names that no unit has are ignored."""
    starts = [0, *(i for i, unit in enumerate(units) if i and unit.name in set(split)), len(units)]
    return tuple(tuple(units[a:b]) for a, b in pairwise(starts))


def equal(units: Sequence[Unit], num_stages: int) -> Stages:
    """Give each stage the same number of blocks, and the units around the blocks to the outer stages.

    If the blocks do not divide evenly, the first stages have one more. With fewer blocks than stages, the units are
    balanced by their number.
    """
    blocks = [i for i, unit in enumerate(units) if unit.body.repeated]
    if len(blocks) < num_stages:
        return balanced(units, [1.0] * len(units), num_stages)
    share, more = divmod(len(blocks), num_stages)
    starts, place = [], 0
    for stage in range(num_stages):
        starts.append(blocks[place] if stage else 0)
        place += share + (stage < more)
    ends = [*starts[1:], len(units)]
    return tuple(tuple(units[a:b]) for a, b in zip(starts, ends, strict=True))


def thresholds(units: Sequence[Unit], costs: Sequence[float], num_stages: int) -> Stages:
    """Fill each stage until the summed costs pass its share of the total, including the unit that passes it.

    The first stages therefore have most units, and the last ones may be empty. This is the rule of nanotron.
    """
    stages: list[list[Unit]] = [[]]
    total, passed = sum(costs), 0.0
    for unit, cost in zip(units, costs, strict=True):
        stages[-1].append(unit)
        passed += cost
        if passed > total * len(stages) / num_stages and len(stages) < num_stages:
            stages.append([])
    return (*map(tuple, stages), *[()] * (num_stages - len(stages)))


def balanced(units: Sequence[_Part], seconds: Sequence[float], num_stages: int) -> tuple[tuple[_Part, ...], ...]:
    """Return contiguous stages with the fastest slowest stage; at most one stage per unit."""
    lengths = balanced_lengths([(one, sum(1 for _ in equal)) for one, equal in groupby(seconds)], num_stages)
    left = iter(units)
    return tuple(tuple(islice(left, length)) for length in lengths)


def balanced_lengths(runs: Sequence[Run], num_stages: int) -> tuple[int, ...]:
    """Return the number of units of each balanced stage. `runs`: runs of equal units."""
    low = max((one for one, _ in runs), default=0.0)
    high = sum(chain.from_iterable(repeat(*run) for run in runs))
    positive = [run for run in runs if run[0] > 0]
    while high - low > _NEARLY * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _num_parts(positive, middle) <= num_stages else (middle, high)
    # Fill each stage up to the limit, but leave at least one unit for each later stage.
    limit, lengths, filled = high * (1 + 1e-9), [0], 0.0
    left = sum(count for _, count in runs)
    for one, count in runs:
        while count:
            after = num_stages - len(lengths)
            fitting = int((limit - filled) / one) if after and one > 0 else count
            take = min(count, fitting, left - after)
            if take <= 0 and lengths[-1]:
                lengths.append(0)
                filled = 0.0
                continue
            take = max(take, 1)
            # Following stages take as many equal units, as long as enough units are left for the stages behind them.
            same, full = 0, take in (1, fitting) and not lengths[-1] and after > 0 and one > 0
            if full and min(int((limit - take * one) / one), left - take - after) <= 0:
                ahead = (left - after - take) // (take - 1) if take > 1 else count
                same = min(after - 1, (count - 1) // take - 1, ahead)
            if same > 0:
                lengths[-1:] = [take] * same + [0]
                left -= same * take
                count -= same * take
                continue
            lengths[-1] += take
            filled += take * one
            left -= take
            count -= take
    return tuple(lengths)


def _num_parts(runs: Sequence[Run], limit: float) -> int:
    """Return the fewest contiguous parts of at most `limit` seconds each."""
    parts, filled = 1, 0.0
    for one, count in runs:
        fitting = int((limit - filled) / one)
        if fitting >= count:
            filled += count * one
            continue
        left, most = count - fitting, int(limit / one)
        more = -(-left // most)
        parts, filled = parts + more, (left - (more - 1) * most) * one
    return parts
