"""Bytes of parameters, gradients and optimizer state of a rank. The formulas are in docs/traffic-and-memory.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.planner.predict.collective_time import Accounts
from shoal.planner.predict.pipeline import Rank, StageSize
from shoal.planner.predict.workload import ITEMSIZE, ModelPart, Program
from shoal.planner.profile.values import Profile
from shoal.plans.accounting.all_reduce import compression_buffers
from shoal.plans.accounting.collectives import (
    Array,
    bucketed,
    cut,
    gathered_parameters,
    owned,
    scattered_gradients,
    scattered_peak,
    sharded_parameters,
    waiting_gradients,
)
from shoal.plans.plan import Layout, Plan


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


class ExpertBytes(NamedTuple):
    """Bytes of a rank's experts by category, if an expert axis divides them."""

    parameters: float = 0.0
    gathered: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0


def expert_copies(layout: Layout, program: Program) -> int:
    """Return the number of ranks of a stage with the same experts."""
    return max(1, layout.stage_ranks // (layout.expert * program.expert_tensor))


def expert_owners(plan: Plan, program: Program) -> int:
    """Return the number of ranks that divide the states of the same experts."""
    layout = plan.layout
    if not program.shards_experts:  # shoal's ZeRO-1
        return expert_copies(layout, program) if layout.shard > 1 and not plan.shards_model else 1
    sharded = layout.shard * layout.context * layout.tensor // (layout.expert * program.expert_tensor)
    return max(1, sharded) if layout.shard > 1 else 1


class States:
    """Bytes of parameters, gradients and optimizer state of a rank, by the formulas that a run is compared with."""

    def __init__(self, profile: Profile, program: Program, accounts: Accounts) -> None:
        self._program, self._accounts = program, accounts
        self._per_element = profile.state_bytes_per_element + program.master_bytes
        self._owned: dict[tuple[int, int, tuple[int, ...]], int] = {}
        self._unrounded: dict[tuple[object, ...], Unrounded] = {}

    def _per_gradient(self, plan: Plan) -> float:
        num_bytes = self._program.gradient_bytes
        return ITEMSIZE[plan.precision.reduce] if num_bytes is None else num_bytes

    def bytes(
        self, plan: Plan, part: ModelPart, size: StageSize, microbatches: int, *, on_cpu: bool
    ) -> dict[str, float]:
        """Return the bytes by category of a rank with these units."""
        of_experts = self._of_experts(plan, size)
        if plan.shards_model:
            sharding = self._accounts.sharding(plan, plan.layout, part, microbatches)

            def updated(unit: Sequence[Array]) -> int:
                return sum(cut(array, 0, sharding.degree).numel for array in unit if array.trainable)

            return {
                "parameters": sharded_parameters(sharding) + of_experts.parameters,
                "gathered": gathered_parameters(sharding) + of_experts.gathered,
                "gradients": scattered_gradients(sharding) + of_experts.gradients,
                "optimizer": self._per_element * sum(sharding.each(updated)) + of_experts.optimizer,
            }
        sizes = () if plan.shares_memory else plan.shard.sizes
        owners, gradients = plan.num_owners, self._accounts.gradients(plan, part, on_cpu=on_cpu)
        alike = size.trainable - size.apart  # the elements that replicas have too
        sums, trained = alike * self._per_gradient(plan), alike / owners
        if self._program.own_buckets:
            if plan.collectives.compression != "none" and plan.layout.world_size > 1:
                sums = compression_buffers(gradients, plan)
            else:
                sums = bucketed(gradients, plan.layout, plan.collectives.all_reduce == "native")
            key = id(gradients), owners, sizes
            if key not in self._owned:
                arrays_of_owners = owned(gradients.parameters, owners, sizes)
                self._owned[key] = max(sum(array.numel for array in arrays) for arrays in arrays_of_owners)
            trained = self._owned[key]
        return {
            "parameters": (size.parameter_bytes - size.apart_bytes) / _num_sharing(plan) + of_experts.parameters,
            "gathered": 0.0,
            "gradients": sums + of_experts.gradients,
            "optimizer": self._per_element * trained + of_experts.optimizer,
        }

    def _of_experts(self, plan: Plan, size: StageSize) -> ExpertBytes:
        """Return the bytes of the experts that an expert axis divides.

        Each rank keeps its experts with their states, unless the program divides them over the ranks with the same
        ones. Of experts with divided parameters two blocks are gathered at once; here all blocks of a rank count alike.
        """
        if not size.apart_bytes:
            return ExpertBytes()
        sharing = expert_owners(plan, self._program)
        parameters, gradients = size.apart_bytes, size.apart * self._per_gradient(plan)
        if not plan.shards_model:
            return ExpertBytes(parameters, 0.0, gradients, self._per_element * size.apart / sharing)
        gathered = 0.0
        if sharing > 1:
            numel = size.apart_bytes / size.parameter_bytes * size.numel
            gathered = 2 * numel / max(1, size.num_apart) * ITEMSIZE[plan.precision.parameters]
        states = self._per_element * size.apart / sharing
        return ExpertBytes(parameters / sharing, gathered, gradients / sharing, states)

    def least(self, plan: Plan, ranks: Sequence[Rank], microbatches: int) -> list[float]:
        """Return lower bounds of the bytes of these ranks, for any rounding of rows and any owners of states.

        The bounds shrink with the shard degree and do not depend on the data degree.
        """
        per_element, shard, precision = self._per_element, plan.layout.shard, plan.precision
        if not plan.shards_model:
            per_gradient, copies, owners = self._per_gradient(plan), _num_sharing(plan), plan.num_owners
            return [
                (s.parameter_bytes - s.apart_bytes) / copies
                + (s.trainable - s.apart) * per_gradient
                + per_element * ((s.trainable - s.apart) / owners)
                + sum(self._of_experts(plan, s))
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
            alike_bytes, alike = size.parameter_bytes - size.apart_bytes, size.trainable - size.apart
            of_experts = sum(self._of_experts(plan, size))
            bounds.append(alike_bytes / shard + units + per_element * (alike / shard) + of_experts)
        return bounds

    def of_block(self, plan: Plan, size: StageSize) -> tuple[float, float]:
        """Return lower bounds of the bytes that `least` counts per block, and once per rank with blocks."""
        shard, precision, of_experts = plan.layout.shard, plan.precision, self._of_experts(plan, size)
        apart = of_experts.parameters + of_experts.gradients + of_experts.optimizer
        alike_bytes, alike = size.parameter_bytes - size.apart_bytes, size.trainable - size.apart
        if not plan.shards_model:
            state, parameters = self._per_element * alike / plan.num_owners, alike_bytes / _num_sharing(plan)
            return parameters + state + alike * self._per_gradient(plan) + apart, 0.0
        state = self._per_element * alike / shard
        gathered, flat = (size.numel - size.apart) * ITEMSIZE[precision.parameters], alike * ITEMSIZE[precision.reduce]
        stays = gathered if plan.shard.level == "gradients" else 0.0
        # A block's gradients are whole until they are scattered, and two gathered blocks are in memory at once.
        own = alike_bytes / shard + state + max(0.0, flat / shard - 1) + apart
        return own + stays, 2 * gathered - stays + flat


def _num_sharing(plan: Plan) -> int:
    """Return the number of ranks that share one copy of the parameters."""
    return plan.num_owners if plan.shares_memory else 1
