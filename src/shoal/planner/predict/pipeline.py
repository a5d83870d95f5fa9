"""Stages of a plan's pipeline: seconds and memory of each rank, and the makespan of a step.

The results do not depend on the split of replicas into data and shard ranks. All such plans share one computation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby, islice
from typing import NamedTuple

from shoal.hardware.values import Cluster, Device
from shoal.planner.predict.collective_time import Network
from shoal.planner.predict.compute_time import DeviceModel, Passes, StageCosts, is_layer, together
from shoal.planner.predict.workload import (
    ITEMSIZE,
    Counts,
    ModelPart,
    Program,
    Share,
    StageDivision,
    Stages,
    Workload,
    balanced_lengths,
    by_names,
    equal,
    flat,
    segments,
    thresholds,
)
from shoal.planner.profile.values import NOTHING, Amount, Body, Operation, OperationKind, Phase, TensorCut
from shoal.plans.grains import share_sizes
from shoal.plans.plan import Plan
from shoal.plans.schedule import Action, ActionKind, actions, in_flight, in_flight_by_stage, simulate


class PipelineShape(NamedTuple):
    """Pipeline schedule, number of ranks, stages per rank, and microbatches."""

    schedule: str
    pipeline: int
    stages: int
    microbatches: int


# ---------------------------------------------------------------------------------------------------------- activations


@dataclass(frozen=True)
class StageSize:
    """Elements of a stage's parameters on one rank, and bytes of activations per microbatch."""

    numel: float
    trainable: float
    parameter_bytes: float
    saved: float  # between the forward and the backward of a microbatch
    transient: float  # in addition to `saved`, at the peak of the backward
    apart: float = 0.0  # the trained part of `numel` in experts that an expert axis divides
    apart_bytes: float = 0.0  # the part of `parameter_bytes` in these experts
    num_apart: int = 0  # units with such experts

    @property
    def touched(self) -> float:
        """Bytes that a step touches: activations, parameters, gradients and one optimizer state."""
        return self.saved + 4 * self.parameter_bytes


class Rank(NamedTuple):
    """Pipeline rank at index `place`: its units, their size, its microbatches in flight, and bytes of activations."""

    place: int
    part: ModelPart
    size: StageSize
    in_flight: float  # equivalent number of microbatches on all stages of the rank
    activations: float


class OperationBytes(NamedTuple):
    """Bytes of a unit's operations on one rank: saved, kept by selective recomputation, and in use in the backward.

    `peaks`: an output and the gradient that its operation reads, of all operations that may have the most of both.
    """

    saved: Amount
    selected: Amount
    peaks: tuple[Amount, ...]


