"""Plan space of a search: all legal plans, as a tree of ever smaller families, with lower bounds of each family.

A place is a set of degrees, with data x shard as one number. A family is a place and a schedule, and leaves only the
split into data and shard open. A search applies the bounds in this order:

1. `Costs.floor`: seconds of a class of layouts, from its degrees alone.
2. `MemoryBounds.crowded`: bytes of a family of schedules, from the blocks alone.
3. `Bounds.families`, `Bounds.schedules`: seconds of a family and of its schedules, without a division into stages.
4. `Bounds.staged`, `Bounds.plans`: seconds and bytes of a whole plan, without the simulation of its pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import product
from math import gcd
from operator import itemgetter
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel

from shoal.hardware.values import SHARED_MEMORY, Cluster
from shoal.planner.predict.lower_bounds import (
    BlockSize,
    BlockStates,
    Costs,
    MicrobatchSeconds,
    filled,
    least_peak,
    with_experts,
)
from shoal.planner.predict.pipeline import PipelineShape
from shoal.planner.predict.workload import Prediction
from shoal.plans.legal import ModelFacts, conflicts, cut_by_itself, excluded, fits
from shoal.plans.plan import (
    BatchSection,
    CollectivesSection,
    Layout,
    MemorySection,
    PipelineSection,
    Plan,
    ShardSection,
    TensorSection,
    divisors,
)

Recompute = Literal["none", "selective", "full"]
Level = Literal["optimizer", "gradients", "parameters"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
LEVELS: tuple[Level, ...] = ("optimizer", "gradients", "parameters")


class ModelDegrees(NamedTuple):
    """Model-parallel degrees. Ranks along these axes share grains, but for `expert`, which divides all of a stage."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks that compute the same grains together."""
        return self.tensor * self.pipeline * self.context


class Degrees(NamedTuple):
    """Degrees of the mesh axes, with data x shard as one number."""

    replicas: int
    cut: ModelDegrees

    @property
    def devices(self) -> int:
        """Number of ranks."""
        return self.replicas * self.cut.ranks

    def __str__(self) -> str:
        """Format the degrees above 1 as a plan names them."""
        degrees = {"data x shard": self.replicas, **self.cut._asdict()}
        return ", ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1) or "one device"


class ScheduleFamily(NamedTuple):
    """Microbatch schedules that differ only in the order of passes and the stages per rank."""

    grains: int
    recompute: Recompute
    sequence: bool


class MicrobatchSchedule(NamedTuple):
    """Microbatch size of a rank in grains, its recomputation, and its pipeline schedule."""

    grains: int
    recompute: Recompute = "none"
    sequence: bool = False  # sequence parallelism on the tensor axis
    schedule: str = "1f1b"
    stages: int = 1


class Illegal(NamedTuple):
    """Excluded degrees and the reason."""

    what: str
    reason: str


def counts(cluster: Cluster, most: int | None = None) -> tuple[int, ...]:
    """Return the numbers of devices to search: any number within a host, and whole hosts beyond that.

    Of several kinds, all devices of a kind come before those of the next one.
    """
    if cluster.kinds:
        numbers, before = set[int](), 0
        for kind in cluster.kinds:
            numbers |= {before + number for number in counts(kind)}
            before += kind.num_devices
        return tuple(sorted(number for number in numbers if number <= (most or before)))
    limit = min(cluster.num_devices, most or cluster.num_devices)
    host = cluster.devices_per_host
    return (*range(1, min(host, limit) + 1), *range(2 * host, limit + 1, host))


