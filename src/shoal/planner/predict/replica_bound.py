"""What summing over replicas takes at least, however the replicas are divided into data and shard ranks.

A bound for the search: it holds where a link is no slower with one large message than with its parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shoal.planner.predict.collective_time import Network
from shoal.planner.predict.roofline import ITEMSIZE
from shoal.planner.predict.stage_split import Held
from shoal.planner.predict.stage_time import Passes
from shoal.planner.predict.workload import Program
from shoal.planner.search.space import divisors
from shoal.plans.plan import Plan


class Load(NamedTuple):
    """What a rank sums, and behind what.

    `units`: how many of the busiest rank's units have so many elements; `forward`, `backward`: seconds of one
    microbatch of these units; `trainable`: elements of the rank that holds most.
    """

    units: tuple[tuple[float, int], ...]
    forward: float
    backward: float
    trainable: float


def load(held: Held, passes: Sequence[Passes], trainable: Sequence[float], tensor: int) -> Load:
    """The load of the busiest rank's units and their passes; `trainable`: of each rank that may hold most."""
    units: dict[float, int] = {}
    for body, count in held.counts:
        numel = float(sum(w.numel_of(tensor) for w in body.weights))
        units[numel] = units.get(numel, 0) + count
    return Load(
        tuple(units.items()),
        sum(one.forward_seconds for one in passes),
        sum(one.backward_seconds for one in passes),
        max(trainable),
    )


class ReplicaSums:
    """What such sums take on one network; what does not depend on the passes that hide them is computed once."""

    def __init__(self, network: Network, program: Program) -> None:
        self._network = network
        self._kind = "reduce_scatter" if program.scatter_gradients else "all_reduce"
        self._known: dict[tuple[object, ...], tuple[tuple[float, float], ...]] = {}

    def least_seconds(self, plan: Plan, load: Load) -> float:
        """Seconds that the replicas of a plan add to a step."""
        layout = plan.layout
        replicas, stride = layout.data * layout.shard, layout.context * layout.tensor
        if replicas == 1:
            return 0.0
        widths = ITEMSIZE[plan.precision.parameters], ITEMSIZE[plan.precision.reduce]
        whole = self._network.seconds(self._kind, load.trainable * widths[1], self._network.group(replicas, stride))
        least = max(0.0, whole - load.backward)
        if least == 0.0:
            return 0.0
        key = load.units, replicas, stride, widths
        if key not in self._known:
            self._known[key] = tuple(self._divided(load.units, replicas, stride, widths))
        for gathers, scatters in self._known[key]:
            least = min(least, max(0.0, gathers - load.forward) + max(0.0, scatters - load.backward))
        return least

    def _divided(
        self, units: tuple[tuple[float, int], ...], replicas: int, stride: int, widths: tuple[int, int]
    ) -> Iterator[tuple[float, float]]:
        """Seconds of gathering all units and of scattering them, for each degree of the shard axis."""
        network, (held, reduce) = self._network, widths
        for shard in divisors(replicas)[1:]:
            group, others = network.group(shard, stride), network.group(replicas // shard, shard * stride)
            gathers = scatters = 0.0
            for numel, count in units:
                gathers += count * network.seconds("all_gather", numel * held, group)
                scatters += count * network.seconds("reduce_scatter", numel * reduce, group)
                scatters += count * network.seconds("all_reduce", numel * reduce / shard, others)
            yield gathers, scatters