class Sizes:
    """Bytes of bodies, cached by the share of a sample."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._bodies: dict[tuple[int, Share, str], tuple[float, float]] = {}
        self._weights: dict[tuple[Body, int], tuple[int, int, int, int, int]] = {}
        self._parts: dict[tuple[int, int, bool], OperationBytes] = {}
        self._whole: dict[tuple[int, Share], tuple[float, float]] = {}
        self._stages: dict[tuple[Counts, Share, str], StageSize] = {}

    def stage(self, counts: Counts, share: Share, recompute: str) -> StageSize:
        """Return the size of a rank's units."""
        key = counts, share, recompute
        if key not in self._stages:
            numel = trainable = num_bytes = saved = transient = apart = apart_bytes = 0.0
            for body, count in counts:
                if (body, share.tensor) not in self._weights:  # elements, trained elements and bytes on a tensor rank
                    sizes = [(w, w.numel_of(share.tensor)) for w in body.weights]
                    trained = sum(n for w, n in sizes if w.trainable)
                    totals = sum(n for _, n in sizes), trained, sum(n * w.itemsize for w, n in sizes)
                    divided = [(w, n) for w, n in sizes if w.apart]
                    of_experts = sum(n for w, n in divided if w.trainable), sum(n * w.itemsize for w, n in divided)
                    self._weights[body, share.tensor] = *totals, *of_experts
                own, trained, own_bytes, of_experts_here, expert_bytes = self._weights[body, share.tensor]
                apart += count * of_experts_here
                apart_bytes += count * expert_bytes
                numel += count * own
                trainable += count * trained
                num_bytes += count * own_bytes
                of_body, beside = self.body(body, share, recompute)
                saved += count * of_body
                transient = max(transient, beside)
            self._stages[key] = StageSize(
                *(numel, trainable, num_bytes, saved, transient, apart, apart_bytes),
                num_apart=sum(count for body, count in counts if body.dispatches) if apart_bytes else 0,
            )
        return self._stages[key]

    def body(self, body: Body, share: Share, recompute: str) -> tuple[float, float]:
        """Return the bytes that a unit saves per microbatch, and the further bytes that its backward needs."""
        share = share.of(body, self._program.divides_ends)
        key = id(body), share, recompute
        if (known := self._bodies.get(key)) is not None:
            return known
        whole, samples = (id(body), share), share.samples / share.context
        if whole not in self._whole:
            parts = self._parts_of(body, share)
            self._whole[whole] = parts.saved.at(samples), max((one.at(samples) for one in parts.peaks), default=0.0)
        saved, working = self._whole[whole]
        if not body.repeated or recompute == "none":
            self._bodies[key] = saved, working
            return saved, working
        # The part of the saved bytes that stays in memory under recomputation.
        entering = body.input_bytes.at(samples) / (share.tensor if share.sequence else 1)
        if recompute == "full":
            stays = min(entering, saved)
        elif self._program.selective == "all_but_attention":
            # Without the operations from the attention scores to their product with the values, if not fused.
            forward = [o for o in body.operations if o.phase is Phase.FORWARD]
            places = [i for i, o in enumerate(forward) if o.flops.at(1) and o.batch.per_sample and o.k.at(1)]
            scores = forward[places[0] + 1 : places[-1] + 1] if len(places) > 1 else []
            stays = saved - _sum(self._saved(body, o, share) for o in scores).at(samples)
        else:
            stays = self._parts_of(body, share).selected.at(samples)
            stays = min(stays if self._program.selective == "products" else stays + entering, saved)
        self._bodies[key] = stays, saved - stays + working
        return self._bodies[key]

    def _parts_of(self, body: Body, share: Share) -> OperationBytes:
        """Return the bytes of a unit's operations on one rank, for any number of samples."""
        key = id(body), share.tensor, share.sequence
        if key in self._parts:
            return self._parts[key]

        def output(operation: Operation, amount: Amount) -> Amount:
            cut, by = operation.cut, share.tensor
            if cut is TensorCut.NONE or cut is TensorCut.K or (cut is TensorCut.SEQUENCE and not share.sequence):
                by = 1
            return Amount(amount.fixed / by, amount.per_sample / by)

        every = body.operations
        chosen = every if self._program.selective == "products" else kept_alternately(every)
        peaks: list[Amount] = []
        before = NOTHING
        for operation in (o for o in every if o.phase is not Phase.FORWARD):
            own = output(operation, operation.written_bytes)
            both = Amount(own.fixed + before.fixed, own.per_sample + before.per_sample)
            if not any(one.fixed >= both.fixed and one.per_sample >= both.per_sample for one in peaks):
                peaks = [one for one in peaks if one.fixed > both.fixed or one.per_sample > both.per_sample]
                peaks.append(both)
            if operation.phase is Phase.BACKWARD_INPUT:  # the next operation reads it as its gradient
                before = own
        self._parts[key] = OperationBytes(
            _sum(self._saved(body, o, share) for o in every if o.saved_bytes != NOTHING),
            _sum(output(o, o.selected_bytes) for o in chosen if o.selected_bytes != NOTHING),
            tuple(peaks),
        )
        return self._parts[key]

    def _saved(self, body: Body, operation: Operation, share: Share) -> Amount:
        """Return the bytes that autograd saves for an operation. A cast layer may save the cast input."""
        program, cut, by = self._program, operation.cut, 1
        if cut in (TensorCut.K, TensorCut.ALL, TensorCut.BATCH, TensorCut.M):
            by = share.tensor
        elif share.sequence and (cut is TensorCut.SEQUENCE or (cut is TensorCut.N and not program.keeps_gathered)):
            by = share.tensor  # a column-parallel layer saves the whole input, unless it gathers the input again
        cast = (
            program.layers
            if program.keeps_cast and body.repeated and is_layer(operation, program.casts_experts)
            else None
        )
        part = 1 / by if cast is None else ITEMSIZE[cast] / 2 / by
        return Amount(operation.saved_bytes.fixed * part, operation.saved_bytes.per_sample * part)


