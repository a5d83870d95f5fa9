"""Exposed communication time of a rank: gradient sums, parameter gathers, and the optimizer update.

The accounts (shoal.plans.accounting), which a run is compared with, list the collectives. This module prices them. On a
GPU, collectives overlap with compute that can hide them. On a CPU nothing is hidden, since the cores that compute also
move the bytes of collectives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

from shoal.planner.predict.collective_time import Network, RankGroup
from shoal.planner.predict.compute_time import ITEMSIZE, DeviceModel
from shoal.planner.predict.pipeline import Rank, Ranks
from shoal.planner.predict.stage_split import ModelPart
from shoal.planner.predict.workload import LARGE_PARAMETER, Program, Share
from shoal.planner.profile.values import Body, Profile
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

_UPDATE = "update"  # key of the optimizer's rate in `Device.operators`
# Compression schemes that only cast; the compute of other schemes is unknown. `_CAST_BYTES`: bytes moved on a CPU per
# gradient element (copy into the bucket, cast to 16 bits and back), minus those counted when the bucket is sent.
_CASTS = ("bfloat16", "float16")
_CAST_BYTES = (4 + 4) + 2 * (4 + 2) - 2 * 2


class Accounts:
    """Inputs of the memory and traffic accounts, computed once for all plans that give a rank the same units."""

    def __init__(self) -> None:
        self._gradients: dict[tuple[ModelPart, int, str, bool], Gradients] = {}
        self._of_bodies: dict[tuple[Body, int], tuple[Array, ...]] = {}
        self._rests: dict[tuple[tuple[Body, ...], int], tuple[Array, ...]] = {}
        self._units: dict[tuple[ModelPart, int], tuple[tuple[tuple[Array, ...], ...], int]] = {}

    def _arrays(self, body: Body, tensor: int) -> tuple[Array, ...]:
        """Return the largest rank's part of each weight of a body, on a tensor axis of this degree."""
        key = body, tensor
        if key not in self._of_bodies:
            arrays = (Array(w.shape_of(tensor), w.itemsize, trainable=w.trainable) for w in body.weights)
            self._of_bodies[key] = tuple(arrays)
        return self._of_bodies[key]

    def gradients(self, plan: Plan, part: ModelPart, *, on_cpu: bool) -> Gradients:
        """Return the gradients of a rank with these units, in the reduce dtype of the plan."""
        tensor, reduce = plan.layout.tensor, plan.precision.reduce
        key = part, tensor, reduce, on_cpu
        if key not in self._gradients:
            arrays = (a for unit in part.units for a in self._arrays(unit.body, tensor) if a.trainable)
            self._gradients[key] = Gradients(tuple(arrays), ITEMSIZE[reduce], on_cpu)
        return self._gradients[key]

    def sharding(
        self, plan: Plan, layout: LayoutSection, part: ModelPart, microbatches: int = 1, *, rounds: bool = True
    ) -> Sharding:
        """Return the units that fully_shard makes of a rank's part of the model: one per block, one for the rest."""
        precision, tensor = plan.precision, layout.tensor
        key = part, tensor
        if key not in self._units:
            arrays = [(unit.body.repeated, self._arrays(unit.body, tensor)) for unit in part.units]
            blocks = (own for repeated, own in arrays if repeated)
            others = tuple(unit.body for unit in part.units if not unit.body.repeated), tensor
            if others not in self._rests:
                self._rests[others] = tuple(a for repeated, own in arrays if not repeated for a in own)
            rest = self._rests[others]  # prices are cached by the identity of this tuple
            # The trained elements after the last block. The backward produces their gradients first.
            last = max((place for place, (repeated, _) in enumerate(arrays) if repeated), default=-1)
            after = (weight for unit in part.units[last + 1 :] for weight in unit.body.weights if weight.trainable)
            self._units[key] = (*blocks, rest), sum(weight.numel_of(tensor) for weight in after)
        units, root_early = self._units[key]
        return Sharding(
            units,
            degree=layout.shard,
            replicas=layout.data,
            microbatches=microbatches,
            kept=frozenset(range(len(units))) if plan.shard.level == "gradients" else frozenset(),
            gather_itemsize=ITEMSIZE[precision.parameters],
            reduce_itemsize=ITEMSIZE[precision.reduce],
            reduce_every=plan.shard.reduce == "every_microbatch",
            root_early=root_early,
            rounds=rounds,
        )


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


