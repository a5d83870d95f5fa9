"""Seconds and bytes of a step under a plan, each term by its name. The formulas are in docs/planner.md."""

from __future__ import annotations

from shoal.hardware.values import Cluster
from shoal.planner.predict.accounts import Accounts
from shoal.planner.predict.collective_time import Network
from shoal.planner.predict.exposed_time import Exchanged
from shoal.planner.predict.lower_bounds import ROUNDED, Blocks, BlockSize, BlockStates, least_peak
from shoal.planner.predict.memory import States
from shoal.planner.predict.pipeline_ranks import Filled, Rank, Ranks, Staging
from shoal.planner.predict.roofline import ITEMSIZE, Share
from shoal.planner.predict.stage_split import StageDivision
from shoal.planner.predict.workload import CATEGORIES, TERMS, Prediction, Program, Workload
from shoal.plans.plan import Plan
from shoal.plans.schedule import ActionKind, actions, simulate


class Predictor:
    """Performance model of one workload on one cluster; costs of bodies are computed once for all plans."""

    def __init__(self, work: Workload, cluster: Cluster, program: Program | None = None) -> None:
        self.work, self.cluster, self.program = work, cluster, program or Program()
        self.network = Network(cluster)
        accounts = Accounts()
        self.exchanged = Exchanged(work.profile, self.network, self.program, accounts)
        self.staging = Staging(work, cluster, self.network, self.program)
        self.states = States(work.profile, self.program, accounts)
        self._flops = work.profile.flops(work.global_batch)
        self._executed: float | None = None
        self._simulated: dict[tuple[object, ...], float] = {}
        self._crossing: dict[tuple[StageDivision, float], float] = {}

    def predict(self, plan: Plan) -> Prediction:
        """Prediction of a step of the plan."""
        ranks = self.staging.ranks(plan)
        terms = self.seconds(plan, ranks)
        memory = max((self._bytes(plan, ranks, rank) for rank in ranks.fullest), key=lambda found: sum(found.values()))
        seconds, peak = sum(terms.values()), sum(memory.values())
        missing = max(0.0, peak - self.cluster.usable_bytes(self.staging.device(plan)))
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
            split=self.staging.division(plan).firsts,
        )

    def first_bytes(self, plan: Plan) -> float:
        """The peak of the first rank, which some measurements are of."""
        ranks = self.staging.ranks(plan)
        return sum(self._bytes(plan, ranks, ranks.every[0]).values())

    def _used(self, plan: Plan, flops: float) -> float:
        """Seconds that a device at its peak takes for the part that it executes of the model's FLOPs."""
        computer, samples = self.staging.costs(plan).computer, self.work.global_batch
        if self._executed is None:
            units, whole = self.work.profile.units, self._flops
            less = sum(computer.spared(operation, samples) for unit in units for operation in unit.body.operations)
            self._executed = 1.0 - less / whole if whole else 1.0
        return flops * self._executed / computer.device.flops[computer.dtype(plan.precision.compute)]

    # ------------------------------------------------------------------------------------------------------ its seconds

    def seconds(self, plan: Plan, ranks: Ranks, makespan: float | None = None) -> dict[str, float]:
        """The terms; where the makespan of the pipeline is given it is not simulated, and all of them are bounds."""
        share, microbatches, busy = ranks.share, ranks.microbatches, ranks.busy_seconds
        terms = dict.fromkeys(TERMS, 0.0)
        terms.update(ranks.spent)
        terms["context"] += self.exchanged.ends(share) * microbatches
        computer = self.staging.costs(plan).computer
        device = computer.device
        # On a CPU large messages leave the caches: no bound from their sum.
        bound = makespan is not None and device.kind != "cpu"
        spread = self._spread(plan)
        if spread.shards_model:
            slowed = 1.0 if device.kind == "cpu" else self.program.contention
            terms["parameters"] = self.exchanged.parameters(spread, ranks, slowed)
            if device.kind == "cpu":
                terms["parameters"] += self.exchanged.copied(spread, computer, ranks)
        if plan.layout.pipeline > 1:
            message = self.message(plan, share)
            if makespan is None:
                makespan = self._makespan(plan, ranks, message)
            terms["pipeline"] = 2 * message * microbatches * plan.pipeline.stages_per_rank
            terms["bubble"] = max(0.0, makespan - busy - terms["pipeline"])
        last, waits = ranks.last_seconds, terms["launch"] > 0
        gradients = self.exchanged.gradients
        terms["gradients"] = max(gradients(spread, computer, rank, last, waits) for rank in ranks.fullest)
        terms["optimizer"] = max(self.exchanged.update(spread, computer, rank, bound=bound) for rank in ranks.fullest)
        fetched = self.work.sample_seconds * share.samples * microbatches
        # The host fetches while a GPU computes; a CPU does one after the other.
        terms["data"] = fetched if device.kind == "cpu" else max(0.0, fetched - busy)
        num_tensors = max(rank.held.num_tensors for rank in ranks.fullest)
        of_step, of_tensor, _ = device.beside(_divides(plan))
        terms["host"] = of_step + of_tensor * num_tensors
        return terms

    def _spread(self, plan: Plan) -> Plan:
        """The plan whose shard axis is what the program divides states over: context ranks too, where it does."""
        layout = plan.layout
        if not self.program.shards_context or layout.context == 1:
            return plan
        return plan.with_sections(layout={"shard": layout.shard * layout.context, "context": 1})

    def message(self, plan: Plan, share: Share) -> float:
        """Seconds of handing one microbatch's activation to the next stage."""
        division, samples = self.staging.division(plan), share.local_samples
        num_bytes = self._crossing.get((division, samples))
        if num_bytes is None:
            ends = (stage[-1].body for stage in division.stages[:-1] if stage)
            num_bytes = max((body.output_bytes.at(samples) for body in ends), default=0.0)
            self._crossing[division, samples] = num_bytes
        stride = plan.layout.world_size // plan.layout.pipeline
        parts = share.tensor if share.sequence or self.program.scatter_messages else 1
        seconds = self.network.seconds("send", num_bytes / parts, self.network.hop(plan.layout.pipeline, stride))
        if parts > 1 and not share.sequence:
            seconds += self.network.seconds("all_gather", num_bytes, self.network.group(parts, 1))
        return seconds

    def _makespan(self, plan: Plan, ranks: Ranks, message: float) -> float:
        pipeline, per = plan.layout.pipeline, plan.pipeline.stages_per_rank
        key = ranks, message
        if key not in self._simulated:
            passes = self.staging.passes(plan)
            seconds = {
                ActionKind.FORWARD: [one.forward_seconds + message for one in passes],
                ActionKind.BACKWARD: [one.backward_seconds + message for one in passes],
                ActionKind.BACKWARD_INPUT: [one.backward_seconds - one.weight_seconds + message for one in passes],
                ActionKind.BACKWARD_WEIGHT: [one.weight_seconds for one in passes],
            }
            lists = actions(plan.pipeline.schedule, pipeline, per, ranks.microbatches)
            self._simulated[key] = simulate(lists, lambda action: seconds[action.kind][action.stage])[0]
        return self._simulated[key]

    # -------------------------------------------------------------------------------------------------------- its bytes

    def _bytes(self, plan: Plan, ranks: Ranks, rank: Rank) -> dict[str, float]:
        on_cpu = self.staging.device(plan).kind == "cpu"
        states = self.states.bytes(self._spread(plan), rank.held, rank.size, ranks.microbatches, on_cpu=on_cpu)
        return self.in_all(plan, rank, {**states, "communication": self._buckets(plan, rank)})

    def in_all(self, plan: Plan, rank: Rank | Filled, states: dict[str, float]) -> dict[str, float]:
        """Bytes of a rank by category, where `states` are known: with activations, and what allocator and driver hold.

        No less where a state has more.
        """
        memory = dict.fromkeys(CATEGORIES, 0.0)
        memory.update(states)
        memory["activations"] = rank.in_flight * rank.size.saved + rank.size.transient
        device = self.staging.device(plan)
        if device.kind == "cpu":
            memory["allocator"] = self.program.heap_share * sum(memory.values())
        else:
            memory["allocator"] = self._fragmented(plan) * memory["activations"]
        memory["reserved"] = device.beside(_divides(plan))[2]
        return memory

    def _fragmented(self, plan: Plan) -> float:
        """What a GPU's allocator has beside activations, as a share of them."""
        return self.program.pipeline_fragmentation if plan.layout.pipeline > 1 else self.program.fragmentation

    def least_peak(self, plan: Plan, memory: float, per_element: float) -> float:
        """Peak that no cut into stages goes below, of the blocks alone; `per_element`: bytes beside a rank's states.

        It tells apart only what is more than `memory` or not.
        """
        states = self.block_states(plan, per_element)
        if not states.number:
            return 0.0
        # Of an interleaved pipeline the cut decides how many microbatches a rank's blocks keep: none is counted here.
        looped = plan.pipeline.schedule == "interleaved_1f1b" and plan.layout.pipeline > 1
        in_flight = (0.0,) * plan.layout.pipeline if looped else self.staging.in_flight(plan)
        return least_peak(states.with_activations(self.block_size(plan)), states.number, in_flight, memory)

    def block_size(self, plan: Plan) -> BlockSize:
        """Activations of a block: of a microbatch and its recomputation, and by what a sample is divided."""
        if self.staging.blocks is None:
            return BlockSize()
        size = self.staging.size(self.staging.blocks[0], plan)
        return BlockSize(size.saved, size.transient)

    def block_states(self, plan: Plan, per_element: float) -> BlockStates:
        """Bytes of the blocks beside activations, whatever the microbatch and its recomputation."""
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
        """Peak with the least that the states of a rank take; `per_element`: bytes beside them.

        As `in_all` has it, without the categories: it is asked of very many plans.
        """
        (_, microbatches), device = self.staging.share(plan), self.staging.device(plan)
        on_cpu, reserved = device.kind == "cpu", device.beside(_divides(plan))[2]
        of_heap, of_activations = (self.program.heap_share, 0.0) if on_cpu else (0.0, self._fragmented(plan))
        worst = 0.0
        for rank in self.staging.fullest(plan):
            size = rank.size
            states = self.states.least(plan, rank.held, size, microbatches) + size.trainable * per_element
            activations = rank.in_flight * size.saved + size.transient
            own = states + activations
            worst = max(worst, own + (of_heap * own + of_activations * activations) + reserved)
        return worst

    def blocks(self, plan: Plan) -> Blocks:
        """The blocks of the model, and one microbatch on each of them."""
        if self.staging.blocks is None:
            return Blocks()
        (body, count), (share, microbatches) = self.staging.blocks, self.staging.share(plan)
        costs, again = self.staging.costs(plan), plan.memory.recompute
        seconds = {b: costs.body(b, share, again, microbatches > 1).device_seconds for b in self.staging.bodies}
        longest = max((found for other, found in seconds.items() if other != body), default=0.0)
        last = seconds[self.staging.parts[-1].body]
        # What the host starts for gradients of weights may hide what the device does before: then that counts less.
        spared = {b: costs.body(b, share, again, microbatches > 1).weight_seconds for b in self.staging.bodies}
        through = sum(number * (seconds[b] - spared[b]) for b, number in self.staging.bodies.items())
        through = max(0.0, through) * (1 - ROUNDED)
        return Blocks(count, seconds[body], longest, last, through)

    def _kept(self, rank: Rank, share: Share) -> int:
        """What the meter of a run counts as activations. Of the batch, inputs are most, and kept where they enter."""
        enters = bool({self.work.profile.units[0], self.staging.parts[0]}.intersection(rank.held.units))
        batch = self.work.profile.saved_batch.at(share.samples) if enters else 0.0
        return round(rank.in_flight * (rank.size.saved + batch))

    def _buckets(self, plan: Plan, rank: Rank) -> float:
        """What sums have beside the gradients: in shared memory every rank maps the others' buckets, and reads them."""
        ranks, per_element = plan.layout.data * plan.layout.shard, self.program.bucket_bytes
        if ranks == 1 or plan.shards_model:
            return 0.0
        if plan.collectives.all_reduce == "shared_memory":
            per_element += ITEMSIZE[plan.precision.reduce] * (ranks - 1)
        return rank.size.trainable * per_element + self.program.buffer_bytes


def _divides(plan: Plan) -> str:
    """The axis that divides the model, the one that the engine does most for where there are several; "" for none."""
    layout = plan.layout
    if layout.tensor > 1:
        return "tensor"
    if plan.shards_model:
        return "shard"
    return "pipeline" if layout.pipeline > 1 else ""