def _sum(amounts: Iterable[Amount]) -> Amount:
    fixed = per_sample = 0.0
    for amount in amounts:
        fixed += amount.fixed
        per_sample += amount.per_sample
    return Amount(fixed, per_sample)


def kept_alternately(operations: Sequence[Operation]) -> list[Operation]:
    """Return the forward operations with kept outputs: attention and every second product, from the first on."""
    layers = [o for o in operations if o.phase is Phase.FORWARD and o.kind is OperationKind.MATMUL]
    attention = [o for o in operations if o.phase is Phase.FORWARD and o.kind is OperationKind.ATTENTION]
    return layers[::2] + attention


# ---------------------------------------------------------------------------------------------------- ranks of a plan


class BusiestRank:
    """Busiest rank of a pipeline: its units, their size, and its passes of one microbatch by unit and by stage."""

    def __init__(
        self, part: ModelPart, size: StageSize, passes: Sequence[Passes], of_body: Callable[[Body], Passes]
    ) -> None:
        self.part, self.size = part, size
        self.seconds = sum(p.forward_seconds + p.backward_seconds for p in passes)
        self.last_seconds = sum(p.backward_seconds for p in passes)  # of one backward on all stages of the rank
        self._whole = together([(one, 1) for one in passes])
        ways = self._whole.forward, self._whole.backward
        self.behind_seconds = sum(way.seconds - way.host - way.host_again for way in ways)  # while the host waits
        of_bodies = {body: of_body(body) for body, _ in part.counts}
        of_units = [of_bodies[unit.body] for unit in part.units]
        self.unit_forwards = [p.forward_seconds for p in of_units]
        self.unit_backwards = [p.backward_seconds for p in of_units]  # in the order of the units
        self.unit_seconds = sum(self.unit_forwards), sum(self.unit_backwards)  # without overlap

    def spent(self, microbatches: int) -> dict[str, float]:
        """Return the seconds by step term of the passes of this many microbatches."""
        terms = dict.fromkeys(("compute", "recompute", "tensor", "context", "experts"), 0.0)
        for way in (self._whole.forward, self._whole.backward):
            terms["compute"] += way.work * microbatches
            terms["recompute"] += way.again * microbatches
            terms["tensor"] += way.tensor * microbatches
            terms["context"] += way.context * microbatches
            terms["experts"] += way.experts * microbatches
        return {**terms, "launch": max(0.0, self.seconds * microbatches - sum(terms.values()))}