def price(network: Network, layout: LayoutSection, sent: Iterable[SizedCollective], algorithm: str = "native") -> float:
    """Return the seconds of collectives without overlap."""
    collectives = list(sent)
    groups = {name: network.axis(layout, name) for name in {one.group for one in collectives}}
    links = {name: network.serving(algorithm, group) for name, group in groups.items()}
    return sum(one.count * links[one.group].seconds(one.kind, one.num_bytes, groups[one.group]) for one in collectives)


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


_ShardKey = tuple[ModelPart, tuple[str, str], int, RankGroup, str]


class ShardExchanges:
    """Exchanges of plans that divide parameters. Equal units are priced once."""

    def __init__(self, network: Network, accounts: Accounts) -> None:
        self._network, self._accounts = network, accounts
        self._exchanges: dict[tuple[_ShardKey, RankGroup], UnitExchanges] = {}
        self._totals: dict[_ShardKey, tuple[float, float, list[tuple[int, int]]]] = {}
        self._units: dict[_ShardKey, list[_UnitSeconds]] = {}
        self._prices: dict[tuple[object, ...], _UnitSeconds] = {}

    def exchanges(self, plan: Plan, layout: LayoutSection, part: ModelPart) -> UnitExchanges:
        """Return the exchanges of a rank with these units on that layout.

        The parameters outside of the blocks are gathered before all others, and their gradients are scattered last.
        """
        if not part.units:
            return UnitExchanges([], [], [])
        data = self._network.axis(layout, "data")
        key = self._key(plan, layout, part), data
        if key not in self._exchanges:
            units, replicas = self._on_shard(plan, layout, part), self._network.serving(key[0][-1], data)
            summed = {
                num_bytes: replicas.seconds("all_reduce", num_bytes, data) for num_bytes in {u.part for u in units}
            }
            *blocks, (first, last) = [(one.gather, one.scatter + summed[one.part]) for one in units]
            left = iter(blocks)
            each = [next(left) if unit.body.repeated else (0.0, 0.0) for unit in part.units]
            gathers, scatters = [gather for gather, _ in each], [scatter for _, scatter in each]
            self._exchanges[key] = UnitExchanges(
                [first + gathers[0], *gathers[1:]],
                [*gathers[:-1], gathers[-1] + first],
                [last + scatters[0], *scatters[1:]],
            )
        return self._exchanges[key]

    def totals(self, plan: Plan, layout: LayoutSection, part: ModelPart) -> tuple[float, float]:
        """Return the total seconds of the gathers before a forward and of all scatters: the sums of `exchanges`."""
        if not part.units:
            return 0.0, 0.0
        key = self._key(plan, layout, part)
        if key not in self._totals:
            units = self._on_shard(plan, layout, part)
            sizes = list(Counter(one.part for one in units).items())
            self._totals[key] = sum(one.gather for one in units), sum(one.scatter for one in units), sizes
        gathers, scatters, sizes = self._totals[key]
        data = self._network.axis(layout, "data")
        replicas = self._network.serving(key[-1], data)
        return gathers, scatters + sum(n * replicas.seconds("all_reduce", num_bytes, data) for num_bytes, n in sizes)

    def _key(self, plan: Plan, layout: LayoutSection, part: ModelPart) -> _ShardKey:
        widths, shard = (plan.precision.parameters, plan.precision.reduce), self._network.axis(layout, "shard")
        return part, widths, layout.tensor, shard, plan.collectives.all_reduce

    def _on_shard(self, plan: Plan, layout: LayoutSection, part: ModelPart) -> list[_UnitSeconds]:
        """Return the exchanges of each unit on the shard axis."""
        key = self._key(plan, layout, part)
        if key not in self._units:
            sharding, (_, *setting) = self._accounts.sharding(plan, layout, part), key
            *_, shard, algorithm = key
            links, units = self._network.serving(algorithm, shard), []
            for unit in sharding.units:  # equal blocks are one object
                one = (id(unit), *setting)
                if one not in self._prices:
                    trained = sharding.trained_of(unit)
                    gather = links.seconds("all_gather", sharding.bytes_of(unit), shard)
                    scatter = links.seconds("reduce_scatter", trained * sharding.reduce_itemsize, shard)
                    self._prices[one] = _UnitSeconds(gather, scatter, sharding.part_of(trained))
                units.append(self._prices[one])
            self._units[key] = units
        return self._units[key]


