"""Seconds of a step by term, and bytes by category, under a plan. The formulas are in docs/planner.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

from shoal.hardware.values import Cluster, Device
from shoal.planner.predict.collective_time import Accounts, Network, ShardExchanges, price
from shoal.planner.predict.compute_time import WINOGRAD, DeviceModel
from shoal.planner.predict.experts import GatheredExperts, divided_profile
from shoal.planner.predict.pipeline import PipelineShape, Rank, Ranks, Staging, makespan
from shoal.planner.predict.states import States, expert_copies, expert_owners
from shoal.planner.predict.workload import (
    CATEGORIES,
    ITEMSIZE,
    LARGE_PARAMETER,
    TERMS,
    ModelPart,
    Prediction,
    Program,
    Share,
    Workload,
)
from shoal.planner.profile.values import OperationKind, Profile
from shoal.plans.accounting.all_reduce import compressed_buckets
from shoal.plans.accounting.collectives import (
    GLOO_BUCKET_BYTES,
    NCCL_BUCKET_BYTES,
    REPLICAS,
    Gradients,
    SizedCollective,
    agreement,
    bucket_sums,
    norm,
    rows,
    sharded_optimizer,
    sums,
)
from shoal.plans.accounting.model_parallel import Partial, completed
from shoal.plans.plan import Plan

_UPDATE = "update"  # key of the optimizer's rate in `Device.operators`
# Compression schemes that only cast; the compute of other schemes is unknown. `_CAST_BYTES`: bytes moved on a CPU per
# gradient element (copy into the bucket, cast to 16 bits and back), minus those counted when the bucket is sent.
_CASTS = ("bfloat16", "float16")
_CAST_BYTES = (4 + 4) + 2 * (4 + 2) - 2 * 2

# -------------------------------------------------------------------------------------- exposed seconds of exchanges


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


class GradientSums(NamedTuple):
    """Seconds of a rank's gradient sums: all buckets, the last bucket, and all bytes in one message."""

    num_buckets: int
    total: float
    last: float
    at_once: float


