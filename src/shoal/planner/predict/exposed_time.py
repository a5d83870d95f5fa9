"""Exposed communication time of a rank: gradient sums, parameter gathers, and the optimizer update.

The accounts (shoal.plans.accounting), which a run is compared with, list the collectives. This module prices them. On a
GPU, collectives overlap with compute that can hide them. On a CPU nothing is hidden, since the cores that compute also
move the bytes of collectives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from shoal.planner.predict.accounts import Accounts
from shoal.planner.predict.collective_time import Network, RankGroup
from shoal.planner.predict.memory import Rank, StageSize
from shoal.planner.predict.pipeline_ranks import Ranks
from shoal.planner.predict.roofline import ITEMSIZE, DeviceModel
from shoal.planner.predict.share import Share
from shoal.planner.predict.stage_split import Held
from shoal.planner.predict.workload import LARGE_PARAMETER, Program
from shoal.planner.profile.values import Profile, Unit, Weight
from shoal.plans.accounting.all_reduce import compressed_buckets
from shoal.plans.accounting.collectives import (
    REPLICAS,
    Array,
    Gradients,
    Sharding,
    SizedCollective,
    agreement,
    bucket_sums,
    norm,
    rows,
    sharded_optimizer,
    sums,
)
from shoal.plans.accounting.model_parallel import Partial, completed
from shoal.plans.accounting.partition import GLOO_BUCKET_BYTES, NCCL_BUCKET_BYTES
from shoal.plans.plan import LayoutSection, Plan

_Result = TypeVar("_Result")


class Remembered:
    """Cache by key: the first part names the computation, the other parts are all of its inputs."""

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], Any] = {}

    def once(self, key: tuple[object, ...], compute: Callable[[], _Result]) -> _Result:
        """Return the result of a key. The first call with the key computes the result."""
        try:
            found: _Result = self._found[key]
        except KeyError:
            found = self._found[key] = compute()
        return found


def gathered(computes: Sequence[float], gathers: Sequence[float], scatters: Sequence[float], slowed: float) -> float:
    """Return the seconds until all units are gathered, computed and scattered.

    The next unit is gathered while a unit computes, as fully_shard prefetches. Collectives run one by one on their own
    stream. Compute that overlaps a collective takes longer by `slowed` times the collective's seconds.
    """
    computed = scattered = before = 0.0
    ready = stream = gathers[0] if gathers else 0.0
    for compute, following, scatter in zip(computes, [*gathers[1:], None], scatters, strict=False):
        start, beside = max(computed, ready), before
        if following is not None:
            ready = stream = max(stream, start) + following
            beside = following + before
        computed = start + compute + slowed * min(beside, compute)
        if scatter:
            stream = scattered = max(stream, computed) + scatter
        before = scatter
    return max(computed, scattered)


def hidden(total: float, last: float, behind: float) -> float:
    """Return the exposed seconds of bucketed sums during `behind` seconds of backward: at least the `last` bucket."""
    return max(min(last, total), total - behind) if total else 0.0


def price(network: Network, layout: LayoutSection, sent: Iterable[SizedCollective], algorithm: str) -> float:
    """Return the seconds of collectives without overlap."""
    asked, collectives = network.asked, list(sent)
    groups = {name: network.axis(layout, name) for name in {one.group for one in collectives}}
    return sum(one.count * asked(algorithm, one.kind, one.num_bytes, groups[one.group]) for one in collectives)


class UnitExchanges(NamedTuple):
    """Seconds per unit of a rank: gathers before a forward, gathers before a backward, and scatters."""

    gathers: list[float]
    again: list[float]
    scatters: list[float]


class _UnitSeconds(NamedTuple):
    """Seconds of one gather and one scatter of a unit on the shard axis, and bytes that replicas then sum."""

    gather: float
    scatter: float
    part: int


@dataclass(frozen=True)
class ShardExchanges:
    """Exchanges of plans that divide parameters. Equal units are priced once."""

    network: Network
    accounts: Accounts
    _known: Remembered = field(default_factory=Remembered, repr=False)

    def exchanges(self, plan: Plan, layout: LayoutSection, held: Held) -> UnitExchanges:
        """Return the exchanges of a rank with these units on that layout.

        The parameters outside of the blocks are gathered before all others, and their gradients are scattered last.
        """
        algorithm, data = plan.collectives.all_reduce, self.network.axis(layout, "data")

        def compute() -> UnitExchanges:
            if not held.units:
                return UnitExchanges([], [], [])
            units, parts = self._on_shard(plan, layout, held)
            summed = {part: self.network.asked(algorithm, "all_reduce", part, data) for part in parts}
            *blocks, (first, last) = [(one.gather, one.scatter + summed[one.part]) for one in units]
            left = iter(blocks)
            each = [next(left) if unit.body.repeated else (0.0, 0.0) for unit in held.units]
            gathers, scatters = [gather for gather, _ in each], [scatter for _, scatter in each]
            return UnitExchanges(
                [first + gathers[0], *gathers[1:]],
                [*gathers[:-1], gathers[-1] + first],
                [last + scatters[0], *scatters[1:]],
            )

        return self._known.once(("exchanges", *self._shard_key(plan, layout, held), data), compute)

    def totals(self, plan: Plan, layout: LayoutSection, held: Held) -> tuple[float, float]:
        """Return the total seconds of the gathers before a forward and of all scatters: the sums of `exchanges`."""
        if not held.units:
            return 0.0, 0.0
        algorithm, data = plan.collectives.all_reduce, self.network.axis(layout, "data")

        def compute() -> tuple[float, float, list[tuple[int, int]]]:
            units, _ = self._on_shard(plan, layout, held)
            parts = Counter(one.part for one in units)
            return sum(one.gather for one in units), sum(one.scatter for one in units), list(parts.items())

        key = self._shard_key(plan, layout, held)
        gathers, scatters, parts = self._known.once(("shard totals", *key), compute)
        asked = self.network.asked
        return gathers, scatters + sum(n * asked(algorithm, "all_reduce", part, data) for part, n in parts)

    def _shard_key(
        self, plan: Plan, layout: LayoutSection, held: Held
    ) -> tuple[Held, tuple[str, str], int, RankGroup, str]:
        widths, shard = (plan.precision.parameters, plan.precision.reduce), self.network.axis(layout, "shard")
        return held, widths, layout.tensor, shard, plan.collectives.all_reduce

    def _on_shard(self, plan: Plan, layout: LayoutSection, held: Held) -> tuple[list[_UnitSeconds], set[int]]:
        """Return the exchanges of each unit on the shard axis, and the distinct sizes in bytes of later sums."""
        of_shard = self._shard_key(plan, layout, held)

        def compute() -> tuple[list[_UnitSeconds], set[int]]:
            sharding = self.accounts.sharding(plan, layout, held)
            price = {}
            for unit in {id(unit): unit for unit in sharding.units}.values():  # equal blocks are one object
                key = "unit exchanges", id(unit), *of_shard[1:]
                price[id(unit)] = self._known.once(key, partial(self._of_unit, sharding, unit, *of_shard[-2:]))
            return [price[id(unit)] for unit in sharding.units], {one.part for one in price.values()}

        return self._known.once(("shard exchanges", *of_shard), compute)

    def _of_unit(self, sharding: Sharding, unit: tuple[Array, ...], shard: RankGroup, algorithm: str) -> _UnitSeconds:
        trained = sharding.trained_of(unit)
        gather = self.network.asked(algorithm, "all_gather", sharding.bytes_of(unit), shard)
        scatter = self.network.asked(algorithm, "reduce_scatter", trained * sharding.reduce_itemsize, shard)
        return _UnitSeconds(gather, scatter, sharding.part_of(trained))


_UPDATE = "update"  # key of the optimizer's rate in `Device.operators`
# Compression schemes that only cast; the compute of other schemes is unknown. `_CAST_BYTES`: bytes moved on a CPU per
# gradient element (copy into the bucket, cast to 16 bits and back), minus those counted when the bucket is sent.
_CASTS = ("bfloat16", "float16")
_CAST_BYTES = (4 + 4) + 2 * (4 + 2) - 2 * 2


class Sums(NamedTuple):
    """Seconds of a rank's gradient sums: all buckets, the last bucket, and all bytes in one message."""

    num_buckets: int
    total: float
    last: float
    at_once: float