class GradientSums(NamedTuple):
    """Seconds of a rank's gradient sums: all buckets, the last bucket, and all bytes in one message."""

    num_buckets: int
    total: float
    last: float
    at_once: float


class Exchanged:
    """Seconds of a model's gradient sums, parameter gathers and updates. `shard`: the exchanges of fully_shard."""

    def __init__(self, profile: Profile, network: Network, program: Program, accounts: Accounts) -> None:
        self.profile, self.network, self.program, self.accounts = profile, network, program, accounts
        self.shard = ShardExchanges(network, accounts)
        weights = [(unit, weight) for unit in profile.units for weight in unit.body.weights]
        self._num_tensors = sum(weight.trainable for _, weight in weights)
        self._num_in_blocks = sum(weight.trainable for unit, weight in weights if unit.body.repeated)
        names = {name for name, _ in profile.tied}
        # Names in repeated bodies are relative to the unit.
        self._tied = [w for unit, w in weights if (f"{unit.name}.{w.name}" if unit.body.repeated else w.name) in names]
        self._known: dict[tuple[object, ...], Any] = {}  # by the name of a result, and all of its inputs

    # -------------------------------------------------------------------------------------------------- the gradients

    def gradients(
        self, plan: Plan, computer: DeviceModel, ranks: Sequence[Rank], behind: float, *, waits: bool
    ) -> float:
        """Return the exposed seconds of gradient sums over replicas and of a step's small sums, for the slowest rank.

        `behind`: seconds of the last backward, which may hide the sums. `waits`: True if the device waits for the host.
        """
        layout, program = plan.layout, self.program
        if layout.world_size == 1:
            return 0.0
        shards_model = plan.shards_model
        is_divided = shards_model or layout.tensor * layout.pipeline * layout.context > 1
        apart = is_divided or plan.precision.reduce != "float32"
        num_used = self._num_tensors if shards_model else 0
        agreed = self.agreed(layout.world_size, is_divided, apart=apart, num_used=num_used)
        slowest = 0.0
        for rank in ranks:
            seconds = agreed + self._completed(plan, rank.part)
            if shards_model or layout.data * layout.shard == 1:
                pass
            elif computer.device.kind == "cpu":
                seconds += self._on_cores(plan, computer, rank)
            else:
                sums = self._sums(plan, rank.part)
                if not program.overlap:
                    seconds += sums.at_once
                else:
                    shown = hidden(sums.total, sums.last, behind)
                    starts = sums.num_buckets * program.call_seconds if waits else 0.0
                    seconds = seconds + shown + starts + program.contention * (sums.total - shown)
            slowest = max(slowest, seconds)
        return slowest

    def _sums(self, plan: Plan, part: ModelPart) -> GradientSums:
        """Return the seconds of the gradient buckets of a rank on a GPU, which are summed one by one."""
        layout, group = plan.layout, self.network.axis(plan.layout, REPLICAS)
        scatters = self.program.scatter_gradients and layout.shard > 1
        compression, reduce = plan.collectives.compression, plan.precision.reduce
        key = "sums", part, reduce, compression, layout.tensor, scatters, group, layout.world_size
        if key not in self._known:
            buckets = list(self._buckets(plan, part, on_cpu=False))
            sent = list(chain.from_iterable(buckets))
            last = sum(self.network.seconds(one.kind, one.num_bytes, group) for one in buckets[-1])
            at_once = self.network.seconds(sent[-1].kind, sum(one.num_bytes * one.count for one in sent), group)
            num_buckets, total = sum(bucket[0].count for bucket in buckets), price(self.network, layout, sent)
            self._known[key] = GradientSums(num_buckets, total, last, at_once)
        result: GradientSums = self._known[key]
        return result

    def _buckets(self, plan: Plan, part: ModelPart, *, on_cpu: bool) -> Iterator[list[SizedCollective]]:
        """Yield the collectives of each gradient bucket of a rank, in sending order.

        Programs without shoal's buckets have equal ones. A bucket that is cast also has small collectives: its scale,
        and the elements that are not cast.
        """
        layout, program = plan.layout, self.program
        gradients = self.accounts.gradients(plan, part, on_cpu=on_cpu)
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
        for one in chain.from_iterable(self._buckets(plan, rank.part, on_cpu=True)):
            if one.kind == "all_gather":  # each rank sums the other ranks' parts itself
                bucket = one.num_bytes / ranks
                summed = self.network.seconds(one.kind, one.num_bytes, group) + (ranks - 1) * moved(3 * bucket)
            else:
                bucket = one.num_bytes
                summed = self.network.all_reduce(plan.collectives.all_reduce, bucket, group)
            seconds += one.count * (moved(2 * bucket) + summed)
        if plan.collectives.compression in _CASTS:
            seconds += moved(_CAST_BYTES * self.accounts.gradients(plan, rank.part, on_cpu=True).numel)
        return seconds

    def agreed(self, num_devices: int, is_divided: bool, *, apart: bool, num_used: int = 0) -> float:
        """Return the seconds of a step's small collectives: sums and agreement if `apart`, norm if `is_divided`.

        `apart`: sums and agreement are messages of their own. `num_used`: number of parameters for which ranks report
        whether they had a gradient.
        """
        if not self.program.own_buckets:
            return 0.0
        everyone = self.network.group(num_devices, 1)
        key = "agreed", everyone, is_divided, apart, num_used
        if key not in self._known:
            small = [sums(Gradients(()), num_used), rows(num_devices)] if apart else []
            small += [norm()] if is_divided else []
            self._known[key] = sum(self.network.seconds(one.kind, one.num_bytes, everyone) for one in small)
        seconds: float = self._known[key]
        return seconds

    def _completed(self, plan: Plan, part: ModelPart) -> float:
        """Return the seconds of summing partial gradients: blocks over a context axis, tied weights over stages."""
        layout = plan.layout
        if not self.program.own_buckets or layout.context * layout.pipeline == 1:
            return 0.0
        key = "completed", part, layout.tensor, layout.context, self.network.axis(layout, "pipeline")
        if key not in self._known:
            partial = []
            if layout.context > 1:
                blocks = [w for unit in part.units if unit.body.repeated for w in unit.body.weights if w.trainable]
                partial.append(("context", self._num_in_blocks, blocks))
            if layout.pipeline > 1 and self.profile.tied:
                partial.append(("pipeline", len(self._tied), self._tied))
            sizes = (
                Partial(axis, num_flags, tuple((w.numel_of(layout.tensor), w.itemsize) for w in weights))
                for axis, num_flags, weights in partial
            )
            self._known[key] = price(self.network, layout, completed(sizes))
        seconds: float = self._known[key]
        return seconds

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
        level, microbatches, busiest = plan.shard.level, ranks.microbatches, ranks.busiest
        if plan.layout.shard == 1 or level == "optimizer":
            return 0.0
        if self.program.gathers_apart:
            # Nothing is hidden: one large parameter at a time. `plans.accounting` counts the same for a unit: a gather
            # for the forward, one for the backward, and a scatter.
            group, times, seconds = self.network.axis(plan.layout, "shard"), 2 if level == "parameters" else 1, 0.0
            itemsize, reduce_itemsize = ITEMSIZE[plan.precision.parameters], ITEMSIZE[plan.precision.reduce]
            for weight in (w for unit in busiest.part.units for w in unit.body.weights):
                numel = weight.numel_of(plan.layout.tensor)
                if numel >= LARGE_PARAMETER:
                    seconds += times * self.network.seconds("all_gather", numel * itemsize, group)
                    seconds += self.network.seconds("reduce_scatter", numel * reduce_itemsize, group)
                    seconds += (times + 1) * group.size * self.program.slice_seconds
            return seconds * microbatches
        exchanges = self.shard.exchanges(plan, plan.layout, busiest.part)
        # The busiest rank does not depend on the schedule or, beyond one, on the number of microbatches.
        late = plan.shard.reduce != "every_microbatch"
        key = "exposed", busiest, id(exchanges), level, slowed, late
        if key not in self._known:
            forwards, backwards = busiest.unit_forwards, busiest.unit_backwards[::-1]
            nothing = [0.0] * len(forwards)
            again = exchanges.again[::-1] if level == "parameters" else nothing
            once = gathered(forwards, exchanges.gathers, nothing, slowed) - sum(forwards)
            back = gathered(backwards, again, exchanges.scatters[::-1], slowed) - sum(backwards)
            quiet = gathered(backwards, again, nothing, slowed) - sum(backwards) if late else 0.0
            self._known[key] = once, back, quiet
        once, back, quiet = self._known[key]
        total: float = (once + back) * microbatches
        if microbatches > 1 and late:
            total = once * microbatches + back + quiet * (microbatches - 1)
        return total

    def copied(self, plan: Plan, computer: DeviceModel, ranks: Ranks) -> float:
        """Return the seconds of CPU copies for the gathers and scatters of fully_shard, without the collectives.

        A gather copies the rank's part into the message and all parts into parameters. A scatter copies gradients into
        the message and the result into the rank's part.
        """
        part, times = ranks.busiest.part, 2 if plan.shard.level == "parameters" else 1
        touched = ranks.busiest.size.touched
        sharding, degree = self.accounts.sharding(plan, plan.layout, part), plan.layout.shard
        late = plan.shard.reduce != "every_microbatch"
        seconds = 0.0
        for number in range(len(sharding.units)):
            gathered, scattered = sharding.gather(number).num_bytes, sharding.scatter(number).num_bytes
            one = times * sum(computer.moved(2 * size, touched) for size in (gathered / degree, gathered))
            back = sum(computer.moved(2 * size, touched) for size in (scattered, scattered / degree))
            seconds += one * ranks.microbatches + back * (1 if late else ranks.microbatches)
        return seconds

    # ----------------------------------------------------------------------------------------------------- the update

    def update(self, plan: Plan, computer: DeviceModel, ranks: Sequence[Rank], *, bound: bool = False) -> float:
        """Return the seconds of clipping and update on the slowest rank, with the broadcast of parameters under ZeRO-1.

        `bound`: return a lower bound that is cheaper to compute.
        """
        layout, profile, device, program = plan.layout, self.profile, computer.device, self.program
        owners, launches, passes = plan.num_owners, profile.optimizer_launches, profile.optimizer_passes
        shares_memory = plan.shares_memory
        has_part = plan.shards_model or shares_memory  # under ZeRO-1 each rank has all gradients
        of_ranks = []
        for size in (rank.size for rank in ranks):  # memory traffic and launches of clipping and update
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
            of_ranks.append(max(seconds, launches * device.dispatch_seconds))
        if shares_memory:  # the ranks synchronize before the update, over the norm, and after it
            agreed = price(self.network, layout, agreement(layout.world_size), plan.collectives.all_reduce)
            return max(of_ranks) + agreed
        if layout.shard == 1 or plan.shard.level != "optimizer":
            return max(of_ranks)
        agreed = price(self.network, layout, agreement(layout.world_size)) if program.own_buckets else 0.0
        broadcasts = [self._broadcast(plan, rank, agreed, bound) for rank in ranks]
        return max(own + others for own, others in zip(of_ranks, broadcasts, strict=True))

    def _broadcast(self, plan: Plan, rank: Rank, agreed: float, bound: bool) -> float:
        """Return the seconds of the ZeRO-1 parameter exchange: an agreement, then broadcasts of pieces by each owner.

        The bound counts one start per owner, and all bytes in a single message.
        """
        layout, part, algorithm = plan.layout, rank.part, plan.collectives.all_reduce
        group = self.network.axis(layout, "shard")
        if not self.program.own_buckets:
            return self.network.seconds("all_gather", rank.size.parameter_bytes, group)
        if bound:
            network, num_owners = self.network.serving(algorithm, group), min(layout.shard, part.num_tensors)
            link = network.link(group)
            start = link.call_seconds + (group.size - 1) * link.latency_seconds
            all_bytes = rank.size.parameter_bytes if rank.size.trainable == rank.size.numel else 0.0
            at_once = network.seconds("broadcast", all_bytes, group)
            return agreed + max(0, num_owners - 1) * start + at_once
        key = "broadcast", part, layout.tensor, group, layout.world_size, algorithm
        if key not in self._known:
            gradients = self.accounts.gradients(plan, part, on_cpu=False)
            sent = (one for one in sharded_optimizer(gradients, plan.degrees) if one.group == "shard")
            self._known[key] = price(self.network, layout, sent, algorithm)
        seconds: float = self._known[key]
        return agreed + seconds