class CutModel:
    """Model in stages for one share of a sample and one recomputation mode, with cached passes and sizes."""

    def __init__(self, division: StageDivision, costs: StageCosts, sizes: Sizes, share: Share, recompute: str) -> None:
        self.division, self.share = division, share
        self._costs, self._sizes, self._recompute = costs, sizes, recompute
        self._passes: dict[bool, tuple[Passes, ...]] = {}
        self._busiest: dict[tuple[int, bool, int | None], BusiestRank] = {}
        self._by_size: dict[int, list[tuple[StageSize, list[int]]]] = {}
        self._fullest: dict[PipelineShape, tuple[Rank, ...]] = {}

    def passes(self, adds: bool) -> tuple[Passes, ...]:
        """Return the passes of each stage for one microbatch. `adds`: gradients accumulate into earlier ones."""
        if adds not in self._passes:
            stage, share, again = self._costs.stage, self.share, self._recompute
            self._passes[adds] = tuple(self.division.each(lambda counts: stage(counts, share, again, adds)))
        return self._passes[adds]

    def busiest(self, ranks: int, adds: bool, place: int | None = None) -> BusiestRank:
        """Return the rank of a pipeline of this many ranks with the longest passes, or the one at a place."""
        key = ranks, adds, place
        if key not in self._busiest:
            passes = self.passes(adds)
            if place is None:
                seconds = [sum(p.seconds for p in passes[rank::ranks]) for rank in range(ranks)]
                place = seconds.index(max(seconds))
            part = self.division.parts(ranks)[place]

            def of_body(body: Body) -> Passes:
                return self._costs.body(body, self.share, self._recompute, adds)

            self._busiest[key] = BusiestRank(part, self._size(part.counts), passes[place::ranks], of_body)
        return self._busiest[key]

    def fullest(self, shape: PipelineShape) -> tuple[Rank, ...]:
        """Return one rank per distinct stage size: the first one with the most microbatches in flight."""
        if shape not in self._fullest:
            ranks = shape.pipeline
            parts = self.division.parts(ranks)
            if ranks not in self._by_size:
                by_counts: dict[Counts, list[int]] = {}
                for place, part in enumerate(parts):
                    by_counts.setdefault(part.counts, []).append(place)
                by_size: dict[StageSize, list[int]] = {}
                for counts, places in by_counts.items():
                    by_size.setdefault(self._size(counts), []).extend(places)
                self._by_size[ranks] = [(size, sorted(places)) for size, places in by_size.items()]
            most = self.in_flight(shape)
            of_sizes = ((max(places, key=most.__getitem__), size) for size, places in self._by_size[ranks])
            self._fullest[shape] = tuple(
                Rank(place, parts[place], size, most[place], most[place] * size.saved + size.transient)
                for place, size in of_sizes
            )
        return self._fullest[shape]

    def every(self, shape: PipelineShape) -> list[Rank]:
        """Return all ranks in order."""
        ranks = []
        for place, (part, most) in enumerate(
            zip(self.division.parts(shape.pipeline), self.in_flight(shape), strict=True)
        ):
            size = self._size(part.counts)
            ranks.append(Rank(place, part, size, most, most * size.saved + size.transient))
        return ranks

    def _size(self, counts: Counts) -> StageSize:
        return self._sizes.stage(counts, self.share, self._recompute)

    def in_flight(self, shape: PipelineShape) -> tuple[float, ...]:
        """Return the microbatches in flight of each rank, in units of one microbatch on all stages of the rank."""
        schedule, ranks, per, microbatches = shape
        if schedule != "interleaved_1f1b" or ranks == 1:
            return evenly_in_flight(*shape)
        of_ranks, of_stages = in_flight(*shape), in_flight_by_stage(ranks, per, microbatches)
        own = (self._saved[rank::ranks] for rank in range(ranks))
        return tuple(map(_weighed, own, of_stages, of_ranks))

    @cached_property
    def _saved(self) -> list[float]:
        """Bytes of activations that each stage saves per microbatch."""
        return self.division.each(lambda counts: self._size(counts).saved)

    @cached_property
    def crossing(self) -> float:
        """Bytes of the largest activation between two stages."""
        samples = self.share.samples / self.share.context
        ends = (stage[-1].body for stage in self.division.stages[:-1] if stage)
        return max((body.output_bytes.at(samples) for body in ends), default=0.0)


@lru_cache(maxsize=65536)
def evenly_in_flight(schedule: str, ranks: int, per: int, microbatches: int) -> tuple[float, ...]:
    """Return the microbatches in flight of each rank, if all stages of a rank save the same bytes."""
    return tuple(number / per for number in in_flight(schedule, ranks, per, microbatches)) if ranks > 1 else (1.0,)


