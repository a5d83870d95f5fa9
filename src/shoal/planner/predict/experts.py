"""Mixtures of experts that ranks divide: the profile of one rank, and the seconds in which its rows travel.

Consecutive ranks of a stage divide the experts of each mixture. A rank sends each row to the rank that has the row's
expert, and the results travel back; gradients take the same ways. With balanced routing a rank computes as many rows as
it sends, for fewer experts. DeepSeek's exchange (DeepEP, github.com/deepseek-ai/DeepEP) sends a token once to each host
that has one of its experts, and there over the host's links; its authors measure 43 to 58 GB/s at ports of 50 GB/s.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from shoal.planner.predict.collective_time import Network
from shoal.planner.predict.workload import Program
from shoal.planner.profile.values import (
    Amount,
    Body,
    Dispatch,
    Operation,
    OperationKind,
    Phase,
    Profile,
    TensorCut,
    Unit,
    Weight,
)
from shoal.plans.plan import Plan

# Ways in which rows travel. "all_to_all": each row by itself. "deepep": a token once to each host and each rank that
# need it. "allgather": all tokens to all ranks, and results by a reduce_scatter.
ALL_TO_ALL, DEEPEP, ALL_GATHER = "all_to_all", "deepep", "allgather"


def divided_profile(profile: Profile, degree: int, imbalance: float, inner: int = 1) -> Profile:
    """Return the profile of a rank if `degree` ranks divide the experts of each mixture.

    Args:
        profile: The undivided profile.
        degree: Ranks that divide the experts.
        imbalance: Rows of the busiest rank over the mean of the ranks.
        inner: Tensor ranks that divide each expert once more.
    """
    bodies: dict[Body, Body] = {}
    for unit in profile.units:
        if unit.body not in bodies:
            bodies[unit.body] = _divided(unit.body, degree, imbalance, inner)
    return replace(profile, units=tuple(Unit(unit.name, bodies[unit.body]) for unit in profile.units))


def _divided(body: Body, degree: int, imbalance: float, inner: int) -> Body:
    if not body.dispatches:
        return body
    whole = min(degree, *(dispatch.experts for dispatch in body.dispatches))

    def rows(amount: Amount) -> Amount:
        """Return the amount of the rows that a rank computes for its experts; what is fixed belongs to experts."""
        return Amount(amount.fixed / whole, amount.per_sample * imbalance)

    def size(amount: Amount, times: float) -> Amount:
        """Return a size of a product with more rows."""
        return Amount(amount.fixed, amount.per_sample * times * imbalance)

    def own(operation: Operation) -> Operation:
        if not operation.of_experts:
            return operation
        # Tensor ranks send different tokens, so they divide the rows. Casts of weights are whole on each rank.
        is_product, cut = operation.kind is OperationKind.MATMUL, TensorCut.NONE
        if is_product:
            cut = TensorCut.K if operation.phase is Phase.BACKWARD_WEIGHT else TensorCut.M
        elif operation.read_bytes.per_sample or operation.written_bytes.per_sample:
            cut = TensorCut.ALL
        moved: dict[str, Any] = {
            "flops": rows(operation.flops),
            "read_bytes": rows(operation.read_bytes),
            "written_bytes": rows(operation.written_bytes),
            "saved_bytes": rows(operation.saved_bytes),
            "selected_bytes": rows(operation.selected_bytes),
            "cut": cut,
        }
        if is_product:  # of all experts together each of fewer experts has more rows; of a list a rank has fewer
            is_grouped = operation.batch.fixed > 1
            times = whole if is_grouped else 1.0
            moved |= {"m": size(operation.m, times), "k": size(operation.k, times)}
            moved["batch"] = Amount(operation.batch.fixed / whole) if is_grouped else operation.batch
        return replace(operation, **moved)

    def part(weight: Weight) -> Weight:
        count, *sizes = weight.shape
        if sizes:
            sizes[0] = -(-sizes[0] // inner)
        return replace(weight, shape=(-(-count // degree), *sizes), apart=True)

    weights = tuple(part(weight) if weight.of_experts else weight for weight in body.weights)
    dispatches = tuple(dispatch._replace(degree=degree) for dispatch in body.dispatches)
    return replace(body, operations=tuple(map(own, body.operations)), weights=weights, dispatches=dispatches)


class GatheredExperts(NamedTuple):
    """Experts of a rank in exact mode, where `degree` ranks gather them for each microbatch of their own.

    `num_bytes`, `trained_bytes`: of the parameters of all experts, and of the trained ones. `largest_bytes`: of the
    parameters of one layer's experts. Without such ranks the degree is 1 and the bytes are 0.
    """

    degree: int = 1
    num_bytes: int = 0
    trained_bytes: int = 0
    largest_bytes: int = 0

    @classmethod
    def of(cls, profile: Profile, plan: Plan) -> GatheredExperts:
        """Return the experts of a plan in exact mode."""
        if plan.layout.expert == 1:
            return cls()
        weights = [[w for w in unit.body.weights if w.of_experts] for unit in profile.units]
        sizes = [sum(w.numel * w.itemsize for w in of_unit) for of_unit in weights]
        trained = sum(w.numel * w.itemsize for of_unit in weights for w in of_unit if w.trainable)
        return cls(plan.layout.expert, sum(sizes), trained, max(sizes))

    def seconds(self, network: Network) -> float:
        """Return the seconds in which they travel to a microbatch's forward and backward, and their gradients back."""
        if not self.num_bytes:
            return 0.0
        group = network.group(self.degree, 1)
        back = network.seconds("all_to_all", self.trained_bytes, group) if self.trained_bytes else 0.0
        return 2 * network.seconds("all_gather", self.num_bytes, group) + back


def exchange_seconds(
    network: Network, program: Program, dispatch: Dispatch, samples: float, tensor: int
) -> tuple[float, float]:
    """Return the seconds of the exchanges of a microbatch of `samples` samples in the forward and in the backward.

    Rows travel to the experts and back, in the forward and in the backward. The counts of rows travel once before them.
    `tensor`: ranks with equal tokens, each of which sends its part.
    """
    way, group = program.dispatch, network.group(dispatch.degree, 1)
    num_bytes = dispatch.num_bytes.at(samples) / tensor
    if dispatch.degree == 1 or not num_bytes:
        return 0.0, 0.0
    if way == ALL_GATHER:
        both = 2 * network.seconds("all_gather", num_bytes / dispatch.chosen * dispatch.degree, group)
        return both, both
    counts = network.seconds("all_to_all", 8.0 * dispatch.experts, group)
    if way == DEEPEP:
        # Each token reaches `chosen` ranks that differ by chance. Network and links within hosts work at the same time.
        token_bytes, within, between = num_bytes / dispatch.chosen, network.cluster.within, network.cluster.between
        parts = [0.0]
        if group.per_host > 1 and within is not None:
            ranks = group.size * (1 - (1 - 1 / group.size) ** dispatch.chosen)
            own = (group.per_host - 1) / group.per_host
            parts.append(token_bytes * ranks * own / within.bytes_per_second)
        if group.hosts > 1 and between is not None:
            hosts = (group.hosts - 1) * (1 - (1 - 1 / group.hosts) ** dispatch.chosen)
            parts.append(token_bytes * hosts * group.per_host / between.bytes_per_second)
        both = 2 * (network.link(group).call_seconds + max(parts))
    else:
        both = 2 * network.to_all(num_bytes, group, program.dispatch_share)
    return counts + both, both
