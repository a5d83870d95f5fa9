"""Plan space: all legal plans of a search, as a tree of ever smaller families, and the reasons against other plans.

A place is a set of degrees, with data x shard as one number. A family is a place and a schedule, and leaves only the
split into data and shard open.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel

from shoal.hardware.values import SHARED_MEMORY, Cluster
from shoal.plans.legal import ModelFacts, conflicts, cut_by_itself, excluded, fits
from shoal.plans.plan import (
    BatchSection,
    CollectivesSection,
    LayoutSection,
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
    """Model-parallel degrees. The ranks along these axes share grains."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1

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
    """Return the numbers of devices to search: any number within a host, and whole hosts beyond that."""
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


@dataclass(frozen=True)
class Space:
    """Plan space. `base`: fixed settings (precision, exactness, compilation). `facts`: limits of the model."""

    base: Plan
    facts: ModelFacts
    counts: tuple[int, ...]
    max_grains: int | None = None  # per microbatch; 1 if grains may not share a forward
    max_stages: int | None = None  # of a pipeline, as far as the profile distinguishes parts
    engine: bool = True  # only plans that this version executes
    tensor: bool = True  # whether tensor cuts of the model are known; else degree 1 only
    uncut: str = ""  # reason why a pipeline cannot divide the model, if any
    whole: str = ""  # reason why gradients and parameters cannot be divided, if any
    all_reduces: Mapping[int, str] = field(default_factory=dict)  # by replicas, if faster than the base's
    one_copy: bool = False  # ranks that sum through shared memory share one copy of parameters
    only: Collection[ModelDegrees] | None = None  # this part's degrees in a divided search
    _known_sequences: dict[ModelDegrees, tuple[bool, ...]] = field(default_factory=dict, init=False, compare=False)
    _known_levels: dict[ModelDegrees, tuple[Level, ...]] = field(default_factory=dict, init=False, compare=False)

    def at(self, *devices: int) -> Space:
        """Return the part of the space on these numbers of devices."""
        return replace(self, counts=tuple(devices))

    @cached_property
    def cuts(self) -> tuple[ModelDegrees, ...]:
        """The legal model-parallel degrees."""
        if self.only is not None:
            return tuple(self.only)
        most = max(self.counts)
        tensors = [t for t in self._tensor_degrees if t <= most]
        found = (
            ModelDegrees(t, p, c)
            for t in tensors
            for p in self._pipeline_degrees(most // t)
            for c in self._contexts(t, most)
        )
        return tuple(cut for cut in found if cut.ranks <= most and not self._conflict(ModelDegrees(*cut)))

    @property
    def _tensor_degrees(self) -> list[int]:
        """Divisors of the number of heads, so that attention divides evenly. Without heads: 1 to the widest layer."""
        if not self.tensor:
            return [1]
        if self.facts.num_heads is not None:
            return list(divisors(self.facts.num_heads))
        return list(range(1, max(self.facts.widths, default=1) + 1))

    def _pipeline_degrees(self, most: int) -> range:
        return range(1, min(self.num_layers, most) + 1)

    @cached_property
    def num_layers(self) -> int:
        """The most stages: the number of parts of the model, as far as the profile distinguishes them."""
        stages = self.facts.most_stages or 1
        return stages if self.max_stages is None else min(stages, self.max_stages)

    def _contexts(self, tensor: int, most: int) -> list[int]:
        """Return the divisors of the heads per tensor rank, or 1 for a model without sequences."""
        heads, longest = self.facts.num_heads, self.facts.sequence
        if heads is None or longest is None:
            return [1]
        return [c for c in divisors(heads // tensor) if c <= min(longest, most // tensor)]

    def _conflict(self, cut: ModelDegrees) -> str | None:
        return self.refusal(
            self.plan(Degrees(1, cut), MicrobatchSchedule(1, schedule="gpipe" if cut.pipeline > 1 else "1f1b"))
        )

    def refusal(self, plan: Plan) -> str | None:
        """Return the reason why a plan is illegal, or None if it is legal."""
        general = set() if self.engine else set(excluded(plan))
        return next((found.conflict for found in conflicts(plan, self.facts) if found not in general), None)

    def illegal(self) -> Iterator[Illegal]:
        """Yield the excluded degrees up to the largest number of devices, by axis."""
        most, heads = max(self.counts), self.facts.num_heads
        if most > self.facts.num_grains:
            grains, samples = self.facts.num_grains, self.facts.num_grains * self.facts.grain_size
            wanted = f"Job(grains={min(most, samples)})" if samples > grains else "a larger batch"
            yield Illegal(
                f"data x shard > {grains}",
                f"the job has {grains} grains; {wanted} would allow more (which changes the run)",
            )
        if not self.tensor and most > 1:
            yield Illegal("tensor > 1", "what it would cut of this model could not be found without running it")
        if self.whole and most > 1:
            yield Illegal('shard.level = "gradients", "parameters"', self.whole)
        if heads is not None and most > 1:
            yield Illegal("tensor, context", f"they divide {heads} heads evenly, together at most {heads} ways")
        if self.facts.sequence is None or heads is None:
            lacks = "sequences" if self.facts.sequence is None else "number of heads: name the attribute num_heads"
            yield Illegal("context > 1", f"the model shows no {lacks}")
        if most > self.num_layers:
            yield Illegal(f"pipeline > {self.num_layers}", self._why_not_more())
        seen: set[str] = set()
        for cut in (ModelDegrees(2, 2, 1), ModelDegrees(1, 2, 2), ModelDegrees(2, 1, 2), ModelDegrees(2, 2, 2)):
            legal_alone = cut.tensor in self._tensor_degrees and cut.pipeline in self._pipeline_degrees(most)
            if cut.ranks > most or not legal_alone or cut.context not in self._contexts(cut.tensor, most):
                continue
            reason = self._conflict(cut)
            if reason and reason not in seen:
                seen.add(reason)
                yield Illegal(", ".join(f"{axis} > 1" for axis, d in cut._asdict().items() if d > 1), reason)

    def _why_not_more(self) -> str:
        if self.uncut:
            return self.uncut
        if self.facts.places is None:
            return f"the model shows {self.num_layers} block{'s' * (self.num_layers > 1)}"
        most, named = len(self.facts.places) + 1, cut_by_itself(self.facts.places)
        if self.num_layers < most:
            return f"the profile tells {self.num_layers} parts apart; {named}: layout.pipeline = {most} at most may run"
        return f"{named}; a pipeline.split that names other modules may cut it there"

    def places(self, cut: ModelDegrees) -> Iterator[Degrees]:
        """Yield the places of a cut: the numbers of replicas that give a legal number of devices."""
        ranks, legal = cut.ranks, self._legal_counts
        for replicas in range(1, min(self.facts.num_grains, max(self.counts) // ranks) + 1):
            if replicas * ranks in legal:
                yield Degrees(replicas, cut)

    @cached_property
    def _legal_counts(self) -> frozenset[int]:
        return frozenset(self.counts)

    def share(self, place: Degrees) -> int:
        """Return the grains of the rank with most grains."""
        return -(-self.facts.num_grains // place.replicas)

    def most_replicas(self, share: int) -> int:
        """Return the most replicas that give the rank with most grains `share` grains."""
        return self.facts.num_grains if share == 1 else (self.facts.num_grains - 1) // (share - 1)

    @property
    def recomputes(self) -> tuple[Recompute, ...]:
        """Recomputation modes to search. "selective" is not one with compile, since a compiled block chooses itself."""
        return RECOMPUTE if self.base.execution.compile == "none" else ("none", "full")

    def sizes(self, share: int) -> list[int]:
        """Return the microbatch sizes in grains for a share of grains, largest first."""
        limit = 1 if self.base.execution.exact else self.max_grains or share
        return [size for size in microbatch_sizes(share) if size <= limit] or [min(limit, share)]

    def orders(self, pipeline: int, microbatches: int) -> tuple[tuple[str, int], ...]:
        """Return the pairs (schedule, stages per rank) that are defined for these ranks and microbatches."""
        return _orders(self.num_layers, pipeline, microbatches)

    def plan(self, place: Degrees, way: MicrobatchSchedule, shard: int = 1, level: Level = "parameters") -> Plan:
        """Return the plan with these parallel degrees and this pipeline schedule.

        `shard`: degree of the shard axis. The other replicas of `place` are on the data axis.
        The plan's sections are valid by construction, so pydantic does not check them: a search makes many plans.
        """
        values: dict[str, Any] = {
            "layout": layout_of(place, shard),
            "shard": _SHARDS[level if shard > 1 else "parameters"],
        }
        algorithm = self._all_reduce(place, shard == 1 or level == "optimizer") if self.all_reduces else None
        if algorithm and not self.base.execution.exact:
            values["collectives"] = _collectives(self.base.collectives, algorithm)
        shared = False
        if self.one_copy and place.replicas > 1 and shard == place.cut.ranks == 1:
            summed = values.get("collectives", self.base.collectives)
            shared = summed.compression == "none" and summed.all_reduce == SHARED_MEMORY
        return self._varied.trusted_copy({**values, **_sections(way, shared)})

    @cached_property
    def _varied(self) -> Plan:
        """The base plan with all varied sections marked as set."""
        return self.base.trusted_copy({"layout": _ONE_DEVICE, "shard": _SHARDS["parameters"], **_sections(_WAY, False)})

    def _all_reduce(self, place: Degrees, summed: bool) -> str | None:
        """Return the all_reduce of a place if another than the base's is faster. `summed`: whole gradients are summed.

        A tensor axis uses shared memory for every number of replicas or for none, so that bounds of its time hold for
        all.
        """
        of_replicas = self.all_reduces.get(place.replicas)
        together = place.cut.tensor if place.cut.tensor > 1 else place.replicas
        if self.all_reduces.get(together) == SHARED_MEMORY:
            return SHARED_MEMORY
        return of_replicas if summed and of_replicas != SHARED_MEMORY else None

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
        if cut not in self._known_levels:
            probe = replace(self, facts=replace(self.facts, num_grains=2))
            way = MicrobatchSchedule(1, schedule="gpipe" if cut.pipeline > 1 else "1f1b")
            self._known_levels[cut] = tuple(
                level
                for level in (LEVELS[:1] if self.whole else LEVELS)
                if not probe.refusal(self.plan(Degrees(2, cut), way, 2, level))
            )
        return self._known_levels[cut]

    def sequences(self, cut: ModelDegrees) -> tuple[bool, ...]:
        """Return the legal settings of sequence parallelism with these degrees."""
        if cut not in self._known_sequences:
            way = MicrobatchSchedule(1, sequence=True, schedule="gpipe" if cut.pipeline > 1 else "1f1b")
            legal = cut.tensor > 1 and not self.refusal(self.plan(Degrees(1, cut), way))
            self._known_sequences[cut] = (False, True) if legal else (False,)
        return self._known_sequences[cut]


def simplicity(plan: Plan) -> tuple[int, ...]:
    """Return the tie-breaking key of a plan, least first.

    The key orders by devices, axes in use, distance of each setting from its default, then degrees. No two plans of a
    space have equal keys, so the result does not depend on the order of the search.
    """
    at = plan.layout
    degrees = list(at.__dict__.values())
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
        *(at.tensor, at.pipeline, at.context),
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
def layout_of(place: Degrees, shard: int) -> LayoutSection:
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


_ONE_DEVICE, _WAY = LayoutSection(), MicrobatchSchedule(1)
_SHARDS = {level: _section(ShardSection, level=level) for level in LEVELS}


@lru_cache(maxsize=8)
def _collectives(base: CollectivesSection, algorithm: str) -> CollectivesSection:
    return base.model_copy(update={"all_reduce": algorithm})