def _weighed(saved: Sequence[float], most: Sequence[int], in_all: int) -> float:
    """Return the bytes that a rank keeps at most, in microbatches of all of its stages.

    Each stage keeps up to its entry of `most` microbatches, and all stages together keep `in_all`. `saved`: bytes per
    stage. The last stage, which has the logits, keeps fewer microbatches than the first.
    """
    whole = sum(saved)
    if not whole:
        return in_all / len(saved)
    num_bytes, left = 0.0, in_all
    for size, limit in sorted(zip(saved, most, strict=True), reverse=True):
        num_bytes += size * min(limit, left)
        left -= min(limit, left)
    return num_bytes / whole


class Ranks:
    """All pipeline ranks of a plan. Plans that differ only in the data and shard degrees share them.

    `place`: the pipeline rank that counts as the busiest; None for the one with the longest passes.
    """

    place: int | None = None

    def __init__(self, plan: Plan, costs: StageCosts, share: Share, microbatches: int, staging: Staging) -> None:
        self.plan, self.costs, self.share, self.microbatches = plan, costs, share, microbatches
        self.device = costs.computer.device
        pipeline = plan.pipeline
        self.shape = PipelineShape(pipeline.schedule, plan.layout.pipeline, pipeline.stages_per_rank, microbatches)
        self.adds = microbatches > 1  # gradients accumulate over microbatches
        self._staging = staging

    @cached_property
    def model(self) -> CutModel:
        """The model cut into the plan's stages."""
        return self._staging.model(self)

    @cached_property
    def busiest(self) -> BusiestRank:
        """The rank with the longest passes, or the one at `place`."""
        return self.model.busiest(self.shape.pipeline, self.adds, self.place)

    @cached_property
    def fullest(self) -> tuple[Rank, ...]:
        """One rank per distinct stage size: the first one with the most microbatches in flight."""
        return self.model.fullest(self.shape)


def _alike(one: Plan, other: Plan) -> bool:
    """Return True if the ranks of two plans of one search are surely equal. A False may be a missed match."""
    if one.pipeline is not other.pipeline or one.batch is not other.batch or one.memory is not other.memory:
        return False
    if one.tensor is not other.tensor or one.collectives is not other.collectives:
        return False
    a, b = one.layout, other.layout
    cut = a.tensor == b.tensor and a.pipeline == b.pipeline and a.context == b.context and a.shares == b.shares
    return cut and a.data * a.shard == b.data * b.shard


