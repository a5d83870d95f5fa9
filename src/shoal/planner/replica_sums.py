"""What summing over replicas takes at least, however the replicas are divided into data and shard ranks.

A bound for the search: it holds where a link is no slower with one large message than with its parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.plan.plan import Plan
from shoal.planner.compute import ITEMSIZE
from shoal.planner.exchange_time import Network
from shoal.planner.profile import Unit
from shoal.planner.space import divisors
from shoal.planner.stage_cost import Passes
from shoal.planner.workload import Program


@dataclass(frozen=True)
class Load:
    """What a rank sums, and behind what.

    `units`: how many of the busiest rank's units have so many elements; `forward`, `backward`: seconds of one
    microbatch of these units; `trainable`: elements of the rank that holds most.
    """

    units: Mapping[float, int]
    forward: float
    backward: float
    trainable: float


def load(units: Sequence[Unit], passes: Sequence[Passes], trainable: Sequence[float], plan: Plan) -> Load:
    """The load of the busiest rank's units and their passes; `trainable`: of each rank that may hold most."""
    return Load(
        Counter(float(sum(w.numel_of(plan.layout.tensor) for w in unit.body.weights)) for unit in units),
        sum(one.forward_seconds for one in passes),
        sum(one.backward_seconds for one in passes),
        max(trainable),
    )


def least_sums(network: Network, plan: Plan, load: Load, program: Program) -> float:
    """Seconds that the replicas of a plan add to a step."""
    layout = plan.layout
    replicas, stride = layout.data * layout.shard, layout.context * layout.tensor
    if replicas == 1:
        return 0.0
    held, reduce = ITEMSIZE[plan.precision.parameters], ITEMSIZE[plan.precision.reduce]
    kind = "reduce_scatter" if program.scatter_gradients else "all_reduce"
    whole = network.seconds(kind, load.trainable * reduce, network.group(replicas, stride))
    least = max(0.0, whole - load.backward)
    for shard in divisors(replicas)[1:]:
        if least == 0.0:
            return 0.0
        group, others = network.group(shard, stride), network.group(replicas // shard, shard * stride)
        gathers = scatters = 0.0
        for numel, count in load.units.items():
            gathers += count * network.seconds("all_gather", numel * held, group)
            scatters += count * network.seconds("reduce_scatter", numel * reduce, group)
            scatters += count * network.seconds("all_reduce", numel * reduce / shard, others)
        least = min(least, max(0.0, gathers - load.forward) + max(0.0, scatters - load.backward))
    return least