class Exchanged:
    """Exposed seconds of a model's gradient sums, parameter gathers and updates.

    On a GPU, collectives overlap with compute that can hide them. On a CPU nothing is hidden, since the cores that
    compute also move the bytes of collectives. `shard`: the exchanges of fully_shard.
    """

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

    # -------------------------------------------------------------------------------------------- the gradients

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
        is_divided = shards_model or layout.tensor * layout.pipeline * layout.context * layout.expert > 1
        apart = is_divided or plan.precision.reduce != "float32"
        num_used = self._num_tensors if shards_model else 0
        agreed = self.agreed(layout.world_size, is_divided, apart=apart, num_used=num_used)
        slowest = 0.0
        for rank in ranks:
            seconds = agreed + self._completed(plan, rank.part)
            left = behind  # seconds of the backward without an exchange so far
            if shards_model:
                gathers, scatters = self.shard.totals(plan, layout, rank.part)
                left -= scatters + (gathers if plan.shard.level == "parameters" else 0.0)
            elif layout.data * layout.shard > 1 and computer.device.kind == "cpu":
                seconds += self._on_cores(plan, computer, rank)
            elif layout.data * layout.shard > 1:
                sums = self._sums(plan, rank.part)
                if not program.overlap:
                    seconds += sums.at_once
                else:
                    shown = hidden(sums.total, sums.last, behind)
                    starts = sums.num_buckets * program.call_seconds if waits else 0.0
                    seconds = seconds + shown + starts + program.contention * (sums.total - shown)
                    left -= sums.total - shown
            if rank.size.apart:  # these sums use the same links at the same time
                total = self._expert_sums(plan, rank.size.apart)
                hides = program.overlap and computer.device.kind != "cpu"
                shown = hidden(total, 0.0, max(0.0, left)) if hides else total
                seconds += shown + program.contention * (total - shown)
            slowest = max(slowest, seconds)
        return slowest

    def _expert_sums(self, plan: Plan, numel: float) -> float:
        """Return the seconds in which the ranks with the same experts sum `numel` gradients, bucket by bucket."""
        layout, program = plan.layout, self.program
        group = self.network.group(expert_copies(layout, program), layout.expert * program.expert_tensor)
        if program.shards_experts and plan.shards_model:
            return 0.0  # scattered with the block, see `parameters`
        num_bytes = numel * ITEMSIZE[plan.precision.reduce]
        count = max(1, int(num_bytes // NCCL_BUCKET_BYTES))
        kind = "reduce_scatter" if program.scatter_gradients and layout.shard > 1 else "all_reduce"
        return count * self.network.seconds(kind, num_bytes / count, group)

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
            yield from ([one] for one in bucket_sums(gradients, plan.layout, plan.collectives.all_reduce == "native"))
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
                of_blocks = (w for unit in part.units if unit.body.repeated for w in unit.body.weights)
                blocks = [w for w in of_blocks if w.trainable and not w.apart]
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
        if busiest.size.apart and (owners := expert_owners(plan, self.program)) > 1:
            group = self.network.group(owners, plan.layout.expert * self.program.expert_tensor)
            of_each = busiest.size.apart / busiest.size.num_apart
            gather = self.network.seconds("all_gather", of_each * ITEMSIZE[plan.precision.parameters], group)
            scatter = self.network.seconds("reduce_scatter", of_each * ITEMSIZE[plan.precision.reduce], group)
            forward, backward = busiest.unit_seconds
            # What the other exchanges hide behind, these cannot.
            forward -= max(0.0, sum(exchanges.gathers) - once)
            backward -= max(0.0, sum(exchanges.again) + sum(exchanges.scatters) - back)
            once += max(0.0, busiest.size.num_apart * gather - max(0.0, forward))
            back += max(0.0, busiest.size.num_apart * (gather + scatter) - max(0.0, backward))
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

    def update(
        self, plan: Plan, computer: DeviceModel, ranks: Sequence[Rank], *, ahead: float = 0.0, bound: bool = False
    ) -> float:
        """Return the seconds of clipping and update on the slowest rank, with the broadcast of parameters under ZeRO-1.

        `ahead`: seconds by which a GPU's host is ahead of its device at the end of the backward.
        `bound`: return a lower bound that is cheaper to compute.
        """
        layout, profile, device, program = plan.layout, self.profile, computer.device, self.program
        owners, launches, passes = plan.num_owners, profile.optimizer_launches, profile.optimizer_passes
        shares_memory = plan.shares_memory
        has_part = plan.shards_model or shares_memory  # under ZeRO-1 each rank has all gradients
        alone = [(replace(o, launches=1), o.launches) for o in profile.optimizer_products]
        products = sum(count * (computer.operation(o, Share(1.0)).device - device.launch_seconds) for o, count in alone)
        trainable = sum(w.numel for unit in profile.units for w in unit.body.weights if w.trainable)
        cut = layout.tensor * (layout.shard if plan.shards_model else 1) if program.own_buckets else 1
        sharing = self.network.group(cut, layout.context)  # the ranks with parts of a parameter that one of them owns
        of_ranks = []
        for size in (rank.size for rank in ranks):  # memory traffic and launches of clipping and update
            elements = (size.trainable - size.apart) / owners + size.apart / expert_owners(plan, program)
            width = size.parameter_bytes / size.numel if size.numel else 4.0
            per_element = width * passes
            if program.fused_optimizer:
                state = profile.state_bytes_per_element + program.master_bytes
                per_element = 2 * (width + state) + (program.gradient_bytes or width)
            num_bytes = elements * per_element
            whole = elements if has_part else size.trainable
            num_bytes += whole * program.gradient_passes * ITEMSIZE[plan.precision.reduce]
            seconds = computer.rewritten(num_bytes, size.touched, _UPDATE) + launches * device.launch_seconds
            seconds += products * elements / trainable if products else 0.0
            if profile.optimizer_whole and cut > 1:  # values and gradients to owners, and values back
                part = profile.optimizer_whole / trainable * elements * width
                seconds += sum(self.network.seconds("all_to_all", times * part, sharing) for times in (2, 1))
            of_ranks.append(max(seconds, launches * device.dispatch_seconds - ahead))
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
        own_buckets, alike_bytes = self.program.own_buckets, rank.size.parameter_bytes - rank.size.apart_bytes
        # Programs that divide experts as Megatron-Core does gather them beside the next forward.
        if (owners := expert_owners(plan, self.program)) > 1 and not (own_buckets and self.program.shards_experts):
            sharing = self.network.group(owners, layout.expert * self.program.expert_tensor)
            agreed += self.network.seconds("broadcast" if own_buckets else "all_gather", rank.size.apart_bytes, sharing)
        if not own_buckets:
            return agreed + self.network.seconds("all_gather", alike_bytes, group)
        if bound:
            network, num_owners = self.network.serving(algorithm, group), min(layout.shard, part.num_shared)
            link = network.link(group)
            start = link.call_seconds + (group.size - 1) * link.latency_seconds
            all_bytes = alike_bytes if rank.size.trainable == rank.size.numel else 0.0
            return agreed + max(0, num_owners - 1) * start + network.seconds("broadcast", all_bytes, group)
        key = "broadcast", part, layout.tensor, group, layout.world_size, algorithm, plan.shard.sizes
        if key not in self._known:
            gradients = self.accounts.gradients(plan, part, on_cpu=False)
            sent = (one for one in sharded_optimizer(gradients, plan.layout, plan.shard.sizes) if one.group == "shard")
            self._known[key] = price(self.network, layout, sent, algorithm)
        return agreed + float(self._known[key])


# ---------------------------------------------------------------------------------------------------------- the model


class Overheads(NamedTuple):
    """Seconds and bytes of a device beside the model: per step, per parameter tensor of a step, and reserved."""

    step_seconds: float
    tensor_seconds: float
    reserved_bytes: float


class Predictor:
    """Performance model of one workload on one cluster. Costs of bodies are computed once for all plans."""

    def __init__(self, work: Workload, cluster: Cluster, program: Program | None = None) -> None:
        self.work, self.cluster, self.program = work, cluster, program or Program()
        self.network = Network(cluster)
        accounts = Accounts()
        self.exchanged = Exchanged(work.profile, self.network, self.program, accounts)
        self.staging = Staging(work, cluster, self.network, self.program)
        self.states = States(work.profile, self.program, accounts)
        self._flops = work.profile.flops(work.global_batch)
        self._executed: float | None = None
        self._references: dict[str, str] = {}  # by the dtype of compute
        self._overheads: dict[tuple[int, str], Overheads] = {}
        self._makespans: dict[tuple[object, PipelineShape, float], float] = {}
        self._by_degree: dict[int, Predictor] = {}

    def with_experts(self, degree: int) -> Predictor:
        """Return the model of the ranks if `degree` ranks divide the experts of each mixture."""
        if degree == 1 or not self.work.profile.has_experts:
            return self
        if degree not in self._by_degree:
            own = divided_profile(self.work.profile, degree, self.work.imbalance, self.program.expert_tensor)
            self._by_degree[degree] = Predictor(replace(self.work, profile=own), self.cluster, self.program)
            self._by_degree[degree].staging.computers = self.staging.computers
            self._by_degree[degree]._by_degree = {degree: self._by_degree[degree]}
            self._by_degree[degree]._flops = self._flops
        return self._by_degree[degree]

    def predict(self, plan: Plan, grains: int | None = None) -> Prediction:
        """Predict a step of the plan. `grains`: of a replica; None for those of the replica with most."""
        if not plan.execution.exact and (of_degree := self.with_experts(plan.layout.expert)) is not self:
            return of_degree.predict(plan, grains)
        ranks, simulated = self.staging.ranks(plan, grains), 0.0
        if plan.layout.pipeline > 1:
            message = self.message(plan, ranks)
            key = ranks.model, ranks.shape, message
            if key not in self._makespans:
                self._makespans[key] = makespan(ranks.shape, ranks.model.passes(ranks.adds), message)
            simulated = self._makespans[key]
        return self.of_ranks(plan, ranks, simulated)

    def of_ranks(self, plan: Plan, ranks: Ranks, simulated: float) -> Prediction:
        """Predict a step of these ranks of the plan. `simulated`: seconds of the pipeline, 0 without one."""
        work, layout = self.work, plan.layout
        terms = self.with_shared(plan, ranks, self.shared_seconds(plan, ranks, simulated))
        memory = max((self.bytes(plan, ranks, rank) for rank in ranks.fullest), key=lambda known: sum(known.values()))
        seconds, peak = sum(terms.values()), sum(memory.values())
        missing = max(0.0, peak - self.cluster.usable_bytes(ranks.device))
        # Winograd's algorithm does not execute a part of the FLOPs.
        computer, flops = ranks.costs.computer, self._flops / layout.world_size
        if self._executed is None:
            samples, operations = work.global_batch, (o for unit in work.profile.units for o in unit.body.operations)
            less = sum(o.flops.at(samples) * (1.0 - 1.0 / WINOGRAD) for o in operations if computer.spares(o))
            self._executed = 1.0 - less / self._flops if self._flops else 1.0
        at_peak = flops * self._executed / computer.device.flops[self.reference(plan)]
        # A run's meter also counts the batch as activations, on the rank that it enters.
        entering, batch = (
            {work.profile.units[0], self.staging.parts[0]},
            work.profile.saved_batch.at(ranks.share.samples),
        )
        activations = (
            round(rank.in_flight * (rank.size.saved + (0.0 if entering.isdisjoint(rank.part.units) else batch)))
            for rank in ranks.model.every(ranks.shape)
        )
        return Prediction(
            step_seconds=seconds,
            terms=terms,
            memory=memory,
            peak_bytes=peak,
            fits=missing == 0,
            missing_bytes=missing,
            bubble=terms["bubble"] / seconds if seconds else 0.0,
            flops_per_device=flops,
            mfu=at_peak / seconds if seconds else None,
            kept_bytes=tuple(activations),
            split=tuple(stage[0].name for stage in ranks.model.division.stages[1:] if stage),
        )

    def reference(self, plan: Plan) -> str:
        """Return the dtype whose peak is the reference of a plan's `mfu`."""
        compute, computer = plan.precision.compute, self.staging.ranks(plan).costs.computer
        if compute not in self._references:
            operations = (o for unit in self.work.profile.units for o in unit.body.operations)
            convolutions = {o.dtype for o in operations if o.kind is OperationKind.CONVOLUTION}
            names = {computer.dtype(compute), *(computer.dtype(one, OperationKind.CONVOLUTION) for one in convolutions)}
            self._references[compute] = max(names, key=lambda name: computer.device.flops[name])
        return self._references[compute]

    def first_bytes(self, plan: Plan) -> float:
        """Return the peak bytes of the first rank, since some measurements are of that rank."""
        ranks = self.staging.ranks(plan)
        return sum(self.bytes(plan, ranks, ranks.model.every(ranks.shape)[0]).values())

    # ---------------------------------------------------------------------------------------------------------- seconds

    def shared_seconds(self, plan: Plan, ranks: Ranks, makespan: float) -> dict[str, float]:
        """Return the terms that plans with equal data x shard share, and 0 for the other terms.

        `makespan`: seconds of the pipeline. With a lower bound of the makespan, the bubble is a lower bound too.
        """
        share, microbatches, busiest = ranks.share, ranks.microbatches, ranks.busiest
        busy = busiest.seconds * microbatches
        terms = dict.fromkeys(TERMS, 0.0)
        terms.update(busiest.spent(microbatches))
        if self.work.output_bytes and microbatches > 1:  # a first pass computes the outputs of all microbatches
            terms["recompute"] += sum(busiest.unit_forwards) * microbatches
        terms["context"] += self.exchanged.ends(share) * microbatches
        if plan.layout.pipeline > 1:
            terms["pipeline"] = 2 * self.message(plan, ranks) * microbatches * plan.pipeline.stages_per_rank
            terms["bubble"] = max(0.0, makespan - busy - terms["pipeline"])
        fetched = self.work.sample_seconds * share.samples * microbatches
        # A host fetches while its GPU computes. A CPU cannot overlap both.
        terms["data"] = fetched if ranks.device.kind == "cpu" else max(0.0, fetched - busy)
        return terms

    def with_shared(
        self, plan: Plan, ranks: Ranks, shared: dict[str, float], *, bound: bool = False
    ) -> dict[str, float]:
        """Add the terms of replicas to the shared terms. `bound`: these terms may be lower bounds."""
        terms, computer, device, busiest = dict(shared), ranks.costs.computer, ranks.device, ranks.busiest
        on_cpu, spread = device.kind == "cpu", self._spread(plan)
        if spread.shards_model:
            terms["parameters"] = self.exchanged.parameters(spread, ranks, 1.0 if on_cpu else self.program.contention)
            if on_cpu:
                terms["parameters"] += self.exchanged.copied(spread, computer, ranks)
        if plan.execution.exact:
            terms["experts"] = GatheredExperts.of(self.work.profile, plan).seconds(self.network) * ranks.microbatches
        own, stored = _stored(self, plan, ranks)
        last, waits = busiest.last_seconds, terms["launch"] > 0
        terms["gradients"] = own.exchanged.gradients(spread, computer, stored.fullest, last, waits=waits)
        # On a CPU large messages leave the caches, so one large message is no bound.
        ahead = 0.0 if on_cpu else busiest.behind_seconds * ranks.microbatches
        bound = bound and not on_cpu
        terms["optimizer"] = own.exchanged.update(spread, computer, stored.fullest, ahead=ahead, bound=bound)
        num_tensors = max(rank.part.num_tensors for rank in ranks.fullest)
        overheads = self.overheads(device, plan)
        terms["host"] = overheads.step_seconds + overheads.tensor_seconds * num_tensors
        if not on_cpu:
            ahead = max(0.0, ahead - self.work.profile.optimizer_launches * device.dispatch_seconds)
            terms["host"] += max(0.0, self.program.host_seconds - ahead)
        return terms

    def overheads(self, device: Device, plan: Plan) -> Overheads:
        """Return the seconds and bytes beside the model, cached, since a search needs them for many plans.

        They depend on the axis that divides the model. Of several axes, the costliest for the engine counts.
        """
        layout, axis = plan.layout, ""
        if layout.tensor > 1:
            axis = "tensor"
        elif plan.shards_model:
            axis = "shard"
        elif layout.pipeline > 1:
            axis = "pipeline"
        key = id(device), axis
        if key not in self._overheads:
            self._overheads[key] = Overheads(*device.beside(axis))
        return self._overheads[key]

    def _spread(self, plan: Plan) -> Plan:
        """Return the plan with the shard axis that the program divides states over: with context ranks if it does."""
        layout = plan.layout
        if not self.program.shards_context or layout.context == 1:
            return plan
        return plan.with_sections(layout={"shard": layout.shard * layout.context, "context": 1})

    def message(self, plan: Plan, ranks: Ranks) -> float:
        """Return the seconds of sending one microbatch's activation to the next stage."""
        share, num_bytes, pipeline = ranks.share, ranks.model.crossing, plan.layout.pipeline
        stride = plan.layout.world_size // pipeline
        parts = share.tensor if share.sequence or self.program.scatter_messages else 1
        seconds = self.network.seconds("send", num_bytes / parts, self.network.hop(pipeline, stride))
        if parts > 1 and not share.sequence:
            seconds += self.network.seconds("all_gather", num_bytes, self.network.group(parts, 1))
        return seconds

    # ------------------------------------------------------------------------------------------------------------ bytes

    def bytes(self, plan: Plan, ranks: Ranks, rank: Rank) -> dict[str, float]:
        """Return the bytes of a rank by category: states, buffers, activations, and overhead of allocator and driver.

        The total never shrinks when a state grows.
        """
        on_cpu, memory = ranks.device.kind == "cpu", dict.fromkeys(CATEGORIES, 0.0)
        own, stored = _stored(self, plan, ranks)
        mine = rank if own is self else stored.model.every(stored.shape)[rank.place]
        memory |= own.states.bytes(self._spread(plan), mine.part, mine.size, ranks.microbatches, on_cpu=on_cpu)
        if plan.execution.exact:  # gathered experts of one layer, and their gradients of all until these travel
            of_experts = GatheredExperts.of(self.work.profile, plan)
            memory["gathered"] += of_experts.largest_bytes
            memory["gradients"] += of_experts.trained_bytes
        # Every rank has the outputs of the global batch, and the gradients by them.
        memory["activations"] = rank.activations + 2 * self.work.output_bytes * self.work.global_batch
        replicas, per_element = plan.layout.data * plan.layout.shard, self.program.bucket_bytes
        if replicas > 1 and not plan.shards_model:
            if plan.collectives.all_reduce == "shared_memory":  # every rank also maps the other ranks' buckets
                per_element += ITEMSIZE[plan.precision.reduce] * (replicas - 1)
            memory["communication"] = mine.size.trainable * per_element + self.program.buffer_bytes
        if on_cpu:
            memory["allocator"] = self.program.heap_share * sum(memory.values())
        else:
            memory["allocator"] = self.fragmentation(plan) * memory["activations"]
        memory["reserved"] = self.overheads(ranks.device, plan).reserved_bytes
        return memory

    def fragmentation(self, plan: Plan) -> float:
        """Return the overhead of a GPU's allocator as a fraction of the activations."""
        return self.program.pipeline_fragmentation if plan.layout.pipeline > 1 else self.program.fragmentation


def _stored(predictor: Predictor, plan: Plan, ranks: Ranks) -> tuple[Predictor, Ranks]:
    """Return the model of what ranks store and update: in exact mode not all experts that they compute with."""
    own = predictor.with_experts(plan.layout.expert) if plan.execution.exact else predictor
    return own, ranks if own is predictor else own.staging.ranks(plan)