@lru_cache(maxsize=4096)
def microbatch_sizes(share: int) -> tuple[int, ...]:
    """Return the sizes of the most even divisions of `share` grains, one per possible number; largest first."""
    sizes: list[int] = []
    count = 1
    while True:
        size = -(-share // count)
        sizes.append(size)
        if size == 1:
            return tuple(sizes)
        count = -(-share // (size - 1))


def recomputes(base: Plan) -> tuple[Recompute, ...]:
    """Return the recomputation modes to search. A compiled block chooses itself, so "selective" is no mode of it."""
    return RECOMPUTE if base.execution.compile == "none" else ("none", "full")


@dataclass(frozen=True)
class Space:
    """Plan space. `base`: fixed settings (precision, exactness, compilation). `facts`: limits of the model."""

    base: Plan
    facts: ModelFacts
    counts: tuple[int, ...]
    max_grains: int | None = None  # per microbatch; 1 if grains may not share a forward
    max_stages: int | None = None  # of a pipeline, as far as the profile distinguishes parts
    engine: bool = True  # only plans that this version executes
    tensor: bool = True  # True if tensor cuts of the model are known; else degree 1 only
    uncut: str = ""  # reason why a pipeline cannot divide the model, if any
    whole: str = ""  # reason why gradients and parameters cannot be divided, if any
    all_reduces: Mapping[int, str] = field(default_factory=dict)  # by replicas, if faster than the base's
    data_only: bool = False  # replicas alone: no other axis, and nothing sharded
    kinds: tuple[int, ...] = ()  # devices of each kind, if there are several
    one_copy: bool = False  # ranks that sum through shared memory share one copy of parameters
    beyond: Callable[[Plan], str] = lambda _: ""  # reason why another program cannot run a legal plan, or nothing
    _sequences: dict[ModelDegrees, tuple[bool, ...]] = field(default_factory=dict, init=False, compare=False)
    _levels: dict[ModelDegrees, tuple[Level, ...]] = field(default_factory=dict, init=False, compare=False)
    _by_grains: dict[int, Space] = field(default_factory=dict, init=False, compare=False)

    @cached_property
    def cuts(self) -> tuple[ModelDegrees, ...]:
        """The legal model-parallel degrees."""
        if self.data_only:
            return (ModelDegrees(1, 1, 1),)
        most = max(self.counts)
        degrees = (
            ModelDegrees(tensor, pipeline, context, expert)
            for tensor in _tensor_degrees(self)
            if tensor <= most
            for pipeline in range(1, min(self.num_layers, most // tensor) + 1)
            for context in _contexts(self.facts, tensor, most)
            if tensor * pipeline * context <= most
            for expert in _expert_degrees(self, min(self.facts.num_grains * tensor * context, most // pipeline))
        )
        return tuple(cut for cut in degrees if not _refusal_of(self, cut))

    @cached_property
    def num_layers(self) -> int:
        """The most stages: the number of parts of the model, as far as the profile distinguishes them."""
        stages = self.facts.most_stages or 1
        return stages if self.max_stages is None else min(stages, self.max_stages)

    @cached_property
    def places(self) -> tuple[Degrees, ...]:
        """Every candidate layout on a legal number of devices, ordered by model-parallel degrees."""
        legal, most = frozenset(self.counts), max(self.counts)
        return tuple(
            Degrees(replicas, cut)
            for cut in sorted(self.cuts)
            for replicas in range(1, min(self.facts.num_grains, most // cut.ranks) + 1)
            if replicas * cut.ranks in legal
            and replicas * cut.tensor * cut.context % cut.expert == 0
            and _suits_kinds(self.kinds, replicas, cut)
        )

    def refusal(self, plan: Plan) -> str | None:
        """Return the reason why a plan is illegal, or None if it is legal."""
        general = set() if self.engine else set(excluded(plan))
        return next((one.conflict for one in conflicts(plan, self.facts) if one not in general), None)

    def share(self, place: Degrees) -> int:
        """Return the grains of the rank with most grains."""
        return -(-self.facts.num_grains // place.replicas)

    def families(self, place: Degrees) -> list[ScheduleFamily]:
        """Return the schedule families of a place, the smallest microbatches first."""
        share = self.share(place)
        limit = 1 if self.base.execution.exact else self.max_grains or share
        sizes = [size for size in microbatch_sizes(share) if size <= limit] or [min(limit, share)]
        sizes = [share] if self.facts.has_global_norm else sizes
        kinds = product(reversed(sizes), recomputes(self.base), self.sequences(place.cut))
        return [ScheduleFamily(*kind) for kind in kinds]

    def orders(self, pipeline: int, microbatches: int) -> tuple[tuple[str, int], ...]:
        """Return the pairs (schedule, stages per rank) that are defined for these ranks and microbatches."""
        return _orders(self.num_layers, pipeline, microbatches)

    def plan(self, place: Degrees, way: MicrobatchSchedule, shard: int = 1, level: Level = "parameters") -> Plan:
        """Return the plan with these parallel degrees and this pipeline schedule.

        `shard`: degree of the shard axis. The other replicas of `place` are on the data axis.
        The plan's sections are valid by construction, so pydantic does not check them: a search makes many plans.
        """
        replicas, cut = place
        values: dict[str, Any] = {
            "layout": layout_of(place, shard),
            "shard": _SHARDS[level if shard > 1 else "parameters"],
        }
        if self.all_reduces and not self.base.execution.exact:
            # A tensor axis uses shared memory for every number of replicas or for none, so that bounds of its time
            # apply to all. Otherwise the plan takes another algorithm than the base's if whole gradients are summed.
            algorithm = self.all_reduces.get(cut.tensor if cut.tensor > 1 else replicas)
            if algorithm != SHARED_MEMORY:
                algorithm = self.all_reduces.get(replicas) if shard == 1 or level == "optimizer" else None
                algorithm = None if algorithm == SHARED_MEMORY else algorithm
            if algorithm:
                values["collectives"] = _collectives(self.base.collectives, algorithm)
        shared = False
        if self.one_copy and replicas > 1 and shard == cut.ranks == 1:
            sums = values.get("collectives", self.base.collectives)
            shared = sums.compression == "none" and sums.all_reduce == SHARED_MEMORY
        return self._varied.trusted_copy({**values, **_sections(way, shared)})

    @cached_property
    def _varied(self) -> Plan:
        """The base plan with all varied sections marked as set."""
        return self.base.trusted_copy({"layout": _ONE_DEVICE, "shard": _SHARDS["parameters"], **_sections(_WAY, False)})

    def plans(self, place: Degrees, way: MicrobatchSchedule) -> Iterator[Plan]:
        """Yield all plans of a family, the least divided first. The model may forbid a few of them."""
        grains = self.facts.num_grains // place.replicas
        if place.cut.pipeline > 1 and not fits(way.schedule, place.cut.pipeline, -(-grains // way.grains)):
            return  # ranks with fewer grains have too few microbatches
        for shard in divisors(place.replicas):
            for level in self.levels(place.cut) if shard > 1 else LEVELS[-1:]:
                yield self.plan(place, way, shard, level)

    def levels(self, cut: ModelDegrees) -> tuple[Level, ...]:
        """Return the legal ZeRO levels of a shard axis with these model-parallel degrees."""
        if cut not in self._levels:
            place, way = _alone(cut, times=2)
            probe = _with_grains(self, place.replicas)
            levels = () if self.data_only else LEVELS[:1] if self.whole else LEVELS
            legal = (level for level in levels if not probe.refusal(self.plan(place, way, 2, level)))
            self._levels[cut] = tuple(legal)
        return self._levels[cut]

    def sequences(self, cut: ModelDegrees) -> tuple[bool, ...]:
        """Return the legal settings of sequence parallelism with these degrees."""
        if cut not in self._sequences:
            place, way = _alone(cut)
            legal = cut.tensor > 1 and not self.refusal(self.plan(place, way._replace(sequence=True)))
            self._sequences[cut] = (False, True) if legal else (False,)
        return self._sequences[cut]


def _suits_kinds(kinds: Sequence[int], replicas: int, cut: ModelDegrees) -> bool:
    """Return True if the ranks of each layer and sequence, and of each stage of a pipeline, have one kind."""
    groups = 0
    for number in kinds:
        if cut.pipeline > 1 and groups < replicas * cut.pipeline and groups % replicas:
            return False
        groups += number // (cut.tensor * cut.context)
    return not kinds or replicas * cut.pipeline <= groups


def _with_grains(space: Space, num_grains: int) -> Space:
    """Return the space of a job with another number of grains, cached."""
    if num_grains not in space._by_grains:
        space._by_grains[num_grains] = replace(space, facts=replace(space.facts, num_grains=num_grains))
    return space._by_grains[num_grains]


def _alone(cut: ModelDegrees, times: int = 1) -> tuple[Degrees, MicrobatchSchedule]:
    """Return a place and a schedule that are legal if these model-parallel degrees are.

    The place has the fewest replicas whose ranks the expert degree divides, `times` that.
    """
    replicas = times * (cut.expert // gcd(cut.expert, cut.tensor * cut.context))
    return Degrees(replicas, cut), MicrobatchSchedule(1, schedule="gpipe" if cut.pipeline > 1 else "1f1b")


def _refusal_of(space: Space, cut: ModelDegrees) -> str | None:
    """Return the reason why model-parallel degrees are illegal with any number of microbatches, or None."""
    place, way = _alone(cut)
    return _with_grains(space, place.replicas).refusal(space.plan(place, way))


def _expert_degrees(space: Space, most: int) -> Sequence[int]:
    """Return the degrees, up to `most`, that divide the experts of every mixture; 1 for a model without one.

    On devices of several kinds experts are not divided: all ranks of a group would wait for its slowest one. In exact
    mode each rank computes its tokens with all experts, so that the axis saves no time.
    """
    counts = space.facts.num_experts
    if not counts or space.kinds or space.base.execution.exact:
        return [1]
    return [degree for degree in divisors(gcd(*counts)) if degree <= most]


def _tensor_degrees(space: Space) -> Sequence[int]:
    """Return the divisors of the number of heads, so that attention divides evenly; else 1 to the widest layer."""
    if not space.tensor:
        return [1]
    if space.facts.num_heads is not None:
        return divisors(space.facts.num_heads)
    return range(1, max(space.facts.widths, default=1) + 1)


def _contexts(facts: ModelFacts, tensor: int, most: int) -> list[int]:
    """Return the divisors of the heads per tensor rank, or 1 for a model without sequences."""
    heads, longest = facts.num_heads, facts.sequence
    if heads is None or longest is None:
        return [1]
    return [c for c in divisors(heads // tensor) if c <= min(longest, most // tensor)]


def illegal(space: Space) -> Iterator[Illegal]:
    """Yield the excluded degrees up to the largest number of devices, by axis."""
    facts, most, num_layers = space.facts, max(space.counts), space.num_layers
    grains, heads = facts.num_grains, facts.num_heads
    if most > grains:
        samples = grains * facts.grain_size
        wanted = f"Job(grains={min(most, samples)})" if samples > grains else "a larger batch"
        reason = f"the job has {grains} grains; {wanted} would allow more (which changes the run)"
        yield Illegal(f"data x shard > {grains}", reason)
    if not space.tensor and most > 1:
        yield Illegal("tensor > 1", "what it would cut of this model could not be found without running it")
    if space.whole and most > 1:
        yield Illegal('shard.level = "gradients", "parameters"', space.whole)
    if heads is not None and most > 1:
        yield Illegal("tensor, context", f"they divide {heads} heads evenly, together at most {heads} ways")
    if facts.sequence is None or heads is None:
        lacks = "sequences" if facts.sequence is None else "number of heads: name the attribute num_heads"
        yield Illegal("context > 1", f"the model shows no {lacks}")
    if most > num_layers:
        if space.uncut:
            reason = space.uncut
        elif facts.places is None:
            reason = f"the model shows {num_layers} block{'s' * (num_layers > 1)}"
        else:
            stages, reason = len(facts.places) + 1, cut_by_itself(facts.places)
            if num_layers < stages:
                runs = f"layout.pipeline = {stages} at most may run"
                reason = f"the profile tells {num_layers} parts apart; {reason}: {runs}"
            else:
                reason += "; a pipeline.split that names other modules may cut it there"
        yield Illegal(f"pipeline > {num_layers}", reason)
    if facts.num_experts and most > 1:
        least = next((degree for degree in divisors(gcd(*facts.num_experts)) if degree > 1), None)
        if space.kinds:
            reason = "ranks of several kinds would wait for the slowest"
        elif space.base.execution.exact:
            reason = "in exact mode each rank gathers all experts for each microbatch, which seldom pays"
        elif least is None:
            reason = "the mixtures' numbers of experts have no common divisor"
        else:
            reason = _refusal_of(space, ModelDegrees(expert=least)) or ""
        if reason:
            yield Illegal("expert > 1", reason)
    seen: set[str] = set()
    for cut in (ModelDegrees(2, 2, 1), ModelDegrees(1, 2, 2), ModelDegrees(2, 1, 2), ModelDegrees(2, 2, 2)):
        legal_alone = cut.tensor in _tensor_degrees(space) and cut.pipeline <= min(num_layers, most)
        if cut.ranks > most or not legal_alone or cut.context not in _contexts(facts, cut.tensor, most):
            continue
        conflict = _refusal_of(space, cut)
        if conflict and conflict not in seen:
            seen.add(conflict)
            yield Illegal(", ".join(f"{axis} > 1" for axis, d in cut._asdict().items() if d > 1), conflict)


def simplicity(plan: Plan) -> tuple[int, ...]:
    """Return the tie-breaking key of a plan, least first.

    The key orders by devices, axes in use, distance of each setting from its default, then degrees. No two plans of a
    space have equal keys, so the result does not depend on the order of the search.
    """
    at = plan.layout
    degrees = at.data, at.shard, at.tensor, at.pipeline, at.context, at.expert
    schedules = ("1f1b", "zero_bubble", "gpipe", "interleaved_1f1b")
    return (
        plan.layout.world_size,
        sum(degree > 1 for degree in degrees),
        plan.pipeline.stages_per_rank,
        schedules.index(plan.pipeline.schedule),
        RECOMPUTE.index(plan.memory.recompute),
        int(plan.tensor.sequence),
        plan.layout.shard if plan.layout.shard > 1 else 0,
        LEVELS.index(plan.shard.level) if plan.layout.shard > 1 else 0,
        -plan.batch.grains_per_microbatch,
        *(at.tensor, at.pipeline, at.context, at.expert),
    )


@lru_cache(maxsize=65536)
def _orders(num_layers: int, pipeline: int, num_microbatches: int) -> tuple[tuple[str, int], ...]:
    """Return the pairs of schedule and stages per rank. Several stages per rank divide the layers of the rank."""
    if pipeline == 1:
        return (("1f1b", 1),)
    several = [s for s in divisors(num_layers // pipeline) if s > 1]
    choices = [("1f1b", 1), ("zero_bubble", 1), ("gpipe", 1)]
    choices += [(schedule, stages) for schedule in ("interleaved_1f1b", "gpipe") for stages in several]
    return tuple(choice for choice in choices if fits(choice[0], pipeline, num_microbatches))


@lru_cache(maxsize=65536)
def layout_of(place: Degrees, shard: int) -> Layout:
    """Return the layout of a place, with `shard` of the replicas along the shard axis."""
    return _ONE_DEVICE.trusted_copy({"data": place.replicas // shard, "shard": shard, **place.cut._asdict()})


@lru_cache(maxsize=65536)
def _sections(way: MicrobatchSchedule, shared: bool) -> dict[str, BaseModel]:
    return {
        "batch": _section(BatchSection, grains_per_microbatch=way.grains),
        "pipeline": _section(PipelineSection, schedule=way.schedule, stages_per_rank=way.stages),
        "tensor": _section(TensorSection, sequence=way.sequence),
        "memory": _section(MemorySection, recompute=way.recompute, shared=shared),
    }


@lru_cache(maxsize=8192)
def _section(kind: type[BaseModel], **values: Any) -> BaseModel:
    return kind.model_construct(**values)


_ONE_DEVICE, _WAY = Layout(), MicrobatchSchedule(1)
_SHARDS = {level: _section(ShardSection, level=level) for level in LEVELS}


@lru_cache(maxsize=8)
def _collectives(base: CollectivesSection, algorithm: str) -> CollectivesSection:
    return base.model_copy(update={"all_reduce": algorithm})


# -------------------------------------------------------------------------------------------------------------- bounds


class LayoutClass(NamedTuple):
    """Degrees that differ only in replicas and give a rank the same grains, so that their bounds are equal."""

    share: int
    cut: ModelDegrees
    replicas: tuple[int, ...]  # in order, the fewest first
    first: Degrees  # the degrees with the fewest replicas
    divided: Degrees  # the degrees with the most replicas
    beside: float  # seconds of every plan that only the bound of a whole plan includes


class BoundedPlan(NamedTuple):
    """A plan with lower bounds of its memory shortfall (bytes) and its step time (s; infinite if it cannot fit)."""

    plan: Plan
    missing: float
    seconds: float


def _only_microbatch(
    space: Space, costs_at: Callable[[Degrees], Costs], costs: Costs, cut: ModelDegrees, family: ScheduleFamily
) -> Plan:
    """Return a plan at these costs without a pipeline, where a microbatch of the family is the only one."""
    alone, num_grains, size = cut._replace(pipeline=1), space.facts.num_grains, family.grains
    replicas = num_grains if size == 1 else (num_grains - 1) // (size - 1)  # the most with a share of this size
    if costs_at(Degrees(replicas, alone)) is not costs:  # a single rank on a CPU host may use all cores
        replicas = next((n for n in range(replicas, 0, -1) if costs_at(Degrees(n, alone)) is costs), 1)
    return space.plan(Degrees(replicas, alone), MicrobatchSchedule(*family))


class MemoryBounds:
    """Lower bounds of the bytes that plans of a space lack, each computed once. A plan may fit if none is positive.

    `costs`: function from a number of devices to costs. Results depend on the devices only through the costs.
    """

    def __init__(self, space: Space, costs: Callable[[int], Costs]) -> None:
        self._space, self._costs = space, costs
        self._sizes: dict[tuple[Costs, int, int, ScheduleFamily], BlockSize] = {}
        self._states: dict[Degrees, tuple[BlockStates, ...]] = {}
        self._missing: dict[tuple[Degrees, MicrobatchSchedule], float] = {}
        self._bytes: dict[tuple[object, ...], float] = {}

    def _costs_at(self, place: Degrees) -> Costs:
        return with_experts(self._costs(place.devices), place.cut.expert)

    def lacks(self, place: Degrees, way: MicrobatchSchedule, plan: Plan) -> float:
        """Return a lower bound of the bytes that a plan lacks."""
        costs = self._costs_at(place)
        owners = plan.num_owners if plan.memory.shared else 1
        of_experts = place.replicas if place.cut.expert > 1 else 0  # all replicas with the same experts divide states
        divided = place.replicas > 1, plan.layout.shard, plan.shard.level, owners, of_experts
        key = costs, self._space.share(place), place.cut, way, divided
        if key not in self._bytes:
            self._bytes[key] = costs.least_bytes(plan)
        return self._bytes[key] - costs.memory_bytes

    def schedule_lacks(self, place: Degrees, way: MicrobatchSchedule) -> float:
        """Return the bytes that the most divided plan of a schedule lacks."""
        # With the same stages per rank, no other schedule keeps fewer microbatches on any rank.
        way = way._replace(schedule="interleaved_1f1b" if way.stages > 1 else "1f1b")
        if (place, way) not in self._missing:
            self._missing[place, way] = min(self.lacks(place, way, plan) for plan in self._most_divided(place, way))
        return self._missing[place, way]

    def place_lacks(self, place: Degrees, below: float = float("inf")) -> float:
        """Return a lower bound of the bytes that every plan of a place lacks, or `below` if that is less.

        The smallest microbatches come first, since one of them nearly always fits if any plan fits.
        """
        families = self._space.families(place)
        smallest = [family for family in families if family.grains == families[0].grains]
        below = self._least(place, smallest, below)
        return below if below <= 0 else self._least(place, families[len(smallest) :], below)

    def crowded_lack(self, place: Degrees, below: float) -> float:
        """Return the least bytes that a crowded family of a place lacks, or `below` if that is less.

        Of families that differ only in the microbatch, the smallest crowded one lacks least.
        """
        smallest: dict[tuple[Recompute, bool], ScheduleFamily] = {}
        for family, is_crowded in self.crowded(place):
            if is_crowded:
                smallest.setdefault(family[1:], family)
        return self._least(place, list(smallest.values()), below)

    def crowded(self, place: Degrees) -> Iterator[tuple[ScheduleFamily, bool]]:
        """Yield each family with True if its blocks alone do not fit, for any division of the blocks over the ranks.

        No schedule keeps fewer microbatches on a rank than 1f1b with one stage per rank.
        """
        costs, cut, share = self._costs_at(place), place.cut, self._space.share(place)
        states, pipeline, memory = self._block_states(place), cut.pipeline, costs.memory_bytes
        for family in self._space.families(place):
            size, microbatches = self._block_size(costs, cut, family), -(-share // family.grains)
            yield family, all(one.is_crowded(size, pipeline, microbatches, memory) for one in states)

    def _least(self, place: Degrees, families: Sequence[ScheduleFamily], below: float) -> float:
        """Return the least bytes that these families of a place lack, or `below` if that is less."""
        costs, cut, share = self._costs_at(place), place.cut, self._space.share(place)
        memory, pipeline, states, bounds = costs.memory_bytes, cut.pipeline, self._block_states(place), []
        for family in families:
            shape = self._block_size(costs, cut, family), pipeline, -(-share // family.grains), memory
            bounds.append((min(least_peak(one, *shape) for one in states) - memory, family))
        for bound, family in sorted(bounds):
            if bound >= below or below <= 0:
                break
            for _, stages in dict.fromkeys(self._space.orders(pipeline, -(-share // family.grains))):
                below = min(below, self.schedule_lacks(place, MicrobatchSchedule(*family, stages=stages)))
        return below

    def _block_size(self, costs: Costs, cut: ModelDegrees, family: ScheduleFamily) -> BlockSize:
        key = costs, cut.tensor, cut.context, family
        if key not in self._sizes:
            self._sizes[key] = costs.block_size(_only_microbatch(self._space, self._costs_at, costs, cut, family))
        return self._sizes[key]

    def _block_states(self, place: Degrees) -> tuple[BlockStates, ...]:
        """Return the bytes of blocks of the most divided plans, those that divide most first."""
        if place not in self._states:
            plans = self._most_divided(place, MicrobatchSchedule(1))[::-1]
            self._states[place] = self._costs_at(place).block_states(plans)
        return self._states[place]

    def _most_divided(self, place: Degrees, way: MicrobatchSchedule) -> list[Plan]:
        """Return plans of a family, one of which needs no more bytes than any plan of the family.

        A plan with one shared copy counts at any place, since fewer replicas may sum through shared memory.
        """
        levels = self._space.levels(place.cut) if place.replicas > 1 else LEVELS[-1:]
        divided = [self._space.plan(place, way, place.replicas, level) for level in levels]
        if self._space.one_copy and place.replicas > 1 and place.cut.ranks == 1:
            plan = self._space.plan(place, way)
            divided.append(plan.model_copy(update={"memory": plan.memory.model_copy(update={"shared": True})}))
        return divided or [self._space.plan(place, way)]


class Bounds:
    """Lower bounds of the seconds of plans of a space and their predictions, each computed once.

    `costs`: function from a number of devices to costs. Results depend on the devices only through the costs.
    """

    def __init__(self, space: Space, costs: Callable[[int], Costs]) -> None:
        self.space, self.costs, self.memory = space, costs, MemoryBounds(space, costs)
        self._microbatches: dict[tuple[Costs, int, int, ScheduleFamily], MicrobatchSeconds] = {}
        self._families: dict[tuple[Costs, int, Degrees], list[tuple[float, ScheduleFamily]]] = {}
        self._staged: dict[tuple[Costs, int, ModelDegrees, MicrobatchSchedule], float] = {}
        self._at: dict[tuple[Degrees, MicrobatchSchedule], float] = {}
        self._plans: dict[tuple[Degrees, MicrobatchSchedule], list[BoundedPlan]] = {}
        self._predicted: dict[tuple[object, ...], Prediction] = {}

    def costs_at(self, place: Degrees) -> Costs:
        """Return the costs of plans at a place."""
        return with_experts(self.costs(place.devices), place.cut.expert)

    def families(self, layouts: LayoutClass) -> list[tuple[float, ScheduleFamily]]:
        """Return the families of a class that may fit, with lower bounds of their seconds in ascending order."""
        costs, share, cut = self.costs_at(layouts.first), layouts.share, layouts.cut
        key = costs, share, layouts.divided
        if key not in self._families:
            bounds = []
            for family, is_crowded in self.memory.crowded(layouts.divided):
                if not is_crowded:
                    whole, blocks = self._microbatch(costs, cut, family)
                    busiest = max(whole / cut.pipeline, blocks.busiest(cut.pipeline))
                    bounds.append((-(-share // family.grains) * busiest, family))
            self._families[key] = sorted(bounds, key=itemgetter(0))
        return self._families[key]

    def schedules(self, layouts: LayoutClass, family: ScheduleFamily) -> list[tuple[float, MicrobatchSchedule]]:
        """Return the schedules of a family with lower bounds of their seconds, in ascending order."""
        pipeline, microbatches = layouts.cut.pipeline, -(-layouts.share // family.grains)
        whole, blocks = self._microbatch(self.costs_at(layouts.first), layouts.cut, family)
        bounds = []
        for schedule, stages in self.space.orders(pipeline, microbatches):
            shape = PipelineShape(schedule, pipeline, stages, microbatches)
            seconds = filled(whole, shape, blocks.last, blocks.through)
            bounds.append((seconds, MicrobatchSchedule(*family, schedule, stages)))
        return sorted(bounds)

    def _microbatch(self, costs: Costs, cut: ModelDegrees, family: ScheduleFamily) -> MicrobatchSeconds:
        """Return the costs of a family's microbatch on a rank with all stages."""
        key = costs, cut.tensor, cut.context, family
        if key not in self._microbatches:
            self._microbatches[key] = costs.microbatch(_only_microbatch(self.space, self.costs_at, costs, cut, family))
        return self._microbatches[key]

    def staged(self, layouts: LayoutClass, way: MicrobatchSchedule) -> float:
        """Return a lower bound of the seconds of a schedule from its stages, without `beside`."""
        costs = self.costs_at(layouts.first)
        key = costs, layouts.share, layouts.cut, way
        if key not in self._staged:
            self._staged[key] = costs.staged(self.space.plan(layouts.first, way))
        return self._staged[key]

    def at(self, place: Degrees, way: MicrobatchSchedule) -> float:
        """Return a lower bound of the seconds of a schedule at a place."""
        if (place, way) not in self._at:
            self._at[place, way] = self.costs_at(place).at(self.space.plan(place, way)) + self.beside(place)
        return self._at[place, way]

    def beside(self, place: Degrees) -> float:
        """Return the seconds at a place that only the bound of a whole plan includes."""
        return self.costs_at(place).beside(place.devices, place.cut.ranks > 1)

    def plans(self, place: Degrees, way: MicrobatchSchedule) -> list[BoundedPlan]:
        """Return the plans of a schedule at a place with their bounds, the least seconds first."""
        if (place, way) not in self._plans:
            nearly, bounds = self.costs_at(place).nearly, []
            for plan in self.space.plans(place, way):
                missing = self.memory.lacks(place, way, plan)
                bounds.append(BoundedPlan(plan, missing, nearly(plan) if missing <= 0 else float("inf")))
            self._plans[place, way] = sorted(bounds, key=itemgetter(2))
        return self._plans[place, way]

    def predict(self, plan: Plan) -> Prediction:
        """Return the prediction of a plan."""
        key = simplicity(plan) + tuple(plan.layout.__dict__.values())
        if key not in self._predicted:
            degree = 1 if plan.execution.exact else plan.layout.expert
            self._predicted[key] = with_experts(self.costs(plan.layout.world_size), degree).predict(plan)
        return self._predicted[key]