class Staging:
    """Stages and pipeline ranks of one workload's plans on one cluster.

    `segments`: the parts between which stages can be cut. `parts`: their units. `bodies`: number of parts of each body.
    `blocks`: the most frequent uncut block and its number of occurrences, or None for a model without blocks.
    """

    def __init__(self, work: Workload, cluster: Cluster, network: Network, program: Program) -> None:
        self._work, self._cluster, self._network, self._program = work, cluster, network, program
        self.segments = segments(work.profile.units, work.places)
        of_segments = groupby(tuple(unit.body for unit in segment) for segment in self.segments)
        self._runs = [(bodies, sum(1 for _ in alike)) for bodies, alike in of_segments]
        self.parts = flat(self.segments)
        self.bodies = Counter(unit.body for unit in self.parts)
        self.blocks = next(((body, number) for body, number in self.bodies.most_common() if body.repeated), None)
        # Between two uses of a tensor, a step touches about half of all bytes that its operators write: a saved
        # activation waits for everything between its forward and its backward, a weight for a whole step.
        written = [o.written_bytes for unit in work.profile.units for o in unit.body.operations]
        self._touched = Amount(sum(a.fixed for a in written) / 2, sum(a.per_sample for a in written) / 2)
        self._costs: dict[tuple[int, bool], StageCosts] = {}  # by the id of the device, and whether channels lie last
        self.computers: dict[tuple[int, bool], DeviceModel] = {}  # by the same, for other divisions of experts too
        self._last: dict[int, Device] = {}  # devices with channels_last rates, by the id of the plain device
        self._sizes = Sizes(program)
        self._shares: dict[tuple[int, int, bool, int, str], Share] = {}
        self._models: dict[tuple[object, ...], CutModel] = {}
        self._divisions: dict[tuple[int, ...], StageDivision] = {}
        self._known_parts: dict[tuple[bool, tuple[Body, ...]], ModelPart] = {}
        self._balanced: dict[tuple[int, ...], StageDivision] = {}  # by the number of segments of each stage
        self._latest: Ranks | None = None

    def ranks(self, plan: Plan, grains: int | None = None, place: int | None = None) -> Ranks:
        """Return the ranks of a plan.

        The latest result is cached, since a search requests one plan many times and then the next one of its family.
        `grains`: of a replica; None for those of the replica with most. `place`: as in `Ranks`.
        """
        latest, is_usual = self._latest, grains is None and place is None
        if is_usual and latest is not None and (latest.plan is plan or _alike(latest.plan, plan)):
            return latest
        layout, device = plan.layout, self._cluster.device
        if self._cluster.alternatives:
            device = self._cluster.device_for(min(self._cluster.devices_per_host, layout.world_size))
        if plan.execution.channels_last and device.kind == "cpu":
            if id(device) not in self._last:
                self._last[id(device)] = device.with_channels_last()
            device = self._last[id(device)]
        key_of_costs = id(device), plan.execution.channels_last
        if key_of_costs not in self._costs:
            computer = self.computers.get(key_of_costs) or self.computer(device, plan.execution.channels_last)
            if device.kind != "cpu":  # a CPU's costs depend on the bytes that all operators write
                self.computers[key_of_costs] = computer
            self._costs[key_of_costs] = StageCosts(computer, self._network, self._program)
        grains = grains or max(share_sizes(self._work.num_grains, layout.divides_grains, layout.shares))
        per = min(plan.batch.grains_per_microbatch or grains, grains)
        sums = plan.collectives.all_reduce if layout.tensor > 1 else "native"
        key = per, layout.tensor, plan.tensor.sequence and layout.tensor > 1, layout.context, sums
        if key not in self._shares:
            self._shares[key] = Share(per * self._work.grain_size, *key[1:])
        share, costs, microbatches = self._shares[key], self._costs[key_of_costs], -(-grains // per)
        ranks = Ranks(plan, costs, share, microbatches, self)
        ranks.place = place
        if is_usual:
            self._latest = ranks
        return ranks

    def computer(self, device: Device, channels_last: bool) -> DeviceModel:
        """Return the roofline model of the device under this program, with images in a memory format."""
        program = self._program
        return DeviceModel(
            device,
            program.fast_float32,
            program.attention,
            self._touched,
            program.layers,
            program.fuses,
            program.fast_convolutions and device.kind == "gpu",
            program.channels_first and not channels_last and device.kind == "gpu",
            program.scales_anew,
            program.wide_weights,
            program.casts_experts,
        )

    def model(self, ranks: Ranks) -> CutModel:
        """Return the model in a plan's stages. The schedule and the data and shard degrees do not matter."""
        plan, share = ranks.plan, ranks.share
        num_stages, split, again = ranks.shape.pipeline * ranks.shape.stages, plan.pipeline.split, plan.memory.recompute
        key = id(ranks.device), num_stages, share, again, split
        if key not in self._models:
            division = self._division(ranks.costs, num_stages, share, again, split)
            self._models[key] = CutModel(division, ranks.costs, self._sizes, share, again)
        return self._models[key]

    def _division(
        self, costs: StageCosts, num_stages: int, share: Share, again: str, split: Sequence[str]
    ) -> StageDivision:
        """Cut the model into stages: by the names in `split`, by the program's rule, or into nearly equal seconds."""
        units = self.parts
        if num_stages == 1:
            return self._divided((self._work.profile.units,), num_stages)
        if split:
            return self._divided(by_names(units, split), num_stages)
        if self._program.cut == "equal":
            return self._divided(equal(units, num_stages), num_stages)
        if self._program.cut != "balanced":
            flops = [unit.body.flops(share.samples) for unit in units]
            return self._divided(thresholds(units, flops, num_stages), num_stages)
        runs = [(sum(costs.body(body, share, again, True).seconds for body in own), n) for own, n in self._runs]
        lengths = balanced_lengths(runs, num_stages)
        lengths += (0,) * (num_stages - len(lengths))
        if lengths not in self._balanced:
            left = iter(self.segments)
            stages = tuple(flat(tuple(islice(left, length))) for length in lengths)
            self._balanced[lengths] = self._divided(stages, num_stages)
        return self._balanced[lengths]

    def _divided(self, stages: Stages, num_stages: int) -> StageDivision:
        """Return one shared object for equal divisions. Missing stages become empty ones."""
        stages += ((),) * (num_stages - len(stages))
        return self._divisions.setdefault(tuple(map(len, stages)), StageDivision(stages, self._known_parts))

    def size(self, body: Body, plan: Plan) -> StageSize:
        """Return the size of a rank that has one unit with this body."""
        return self._sizes.stage(((body, 1),), self.ranks(plan).share, plan.memory.recompute)


# ------------------------------------------------------------------------------------------------------------ makespan


def makespan(shape: PipelineShape, stages: Sequence[Passes], message: float) -> float:
    """Return the seconds of all passes of a step over these stages. `message`: seconds between two stages."""
    forwards = [one.forward_seconds + message for one in stages]
    backwards = [one.backward_seconds + message for one in stages]
    inputs = [one.backward_seconds - one.weight_seconds + message for one in stages]
    weights = [one.weight_seconds for one in stages]
    if shape.schedule == "1f1b":
        return _in_turns(forwards, backwards, (), shape.microbatches)
    if shape.schedule == "zero_bubble":  # the first rank does not split its backwards, see `actions`
        return _in_turns(forwards, [backwards[0], *inputs[1:]], weights, shape.microbatches)

    def seconds(action: Action) -> float:
        kind, stage, _ = action
        if kind is ActionKind.FORWARD:
            return forwards[stage]
        if kind is ActionKind.BACKWARD:
            return backwards[stage]
        return inputs[stage] if kind is ActionKind.BACKWARD_INPUT else weights[stage]

    return simulate(actions(*shape), seconds)[0]


def _in_turns(
    forwards: Sequence[float], backwards: Sequence[float], weights: Sequence[float], microbatches: int
) -> float:
    """Return what `simulate` returns, to the bit, for schedules of one stage per rank that alternate the passes.

    A search calls this for thousands of pipelines, so no action becomes an object. Rank r of P runs P - r - 1 + m
    forwards before its backward of microbatch m. Deferred `weights` passes of microbatch m - r follow that backward.
    """
    ranks = range(len(forwards))
    clocks = [0.0 for _ in ranks]
    sent: list[list[float]] = [[] for _ in ranks]  # end time of each forward, by rank
    for turn in range(microbatches):
        above: list[float] = []
        for rank in ranks:
            clock, own, seconds = clocks[rank], sent[rank], forwards[rank]
            for microbatch in range(len(own), min(len(forwards) - rank + turn, microbatches)):
                if rank and above[microbatch] > clock:
                    clock = above[microbatch]
                clock += seconds
                own.append(clock)
            clocks[rank], above = clock, own
        message = 0.0
        for rank in reversed(ranks):
            message = clocks[rank] = max(message, clocks[rank]) + backwards[rank]
            if weights and 0 < rank <= turn:
                clocks[rank] += weights[rank]
    for rank in ranks[1:] if weights else ():
        for _ in range(min(rank, microbatches)):
            clocks[rank] += weights[rank]
    return max(clocks)
