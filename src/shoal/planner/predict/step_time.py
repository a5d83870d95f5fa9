"""Seconds and bytes of a step under a plan, each term by its name. The formulas are in docs/planner.md."""

from __future__ import annotations

from typing import NamedTuple

from shoal.hardware.values import Cluster, Device
from shoal.planner.predict.collective_time import Network
from shoal.planner.predict.exposed_time import Exchanged
from shoal.planner.predict.lower_bounds import Floors
from shoal.planner.predict.memory import state_bytes
from shoal.planner.predict.pipeline_ranks import Rank, Ranks, Staging
from shoal.planner.predict.replica_bound import Load, ReplicaSums, load
from shoal.planner.predict.roofline import ITEMSIZE, Share
from shoal.planner.predict.stage_split import StageDivision
from shoal.planner.predict.stage_time import Passes
from shoal.planner.predict.workload import CATEGORIES, TERMS, Prediction, Program, Workload
from shoal.plans.plan import Plan
from shoal.plans.schedule import Action, ActionKind, actions, simulate


class Turn(NamedTuple):
    """Seconds of one microbatch: down to the last rank, up from it, of gradients of weights above it, and on it."""

    down: float
    up: float
    weights: float
    last: float


class Predictor:
    """Predicts plans of one workload on one cluster; what bodies cost is computed once for all of them."""

    def __init__(self, work: Workload, cluster: Cluster, program: Program | None = None) -> None:
        self.work, self.cluster, self.program = work, cluster, program or Program()
        self._network = Network(cluster)
        self._exchanged = Exchanged(work.profile, self._network, self.program)
        self._staging = Staging(work, cluster, self._network, self.program)
        self._flops = work.profile.flops(work.global_batch)
        self._executed: float | None = None
        self._simulated: dict[tuple[object, ...], float] = {}
        self._least: dict[tuple[object, ...], float] = {}
        self._loads: dict[Ranks, Load] = {}
        self._sums = ReplicaSums(self._network, self.program)
        self._turns: dict[tuple[int, int], Turn] = {}
        self._crossing: dict[tuple[StageDivision, float], float] = {}

    def floors(self, device: Device) -> Floors:
        """What no plan goes below whose ranks have such a device, by its degrees alone."""
        return Floors(self._staging.computer(device), self._network, self.program, self._staging.parts)

    def least_seconds(self, plan: Plan) -> float:
        """A lower bound of the step that knows nothing of data and shard: the busiest rank's work, and the bubble's.

        The last rank waits for the first microbatch to come down all stages before its first, and the step ends when
        its last gradient has gone up them again.
        """
        key = *self._staging.key(plan), plan.pipeline.schedule == "zero_bubble"
        if key not in self._least:
            _, microbatches = self._staging.share(plan)
            whole = [passes.seconds for passes in self._staging.passes(plan)]
            busy = [sum(whole[rank :: plan.layout.pipeline]) for rank in range(plan.layout.pipeline)]
            self._least[key] = max(microbatches * max(busy), self._filled(plan))
        return self._least[key]

    def parts(self, plan: Plan) -> tuple[tuple[int, float], ...]:
        """Of the units of the busiest rank how many are equal, and the seconds of each for one microbatch."""
        ranks = self._staging.ranks(plan)
        return tuple((count, ranks.of_body(body).seconds) for body, count in ranks.busiest.held.counts)

    def _filled(self, plan: Plan, message: float = 0.0) -> float:
        """The last rank's microbatches and its waits before and after."""
        _, microbatches = self._staging.share(plan)
        passes, ranks, per = self._staging.passes(plan), plan.layout.pipeline, plan.pipeline.stages_per_rank
        turn = self._turn(passes, ranks)
        down = turn.down + message * (ranks - 1)
        up = turn.up + message * (ranks - 1)
        own = microbatches * (turn.last + 2 * message * per)
        if plan.pipeline.schedule != "zero_bubble":
            return down + own + up
        # The gradients of weights may be put off, here and above: then nothing waits for them.
        up -= turn.weights
        late = min(microbatches, ranks) * passes[-1].weight_seconds
        return down + own + max(0.0, up - late)

    def _turn(self, passes: tuple[Passes, ...], ranks: int) -> Turn:
        """What these stages take on so many ranks; the stages are kept, and so their id is theirs alone."""
        key = id(passes), ranks
        if key not in self._turns:
            before = passes[: ranks - 1]
            self._turns[key] = Turn(
                sum(one.forward_seconds for one in before),
                sum(one.backward_seconds for one in before),
                sum(one.weight_seconds for one in before),
                sum(one.seconds for one in passes[ranks - 1 :: ranks]),
            )
        return self._turns[key]

    def least_at(self, plan: Plan) -> float:
        """A lower bound of the step that knows the replicas of a plan, but not which of them are data and shard."""
        ranks = self._staging.ranks(plan)
        seconds = self.least_seconds(plan)
        if plan.layout.pipeline > 1:
            seconds = max(seconds, self._filled(plan, self._message(plan, ranks.share)))
        if self._staging.device(plan).kind == "cpu":
            return seconds  # where large messages leave the caches: no bound from their sum
        if ranks not in self._loads:
            sizes = [rank.size.trainable for rank in ranks.fullest]
            self._loads[ranks] = load(ranks.busiest.held, ranks.of_units, sizes, plan.layout.tensor)
        return seconds + self._sums.least_seconds(plan, self._loads[ranks])

    def least_bytes(self, plan: Plan) -> float:
        """The peak, of the rank that needs most: exact but for others' buckets in shared memory, as many as there are.

        So it knows of the data axis only whether there are several replicas.
        """
        return max(sum(self._bytes(plan, rank, mapped=False).values()) for rank in self._staging.ranks(plan).fullest)

    def without_waits(self, plan: Plan) -> float:
        """A lower bound of the step that knows all of the plan, and is cheaper than to simulate its pipeline."""
        ranks = self._staging.ranks(plan)
        makespan = self._filled(plan, self._message(plan, ranks.share)) if plan.layout.pipeline > 1 else 0.0
        return sum(self._seconds(plan, ranks, makespan).values())

    def beside(self, num_devices: int, is_divided: bool) -> float:
        """What a step takes at least beside its passes and sums of gradients: agreements, and an update's launches.

        `is_divided`: the model is, over some of so many devices.
        """
        device = self.cluster.device_for(min(self.cluster.devices_per_host, num_devices))
        launches = self.work.profile.optimizer_launches * max(device.launch_seconds, device.dispatch_seconds)
        return self._exchanged.agreed(num_devices, is_divided, apart=is_divided) + launches + device.step_seconds

    def predict(self, plan: Plan) -> Prediction:
        """What a step of the plan takes."""
        ranks = self._staging.ranks(plan)
        terms = self._seconds(plan, ranks)
        memory = max((self._bytes(plan, rank) for rank in ranks.fullest), key=lambda found: sum(found.values()))
        seconds, peak = sum(terms.values()), sum(memory.values())
        missing = max(0.0, peak - self._staging.device(plan).memory_bytes)
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
            split=self._staging.division(plan).firsts,
        )

    def first_bytes(self, plan: Plan) -> float:
        """The peak of the first rank, which some measurements are of."""
        return sum(self._bytes(plan, self._staging.ranks(plan).every[0]).values())

    def _used(self, plan: Plan, flops: float) -> float:
        """Seconds that a device at its peak takes for the part that it executes of the model's FLOPs."""
        computer, samples = self._staging.costs(plan).computer, self.work.global_batch
        if self._executed is None:
            units, whole = self.work.profile.units, self._flops
            less = sum(computer.spared(operation, samples) for unit in units for operation in unit.body.operations)
            self._executed = 1.0 - less / whole if whole else 1.0
        return flops * self._executed / computer.device.flops[computer.dtype(plan.precision.compute)]

    # ------------------------------------------------------------------------------------------------------ its seconds

    def _seconds(self, plan: Plan, ranks: Ranks, makespan: float | None = None) -> dict[str, float]:
        """The terms; where the makespan of the pipeline is given it is not simulated, and all of them are bounds."""
        share, microbatches, busy = ranks.share, ranks.microbatches, ranks.busy_seconds
        terms = dict.fromkeys(TERMS, 0.0)
        terms.update(ranks.spent)
        terms["context"] += self._exchanged.ends(share) * microbatches
        computer = self._staging.costs(plan).computer
        device = computer.device
        # On a CPU large messages leave the caches: no bound from their sum.
        bound = makespan is not None and device.kind != "cpu"
        if plan.shards_model:
            slowed = 1.0 if device.kind == "cpu" else self.program.contention
            terms["parameters"] = self._exchanged.parameters(plan, ranks, slowed)
        if plan.layout.pipeline > 1:
            message = self._message(plan, share)
            if makespan is None:
                makespan = self._makespan(plan, ranks, message)
            terms["pipeline"] = 2 * message * microbatches * plan.pipeline.stages_per_rank
            terms["bubble"] = max(0.0, makespan - busy - terms["pipeline"])
        last, waits = ranks.last_seconds, terms["launch"] > 0
        terms["gradients"] = max(self._exchanged.gradients(plan, computer, rank, last, waits) for rank in ranks.fullest)
        terms["optimizer"] = max(self._exchanged.update(plan, computer, rank, bound=bound) for rank in ranks.fullest)
        fetched = self.work.sample_seconds * share.samples * microbatches
        # The host fetches while a GPU computes; a CPU does one after the other.
        terms["data"] = fetched if device.kind == "cpu" else max(0.0, fetched - busy)
        num_tensors = max(rank.held.num_tensors for rank in ranks.fullest)
        terms["host"] = device.step_seconds + device.tensor_seconds * num_tensors
        return terms

    def _message(self, plan: Plan, share: Share) -> float:
        """Seconds of handing one microbatch's activation to the next stage."""
        division, samples = self._staging.division(plan), share.local_samples
        num_bytes = self._crossing.get((division, samples))
        if num_bytes is None:
            ends = (stage[-1].body for stage in division.stages[:-1] if stage)
            num_bytes = max((body.output_bytes.at(samples) for body in ends), default=0.0)
            self._crossing[division, samples] = num_bytes
        stride = plan.layout.world_size // plan.layout.pipeline
        parts = share.tensor if share.sequence or self.program.scatter_messages else 1
        seconds = self._network.seconds("send", num_bytes / parts, self._network.hop(plan.layout.pipeline, stride))
        if parts > 1 and not share.sequence:
            seconds += self._network.seconds("all_gather", num_bytes, self._network.group(parts, 1))
        return seconds

    def _makespan(self, plan: Plan, ranks: Ranks, message: float) -> float:
        pipeline, per = plan.layout.pipeline, plan.pipeline.stages_per_rank
        key = ranks, message
        if key not in self._simulated:
            seconds = [
                {
                    ActionKind.FORWARD: passes.forward_seconds + message,
                    ActionKind.BACKWARD: passes.backward_seconds + message,
                    ActionKind.BACKWARD_INPUT: passes.backward_seconds - passes.weight_seconds + message,
                    ActionKind.BACKWARD_WEIGHT: passes.weight_seconds,
                }
                for passes in self._staging.passes(plan)
            ]

            def of(action: Action) -> float:
                return seconds[action.stage][action.kind]

            lists = actions(plan.pipeline.schedule, pipeline, per, ranks.microbatches)
            self._simulated[key] = simulate(lists, of)[0]
        return self._simulated[key]

    # -------------------------------------------------------------------------------------------------------- its bytes

    def _bytes(self, plan: Plan, rank: Rank, mapped: bool = True) -> dict[str, float]:
        memory = dict.fromkeys(CATEGORIES, 0.0)
        memory.update(state_bytes(plan, self.work.profile, rank.size, self.program))
        memory["activations"] = rank.in_flight * rank.size.saved + rank.size.transient
        memory["communication"] = self._buckets(plan, rank, mapped)
        device, several = self._staging.device(plan), plan.layout.pipeline > 1
        if device.kind == "cpu":
            memory["allocator"] = self.program.heap_share * sum(memory.values())
        else:
            share = self.program.pipeline_fragmentation if several else self.program.fragmentation
            memory["allocator"] = share * memory["activations"]
        memory["reserved"] = float(device.reserved_bytes)
        return memory

    def _kept(self, rank: Rank, share: Share) -> int:
        """What the meter of a run counts as activations. Of the batch, inputs are most, and kept where they enter."""
        enters = bool({self.work.profile.units[0], self._staging.parts[0]}.intersection(rank.held.units))
        batch = self.work.profile.saved_batch.at(share.samples) if enters else 0.0
        return round(rank.in_flight * (rank.size.saved + batch))

    def _buckets(self, plan: Plan, rank: Rank, mapped: bool) -> float:
        ranks = plan.layout.data * plan.layout.shard
        if ranks == 1 or plan.shards_model:
            return 0.0
        per_element = self.program.bucket_bytes
        if mapped and plan.collectives.all_reduce == "shared_memory":
            # Every rank maps the others' buckets, and reads all of them.
            per_element += ITEMSIZE[plan.precision.reduce] * (ranks - 1)
        return rank.size.trainable * per_element


def predict(plan: Plan, work: Workload, cluster: Cluster, program: Program | None = None) -> Prediction:
    """What a step of one plan takes; for many plans make a Predictor."""
    return Predictor(work, cluster, program).predict(plan)
