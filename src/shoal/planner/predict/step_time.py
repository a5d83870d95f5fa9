"""Seconds of a step by term, and bytes by category, under a plan. The formulas are in docs/planner.md."""

from __future__ import annotations

from shoal.hardware.values import Cluster, Device
from shoal.planner.predict.accounts import Accounts
from shoal.planner.predict.collective_time import Network
from shoal.planner.predict.exposed_time import Exchanged
from shoal.planner.predict.lower_bounds import ROUNDED, Blocks, BlockSize, BlockStates
from shoal.planner.predict.makespan import makespan
from shoal.planner.predict.memory import Rank, States
from shoal.planner.predict.pipeline_ranks import Ranks, Staging
from shoal.planner.predict.roofline import ITEMSIZE
from shoal.planner.predict.share import Share
from shoal.planner.predict.workload import CATEGORIES, TERMS, Prediction, Program, Workload
from shoal.plans.accounting.collectives import REPLICAS
from shoal.plans.plan import Plan, divisors


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
        self._known_beside: dict[tuple[int, str], tuple[float, float, float]] = {}
        self._simulated: dict[tuple[object, ...], float] = {}

    def predict(self, plan: Plan) -> Prediction:
        """Predict a step of the plan."""
        ranks = self.staging.ranks(plan)
        terms = self.seconds(plan, ranks)
        memory = max((self._bytes(plan, ranks, rank) for rank in ranks.fullest), key=lambda found: sum(found.values()))
        seconds, peak = sum(terms.values()), sum(memory.values())
        missing = max(0.0, peak - self.cluster.usable_bytes(ranks.device))
        flops = self._flops / plan.layout.world_size
        return Prediction(
            step_seconds=seconds,
            terms=terms,
            memory=memory,
            peak_bytes=peak,
            fits=missing == 0,
            missing_bytes=missing,
            bubble=terms["bubble"] / seconds if seconds else 0.0,
            flops_per_device=flops,
            mfu=self._used(plan, flops) / seconds if seconds else None,
            kept_bytes=tuple(self._kept(rank, ranks.share) for rank in ranks.every),
            split=ranks.model.division.firsts,
        )

    def first_bytes(self, plan: Plan) -> float:
        """Return the peak bytes of the first rank, since some measurements are of that rank."""
        ranks = self.staging.ranks(plan)
        return sum(self._bytes(plan, ranks, ranks.every[0]).values())

    def _used(self, plan: Plan, flops: float) -> float:
        """Return the seconds that a device at its peak needs for the executed part of `flops`."""
        computer, samples = self.staging.costs(plan).computer, self.work.global_batch
        if self._executed is None:
            units, whole = self.work.profile.units, self._flops
            less = sum(computer.spared(operation, samples) for unit in units for operation in unit.body.operations)
            self._executed = 1.0 - less / whole if whole else 1.0
        return flops * self._executed / computer.device.flops[computer.dtype(plan.precision.compute)]

    # ---------------------------------------------------------------------------------------------------------- seconds

    def seconds(self, plan: Plan, ranks: Ranks) -> dict[str, float]:
        """Return the seconds of a step by term."""
        makespan = self._makespan(ranks, self.message(plan, ranks)) if plan.layout.pipeline > 1 else 0.0
        return self.with_shared(plan, ranks, self.shared_seconds(plan, ranks, makespan))

    def shared_seconds(self, plan: Plan, ranks: Ranks, makespan: float) -> dict[str, float]:
        """Return the terms that plans with equal data x shard share, and 0 for the other terms.

        `makespan`: seconds of the pipeline. With a lower bound of the makespan, the bubble is a lower bound too.
        """
        share, microbatches, busiest = ranks.share, ranks.microbatches, ranks.busiest
        busy = busiest.seconds * microbatches
        terms = dict.fromkeys(TERMS, 0.0)
        terms.update(busiest.spent(microbatches))
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
        terms, computer, device = dict(shared), self.staging.costs(plan).computer, ranks.device
        on_cpu = device.kind == "cpu"
        spread = self._spread(plan)
        if spread.shards_model:
            terms["parameters"] = self.exchanged.parameters(spread, ranks, 1.0 if on_cpu else self.program.contention)
            if on_cpu:
                terms["parameters"] += self.exchanged.copied(spread, computer, ranks)
        last, waits = ranks.busiest.last_seconds, terms["launch"] > 0
        terms["gradients"] = self.exchanged.gradients(spread, computer, ranks.fullest, last, waits=waits)
        # On a CPU large messages leave the caches, so one large message is no bound.
        terms["optimizer"] = self.exchanged.update(spread, computer, ranks.fullest, bound=bound and not on_cpu)
        num_tensors = max(rank.held.num_tensors for rank in ranks.fullest)
        of_step, of_tensor, _ = self._beside(device, _divides(plan))
        terms["host"] = of_step + of_tensor * num_tensors
        if not on_cpu:
            terms["host"] += max(0.0, self.program.host_seconds - ranks.busiest.behind_seconds * ranks.microbatches)
        return terms

    def _beside(self, device: Device, axis: str) -> tuple[float, float, float]:
        """Return the cached `device.beside(axis)`, since a search needs it for many plans."""
        key = id(device), axis
        if key not in self._known_beside:
            self._known_beside[key] = device.beside(axis)
        return self._known_beside[key]

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

    def least_summed(self, plan: Plan, ranks: Ranks) -> float:
        """Return a lower bound of the seconds that replicas add on a GPU, for any split into data and shard ranks.

        It assumes that a link moves one large message at least as fast as its parts.
        """
        layout, held, network = plan.layout, ranks.busiest.held, self.network
        replicas, (forward, backward) = layout.data * layout.shard, ranks.busiest.unit_seconds
        kind = "reduce_scatter" if self.program.scatter_gradients else "all_reduce"
        num_bytes = max(rank.size.trainable for rank in ranks.fullest) * ITEMSIZE[plan.precision.reduce]
        least = max(0.0, network.seconds(kind, num_bytes, network.axis(layout, REPLICAS)) - backward)
        if replicas == 1 or least == 0.0:
            return 0.0
        # Every microbatch gathers. Gradients are scattered at least once, after the last one.
        times = 1 if self.program.gathers_apart else ranks.microbatches
        for shard in divisors(replicas)[1:]:
            split = layout.trusted_copy({"data": replicas // shard, "shard": shard})
            gathers, scatters = self.exchanged.shard.totals(plan, split, held)
            least = min(least, times * max(0.0, gathers - forward) + max(0.0, scatters - backward))
        return least

    def _makespan(self, ranks: Ranks, message: float) -> float:
        key = ranks.model, ranks.shape, message
        if key not in self._simulated:
            self._simulated[key] = makespan(ranks.shape, ranks.passes, message)
        return self._simulated[key]

    # ------------------------------------------------------------------------------------------------------------ bytes

    def _bytes(self, plan: Plan, ranks: Ranks, rank: Rank) -> dict[str, float]:
        on_cpu = ranks.device.kind == "cpu"
        states = self.states.bytes(self._spread(plan), rank.held, rank.size, ranks.microbatches, on_cpu=on_cpu)
        return self.in_all(plan, rank, {**states, "communication": self._buckets(plan, rank)})

    def in_all(self, plan: Plan, rank: Rank, states: dict[str, float]) -> dict[str, float]:
        """Return the bytes of a rank by category: its `states`, activations, and overhead of allocator and driver.

        The total never shrinks when a state grows.
        """
        memory = dict.fromkeys(CATEGORIES, 0.0)
        memory.update(states)
        memory["activations"] = rank.activations
        device = self.staging.device(plan)
        if device.kind == "cpu":
            memory["allocator"] = self.program.heap_share * sum(memory.values())
        else:
            memory["allocator"] = self._fragmented(plan) * memory["activations"]
        memory["reserved"] = device.beside(_divides(plan))[2]
        return memory

    def _fragmented(self, plan: Plan) -> float:
        """Return the overhead of a GPU's allocator as a fraction of the activations."""
        return self.program.pipeline_fragmentation if plan.layout.pipeline > 1 else self.program.fragmentation

    def block_size(self, plan: Plan) -> BlockSize:
        """Return the activation bytes of a block under the plan's microbatch and recomputation."""
        if self.staging.blocks is None:
            return BlockSize()
        size = self.staging.size(self.staging.blocks[0], plan)
        return BlockSize(size.saved, size.transient)

    def block_states(self, plan: Plan, per_element: float) -> BlockStates:
        """Return the bytes of the blocks without activations, for any microbatch and recomputation."""
        if self.staging.blocks is None:
            return BlockStates(0, 0.0, 0.0, 0.0)
        body, count = self.staging.blocks
        device, size = self.staging.device(plan), self.staging.size(body, plan)
        on_cpu = device.kind == "cpu"
        states = 1 + self.program.heap_share if on_cpu else 1.0
        kept = states if on_cpu else 1 + self._fragmented(plan)
        block, once = self.states.of_block(plan, size)
        block = states * (block + per_element * size.trainable)
        return BlockStates(count, block, states * once + device.reserved_bytes, kept)

    def least_bytes(self, plan: Plan, per_element: float) -> float:
        """Return the peak with the least bytes of states. `per_element`: bytes per trained element beside the states.

        The sum is that of `in_all` without categories, since a search calls this for many plans.
        """
        ranks = self.staging.ranks(plan)
        device, microbatches = ranks.device, ranks.microbatches
        on_cpu, reserved = device.kind == "cpu", self._beside(device, _divides(plan))[2]
        of_heap, of_activations = (self.program.heap_share, 0.0) if on_cpu else (0.0, self._fragmented(plan))
        states, worst = self.states.least(plan, ranks.fullest, microbatches), 0.0
        for rank, state in zip(ranks.fullest, states, strict=True):
            activations = rank.activations
            own = state + rank.size.trainable * per_element + activations
            worst = max(worst, own + (of_heap * own + of_activations * activations) + reserved)
        return worst

    def blocks(self, plan: Plan) -> Blocks:
        """Return the blocks of the model with the seconds of one microbatch on each."""
        if self.staging.blocks is None:
            return Blocks()
        (body, count), ranks = self.staging.blocks, self.staging.ranks(plan)
        costs, share, again = self.staging.costs(plan), ranks.share, plan.memory.recompute
        passes = {b: costs.body(b, share, again, ranks.adds) for b in self.staging.bodies}
        seconds = {b: found.device_seconds for b, found in passes.items()}
        longest = max((found for other, found in seconds.items() if other != body), default=0.0)
        last = seconds[self.staging.parts[-1].body]
        # Launches of weight gradients may overlap with earlier device work, so this is too small or even negative.
        through = sum(number * (seconds[b] - passes[b].weight_seconds) for b, number in self.staging.bodies.items())
        through = max(0.0, through) * (1 - ROUNDED)
        return Blocks(count, seconds[body], longest, last, through)

    def _kept(self, rank: Rank, share: Share) -> int:
        """Return the bytes that a run's meter counts as activations, including the batch on the rank that it enters."""
        enters = bool({self.work.profile.units[0], self.staging.parts[0]}.intersection(rank.held.units))
        batch = self.work.profile.saved_batch.at(share.samples) if enters else 0.0
        return round(rank.in_flight * (rank.size.saved + batch))

    def _buckets(self, plan: Plan, rank: Rank) -> float:
        """Return the bytes of sum buffers. In shared memory every rank also maps the other ranks' buckets."""
        ranks, per_element = plan.layout.data * plan.layout.shard, self.program.bucket_bytes
        if ranks == 1 or plan.shards_model:
            return 0.0
        if plan.collectives.all_reduce == "shared_memory":
            per_element += ITEMSIZE[plan.precision.reduce] * (ranks - 1)
        return rank.size.trainable * per_element + self.program.buffer_bytes


def _divides(plan: Plan) -> str:
    """Return the axis that divides the model, or "" if none. Of several axes, the costliest for the engine counts."""
    layout = plan.layout
    if layout.tensor > 1:
        return "tensor"
    if plan.shards_model:
        return "shard"
    return "pipeline" if layout.pipeline > 1 else ""