@dataclass(frozen=True)
class Exchanged:
    """Seconds of a model's gradient sums, parameter gathers and updates."""

    profile: Profile
    network: Network
    program: Program
    accounts: Accounts
    _known: Remembered = field(default_factory=Remembered, repr=False)

    def _price(self, layout: LayoutSection, sent: Iterable[SizedCollective], algorithm: str = "native") -> float:
        return price(self.network, layout, sent, algorithm)

    @cached_property
    def shard(self) -> ShardExchanges:
        """The exchanges of fully_shard."""
        return ShardExchanges(self.network, self.accounts)

    # -------------------------------------------------------------------------------------------------- the gradients

    def gradients(
        self, plan: Plan, computer: DeviceModel, ranks: Sequence[Rank], behind: float, *, waits: bool
    ) -> float:
        """Return the exposed seconds of gradient sums over replicas and of a step's small sums, for the slowest rank.

        `behind`: seconds of the last backward, which may hide the sums. `waits`: True if the device waits for the host.
        """
        layout = plan.layout
        if layout.world_size == 1:
            return 0.0
        is_divided = plan.shards_model or layout.tensor * layout.pipeline * layout.context > 1
        apart = is_divided or plan.precision.reduce != "float32"
        num_used = self._num_tensors if plan.shards_model else 0
        agreed = self.agreed(layout.world_size, is_divided, apart=apart, num_used=num_used)
        small = [agreed + self._completed(plan, rank.held) for rank in ranks]
        if plan.shards_model or layout.data * layout.shard == 1:
            return max(small)
        if computer.device.kind == "cpu":
            return max(own + self._on_cores(plan, computer, rank) for own, rank in zip(small, ranks, strict=True))
        sums = (self._sums(plan, rank.held) for rank in ranks)
        return max(self._exposed(own, of_rank, behind, waits) for own, of_rank in zip(small, sums, strict=True))

    def _exposed(self, small: float, sums: Sums, behind: float, waits: bool) -> float:
        if not self.program.overlap:
            return small + sums.at_once
        shown = hidden(sums.total, sums.last, behind)
        started = sums.num_buckets * self.program.call_seconds if waits else 0.0
        return small + shown + started + self.program.contention * (sums.total - shown)

    @cached_property
    def _num_tensors(self) -> int:
        return sum(weight.trainable for unit in self.profile.units for weight in unit.body.weights)

    def _sums(self, plan: Plan, held: Held) -> Sums:
        """Return the seconds of the gradient buckets of a rank on a GPU, which are summed one by one."""
        layout = plan.layout
        group = self.network.axis(layout, REPLICAS)

        def compute() -> Sums:
            buckets = list(self._buckets(plan, held, on_cpu=False))
            sent = list(chain.from_iterable(buckets))
            last = sum(self.network.seconds(one.kind, one.num_bytes, group) for one in buckets[-1])
            at_once = self.network.seconds(sent[-1].kind, sum(one.num_bytes * one.count for one in sent), group)
            return Sums(sum(bucket[0].count for bucket in buckets), self._price(layout, sent), last, at_once)

        scatters = self.program.scatter_gradients and layout.shard > 1
        return self._known.once(
            (
                "sums",
                held,
                plan.precision.reduce,
                plan.collectives.compression,
                layout.tensor,
                scatters,
                group,
                layout.world_size,
            ),
            compute,
        )

    def _buckets(self, plan: Plan, held: Held, *, on_cpu: bool) -> Iterator[list[SizedCollective]]:
        """Yield the collectives of each gradient bucket of a rank, in sending order.

        Programs without shoal's buckets have equal ones. A bucket that is cast also has small collectives: its scale,
        and the elements that are not cast.
        """
        layout, program = plan.layout, self.program
        gradients = self.accounts.gradients(plan, held, on_cpu=on_cpu)
        if program.own_buckets and plan.collectives.compression in _CASTS:
            sections = {"collectives": plan.collectives.model_copy(update={"all_reduce": "native"})}
            for calls in compressed_buckets(gradients, plan.model_copy(update=sections), 0):
                yield [SizedCollective(REPLICAS, one.kind, one.num_bytes, one.count) for one in calls]
            return
        if program.own_buckets:
            yield from ([one] for one in bucket_sums(gradients, plan.degrees, plan.collectives.all_reduce == "native"))
            return
        kind = "reduce_scatter" if program.scatter_gradients and layout.shard > 1 else "all_reduce"
        num_bytes = gradients.numel * gradients.reduce_itemsize
        count = max(1, -(-num_bytes // (GLOO_BUCKET_BYTES if on_cpu else NCCL_BUCKET_BYTES)))
        yield [SizedCollective(REPLICAS, kind, -(-num_bytes // count), count)]

    def _on_cores(self, plan: Plan, computer: DeviceModel, rank: Rank) -> float:
        """Return the seconds in which a CPU rank copies its gradients into buckets and sums the buckets."""
        layout = plan.layout
        ranks, group = layout.data * layout.shard, self.network.axis(layout, REPLICAS)

        def moved(num_bytes: float) -> float:
            return computer.moved(num_bytes, rank.size.touched, in_place=True)

        seconds = 0.0
        for one in chain.from_iterable(self._buckets(plan, rank.held, on_cpu=True)):
            if one.kind == "all_gather":  # each rank sums the other ranks' parts itself
                bucket = one.num_bytes / ranks
                summed = self.network.seconds(one.kind, one.num_bytes, group) + (ranks - 1) * moved(3 * bucket)
            else:
                bucket = one.num_bytes
                summed = self.network.all_reduce(plan.collectives.all_reduce, bucket, group)
            seconds += one.count * (moved(2 * bucket) + summed)
        if plan.collectives.compression in _CASTS:
            seconds += moved(_CAST_BYTES * self.accounts.gradients(plan, rank.held, on_cpu=True).numel)
        return seconds

    def agreed(self, num_devices: int, is_divided: bool, *, apart: bool, num_used: int = 0) -> float:
        """Return the seconds of a step's small collectives: sums and agreement if `apart`, norm if `is_divided`.

        `apart`: sums and agreement are messages of their own. `num_used`: number of parameters for which ranks report
        whether they had a gradient.
        """
        if not self.program.own_buckets:
            return 0.0
        everyone = self.network.group(num_devices, 1)

        def compute() -> float:
            small = [sums(Gradients(()), num_used), rows(num_devices)] if apart else []
            small += [norm()] if is_divided else []
            return sum(self.network.seconds(one.kind, one.num_bytes, everyone) for one in small)

        return self._known.once(("agreed", everyone, is_divided, apart, num_used), compute)

    def _completed(self, plan: Plan, held: Held) -> float:
        """Return the seconds of summing partial gradients: blocks over a context axis, tied weights over stages."""
        layout = plan.layout
        if not self.program.own_buckets or layout.context * layout.pipeline == 1:
            return 0.0
        stages = self.network.axis(layout, "pipeline")

        def compute() -> float:
            return self._price(layout, completed(self._partial(layout, held)))

        return self._known.once(("completed", held, layout.tensor, layout.context, stages), compute)

    def _partial(self, layout: LayoutSection, held: Held) -> Iterator[Partial]:
        def partial(axis: str, weights: Iterable[Weight], num_flags: int) -> Partial:
            return Partial(axis, num_flags, tuple((w.numel_of(layout.tensor), w.itemsize) for w in weights))

        if layout.context > 1:
            num_flags = sum(1 for _ in _trainable(self.profile.units))
            yield partial("context", _trainable(held.units), num_flags)
        if layout.pipeline > 1 and self.profile.tied:
            yield partial("pipeline", self._tied, len(self._tied))

    @cached_property
    def _tied(self) -> list[Weight]:
        tied = {name for name, _ in self.profile.tied}
        weights = [(unit, w) for unit in self.profile.units for w in unit.body.weights]
        # Names in repeated bodies are relative to the unit.
        return [w for unit, w in weights if (f"{unit.name}.{w.name}" if unit.body.repeated else w.name) in tied]

    def ends(self, share: Share) -> float:
        """Return the all_gather seconds per microbatch at both ends of the blocks that a context axis divides."""
        if share.context == 1 or not self.program.own_buckets:
            return 0.0
        blocks = [unit.body for unit in self.profile.units if unit.body.repeated]
        if not blocks:
            return 0.0
        group = self.network.group(share.context, share.tensor)
        crossing = blocks[0].input_bytes, blocks[-1].output_bytes
        return sum(self.network.seconds("all_gather", amount.at(share.samples), group) for amount in crossing)

    # ------------------------------------------------------------------------------------------------- the parameters

    def parameters(self, plan: Plan, ranks: Ranks, slowed: float) -> float:
        """Return the exposed seconds of parameter gathers and gradient scatters on the busiest rank.

        `slowed`: fraction of a collective's time by which the collective slows the compute that hides it.
        """
        level, microbatches = plan.shard.level, ranks.microbatches
        if plan.layout.shard == 1 or level == "optimizer":
            return 0.0
        if self.program.gathers_apart:
            return self._apart(plan, ranks.busiest.held) * microbatches
        busiest = ranks.busiest
        exchanges = self.shard.exchanges(plan, plan.layout, busiest.held)

        def compute() -> tuple[float, float, float]:
            forwards, backwards = busiest.unit_forwards, busiest.unit_backwards[::-1]
            nothing = [0.0] * len(forwards)
            again = exchanges.again[::-1] if level == "parameters" else nothing
            once = gathered(forwards, exchanges.gathers, nothing, slowed) - sum(forwards)
            back = gathered(backwards, again, exchanges.scatters[::-1], slowed) - sum(backwards)
            return once, back, gathered(backwards, again, nothing, slowed) - sum(backwards) if late else 0.0

        # The busiest rank does not depend on the schedule or, beyond one, on the number of microbatches.
        late = plan.shard.reduce != "every_microbatch"
        once, back, quiet = self._known.once(("exposed", busiest, id(exchanges), level, slowed, late), compute)
        if microbatches == 1 or not late:
            return (once + back) * microbatches
        return once * microbatches + back + quiet * (microbatches - 1)

    def copied(self, plan: Plan, computer: DeviceModel, ranks: Ranks) -> float:
        """Return the seconds of CPU copies for the gathers and scatters of fully_shard, without the collectives.

        A gather copies the rank's part into the message and all parts into parameters. A scatter copies gradients into
        the message and the result into the rank's part.
        """
        held, times = ranks.busiest.held, 2 if plan.shard.level == "parameters" else 1
        touched = ranks.busiest.size.touched
        sharding, degree = self.accounts.sharding(plan, plan.layout, held), plan.layout.shard
        late = plan.shard.reduce != "every_microbatch"
        seconds = 0.0
        for number in range(len(sharding.units)):
            gathered, scattered = sharding.gather(number).num_bytes, sharding.scatter(number).num_bytes
            one = times * sum(computer.moved(2 * size, touched) for size in (gathered / degree, gathered))
            back = sum(computer.moved(2 * size, touched) for size in (scattered, scattered / degree))
            seconds += one * ranks.microbatches + back * (1 if late else ranks.microbatches)
        return seconds

    def _apart(self, plan: Plan, held: Held) -> float:
        """Return the seconds per microbatch of unhidden gathers and scatters, one large parameter at a time.

        `plans.accounting` counts the same for a unit: a gather for the forward, one for the backward, and a scatter.
        """
        group, times = self.network.axis(plan.layout, "shard"), 2 if plan.shard.level == "parameters" else 1
        gathered, reduced = ITEMSIZE[plan.precision.parameters], ITEMSIZE[plan.precision.reduce]
        seconds = 0.0
        for weight in (w for unit in held.units for w in unit.body.weights):
            numel = weight.numel_of(plan.layout.tensor)
            if numel >= LARGE_PARAMETER:
                seconds += times * self.network.seconds("all_gather", numel * gathered, group)
                seconds += self.network.seconds("reduce_scatter", numel * reduced, group)
                seconds += (times + 1) * group.size * self.program.slice_seconds
        return seconds

    # ----------------------------------------------------------------------------------------------------- the update

    def update(self, plan: Plan, computer: DeviceModel, ranks: Sequence[Rank], *, bound: bool = False) -> float:
        """Return the seconds of clipping and update on the slowest rank, with the broadcast of parameters under ZeRO-1.

        `bound`: return a lower bound that is cheaper to compute.
        """
        layout, seconds = plan.layout, self._rewritten(plan, computer, [rank.size for rank in ranks])
        if plan.shares_memory:  # the ranks synchronize before the update, over the norm, and after it
            return max(seconds) + self._price(layout, agreement(layout.world_size), plan.collectives.all_reduce)
        if layout.shard == 1 or plan.shard.level != "optimizer":
            return max(seconds)
        agreed = self._price(layout, agreement(layout.world_size)) if self.program.own_buckets else 0.0
        handed_out = [self._handed_out(plan, rank, agreed, bound) for rank in ranks]
        return max(own + others for own, others in zip(seconds, handed_out, strict=True))

    def _rewritten(self, plan: Plan, computer: DeviceModel, sizes: Sequence[StageSize]) -> list[float]:
        """Return the seconds of memory traffic and launches of clipping and update, for each of these rank sizes."""
        profile, device, program = self.profile, computer.device, self.program
        owners, launches, passes = plan.num_owners, profile.optimizer_launches, profile.optimizer_passes
        has_part = plan.shards_model or plan.shares_memory  # under ZeRO-1 each rank has all gradients
        found = []
        for size in sizes:
            elements = size.trainable / owners
            width = size.parameter_bytes / size.numel if size.numel else 4.0
            per_element = width * passes
            if program.fused_optimizer:
                state = profile.state_bytes_per_element + program.master_bytes
                per_element = 2 * (width + state) + (program.gradient_bytes or width)
            num_bytes = elements * per_element
            whole = elements if has_part else size.trainable
            num_bytes += whole * program.gradient_passes * ITEMSIZE[plan.precision.reduce]
            seconds = computer.rewritten(num_bytes, size.touched, _UPDATE) + launches * device.launch_seconds
            found.append(max(seconds, launches * device.dispatch_seconds))
        return found

    def _handed_out(self, plan: Plan, rank: Rank, agreed: float, bound: bool) -> float:
        """Return the seconds of the ZeRO-1 parameter exchange: an agreement, then broadcasts of pieces by each owner.

        The bound counts one start per owner, and all bytes in a single message.
        """
        layout, held, algorithm = plan.layout, rank.held, plan.collectives.all_reduce
        group = self.network.axis(layout, "shard")
        if not self.program.own_buckets:
            return self.network.seconds("all_gather", rank.size.parameter_bytes, group)
        if bound:
            network, num_owners = self.network.serving(algorithm, group), min(layout.shard, held.num_tensors)
            start = network.call(group) + (group.size - 1) * network.latency(group)
            all_bytes = rank.size.parameter_bytes if rank.size.trainable == rank.size.numel else 0.0
            at_once = network.seconds("broadcast", all_bytes, group)
            return agreed + max(0, num_owners - 1) * start + at_once

        def compute() -> float:
            gradients = self.accounts.gradients(plan, held, on_cpu=False)
            sent = (one for one in sharded_optimizer(gradients, plan.degrees) if one.group == "shard")
            return self._price(layout, sent, algorithm)

        return agreed + self._known.once(
            ("handed out", held, layout.tensor, group, layout.world_size, algorithm), compute
        )


def _trainable(units: Iterable[Unit]) -> Iterator[Weight]:
    """Return the trained weights of the blocks."""
    return (w for unit in units if unit.body.repeated for w in unit.body.weights if w.trainable)
