"""Seconds of a step by term, and bytes by category, under a plan. The formulas are in docs/planner.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.hardware.values import Cluster, Device
from shoal.planner.predict.collective_time import Network
from shoal.planner.predict.compute_time import ITEMSIZE, WINOGRAD
from shoal.planner.predict.exposed_time import Accounts, Exchanged
from shoal.planner.predict.pipeline import PipelineShape, Rank, Ranks, StageSize, Staging, makespan
from shoal.planner.predict.stage_split import ModelPart
from shoal.planner.predict.workload import CATEGORIES, TERMS, Prediction, Program, Workload
from shoal.planner.profile.values import Profile
from shoal.plans.accounting.all_reduce import compression_buffers
from shoal.plans.accounting.collectives import Array, owned
from shoal.plans.accounting.memory import (
    bucketed,
    cut,
    gathered_parameters,
    scattered_gradients,
    scattered_peak,
    sharded_parameters,
    waiting_gradients,
)
from shoal.plans.plan import Plan

# ----------------------------------------------------------------------------------------- parameters and their states


@dataclass(frozen=True)
class Unrounded:
    """Bytes of the gathers and scatters of a rank's units on any shard degree, without rounding up rows.

    `every`: the gradients of every microbatch are scattered, and there are several.
    """

    gathered: int
    flat: Sequence[int]
    waiting: Sequence[int]
    every: bool
    _known: dict[int, int] = field(default_factory=dict, repr=False)

    def on(self, degree: int) -> int:
        """Return the largest number of bytes on one of `degree` ranks."""
        if degree not in self._known:
            scattered = scattered_peak(self.flat, self.waiting, degree, every=self.every)
            self._known[degree] = self.gathered + scattered
        return self._known[degree]


class States:
    """Bytes of parameters, gradients and optimizer state of a rank, by the formulas that a run is compared with."""

    def __init__(self, profile: Profile, program: Program, accounts: Accounts) -> None:
        self._program, self._accounts = program, accounts
        self._per_element = profile.state_bytes_per_element + program.master_bytes
        self._owned: dict[tuple[int, int], int] = {}
        self._unrounded: dict[tuple[object, ...], Unrounded] = {}

    def _per_gradient(self, plan: Plan) -> float:
        num_bytes = self._program.gradient_bytes
        return ITEMSIZE[plan.precision.reduce] if num_bytes is None else num_bytes

    def bytes(
        self, plan: Plan, part: ModelPart, size: StageSize, microbatches: int, *, on_cpu: bool
    ) -> dict[str, float]:
        """Return the bytes by category of a rank with these units."""
        if plan.shards_model:
            sharding = self._accounts.sharding(plan, plan.layout, part, microbatches)

            def updated(unit: Sequence[Array]) -> int:
                return sum(cut(array, 0, sharding.degree).numel for array in unit if array.trainable)

            return {
                "parameters": sharded_parameters(sharding),
                "gathered": gathered_parameters(sharding),
                "gradients": scattered_gradients(sharding),
                "optimizer": self._per_element * sum(sharding.each(updated)),
            }
        owners, gradients = plan.num_owners, self._accounts.gradients(plan, part, on_cpu=on_cpu)
        sums, trained = size.trainable * self._per_gradient(plan), size.trainable / owners
        if self._program.own_buckets:
            if plan.collectives.compression != "none" and plan.layout.world_size > 1:
                sums = compression_buffers(gradients, plan)
            else:
                sums = bucketed(gradients, plan.degrees, plan.collectives.all_reduce == "native")
            key = id(gradients), owners
            if key not in self._owned:
                arrays_of_owners = owned(gradients.parameters, owners)
                self._owned[key] = max(sum(array.numel for array in arrays) for arrays in arrays_of_owners)
            trained = self._owned[key]
        return {
            "parameters": size.parameter_bytes / plan.num_copies_shared,
            "gathered": 0.0,
            "gradients": sums,
            "optimizer": self._per_element * trained,
        }

    def least(self, plan: Plan, ranks: Sequence[Rank], microbatches: int) -> list[float]:
        """Return lower bounds of the bytes of these ranks, for any rounding of rows and any owners of states.

        The bounds shrink with the shard degree and do not depend on the data degree.
        """
        per_element, shard, precision = self._per_element, plan.layout.shard, plan.precision
        if not plan.shards_model:
            per_gradient, copies, owners = self._per_gradient(plan), plan.num_copies_shared, plan.num_owners
            return [
                s.parameter_bytes / copies + s.trainable * per_gradient + per_element * (s.trainable / owners)
                for s in (rank.size for rank in ranks)
            ]
        bounds, level, reduce = [], plan.shard.level, plan.shard.reduce
        for rank in ranks:
            size = rank.size
            key = rank.part, plan.layout.tensor, precision.parameters, precision.reduce, level, reduce, microbatches > 1
            if key not in self._unrounded:
                sharding = self._accounts.sharding(plan, plan.layout, rank.part, microbatches, rounds=False)
                own = gathered_parameters(sharding), sharding.scattered_bytes, waiting_gradients(sharding)
                self._unrounded[key] = Unrounded(*own, microbatches > 1 and sharding.reduce_every)
            units = self._unrounded[key].on(shard)
            bounds.append(size.parameter_bytes / shard + units + per_element * (size.trainable / shard))
        return bounds

    def of_block(self, plan: Plan, size: StageSize) -> tuple[float, float]:
        """Return lower bounds of the bytes that `least` counts per block, and once per rank with blocks."""
        shard, precision = plan.layout.shard, plan.precision
        if not plan.shards_model:
            state = self._per_element * size.trainable / plan.num_owners
            parameters = size.parameter_bytes / plan.num_copies_shared
            return parameters + state + size.trainable * self._per_gradient(plan), 0.0
        state = self._per_element * size.trainable / shard
        gathered, flat = size.numel * ITEMSIZE[precision.parameters], size.trainable * ITEMSIZE[precision.reduce]
        stays = gathered if plan.shard.level == "gradients" else 0.0
        # A block's gradients are whole until they are scattered, and two gathered blocks are in memory at once.
        own = size.parameter_bytes / shard + state + max(0.0, flat / shard - 1)
        return own + stays, 2 * gathered - stays + flat


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
        self._overheads: dict[tuple[int, str], Overheads] = {}
        self._makespans: dict[tuple[object, PipelineShape, float], float] = {}

    def predict(self, plan: Plan) -> Prediction:
        """Predict a step of the plan."""
        ranks, work, layout, simulated = self.staging.ranks(plan), self.work, plan.layout, 0.0
        if layout.pipeline > 1:
            message = self.message(plan, ranks)
            key = ranks.model, ranks.shape, message
            if key not in self._makespans:
                self._makespans[key] = makespan(ranks.shape, ranks.model.passes(ranks.adds), message)
            simulated = self._makespans[key]
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
        at_peak = flops * self._executed / computer.device.flops[computer.dtype(plan.precision.compute)]
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
        last, waits = busiest.last_seconds, terms["launch"] > 0
        terms["gradients"] = self.exchanged.gradients(spread, computer, ranks.fullest, last, waits=waits)
        # On a CPU large messages leave the caches, so one large message is no bound.
        terms["optimizer"] = self.exchanged.update(spread, computer, ranks.fullest, bound=bound and not on_cpu)
        num_tensors = max(rank.part.num_tensors for rank in ranks.fullest)
        overheads = self.overheads(device, plan)
        terms["host"] = overheads.step_seconds + overheads.tensor_seconds * num_tensors
        if not on_cpu:
            terms["host"] += max(0.0, self.program.host_seconds - busiest.behind_seconds * ranks.microbatches)
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
        memory |= self.states.bytes(self._spread(plan), rank.part, rank.size, ranks.microbatches, on_cpu=on_cpu)
        memory["activations"] = rank.activations
        replicas, per_element = plan.layout.data * plan.layout.shard, self.program.bucket_bytes
        if replicas > 1 and not plan.shards_model:
            if plan.collectives.all_reduce == "shared_memory":  # every rank also maps the other ranks' buckets
                per_element += ITEMSIZE[plan.precision.reduce] * (replicas - 1)
            memory["communication"] = rank.size.trainable * per_element + self.program.buffer_bytes
        if on_cpu:
            memory["allocator"] = self.program.heap_share * sum(memory.values())
        else:
            memory["allocator"] = self.fragmentation(plan) * memory["activations"]
        memory["reserved"] = self.overheads(ranks.device, plan).reserved_bytes
        return memory

    def fragmentation(self, plan: Plan) -> float:
        """Return the overhead of a GPU's allocator as a fraction of the activations."""
        return self.program.pipeline_fragmentation if plan.layout.pipeline > 1 else self.program.fragmentation
