"""Seconds of collectives, by algorithm, from the latency and bandwidth of the links between their ranks.

The accounts (shoal.plans.accounting), which a run is compared with, list the collectives.

A ring takes n - 1 hops per pass and moves (n - 1) / n of the bytes over its slowest link (Thakur, Rabenseifner and
Gropp 2005). A double binary tree takes 2 log2 n hops and moves all bytes (Sanders, Speck and Traeff 2009). Message
sizes follow nccl-tests: see plans/accounting/collectives.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import ceil, log2
from typing import NamedTuple

from shoal.hardware.values import PROCESS_GROUP, SHARED_MEMORY, Cluster, Link
from shoal.planner.predict.workload import ITEMSIZE, ModelPart
from shoal.planner.profile.values import Body
from shoal.plans.accounting.collectives import REPLICAS, WORLD, Array, Gradients, Sharding, SizedCollective
from shoal.plans.plan import Layout, Plan

_MANY_BYTES = 1e15  # large enough that latencies are negligible


class RankGroup(NamedTuple):
    """Communicating ranks: their number, their number per host, and the number of such groups on a host."""

    size: int
    per_host: int
    neighbours: int = 1  # groups on the same host that communicate at the same time, including this group

    @property
    def hosts(self) -> int:
        """Number of hosts that the group spans."""
        return ceil(self.size / self.per_host)


@dataclass(frozen=True)
class Network:
    """Links of a cluster and the position of ranks on it: rank r is on host r // devices_per_host."""

    cluster: Cluster
    _known: dict[tuple[str, float, RankGroup], float] = field(default_factory=dict, compare=False, repr=False)

    def group(self, size: int, stride: int) -> RankGroup:
        """Return the group of ranks r, r + stride, ... of an axis with `size` ranks."""
        return _group(size, stride, self.cluster.devices_per_host)

    def axis(self, layout: Layout, name: str) -> RankGroup:
        """Return the group with this name in the accounts: an axis of the layout, WORLD or REPLICAS."""
        inner = layout.tensor * layout.context
        if name == "shard":
            size, stride = layout.shard, inner
        elif name == "data":
            size, stride = layout.data, layout.shard * inner
        elif name == REPLICAS:
            size, stride = layout.data * layout.shard, inner
        elif name == WORLD:
            size, stride = layout.world_size, 1
        elif name == "pipeline":
            size, stride = layout.pipeline, layout.data * layout.shard * inner
        elif name == "context":
            size, stride = layout.context, layout.tensor
        else:
            size, stride = layout.tensor, 1
        return self.group(size, stride)

    def hop(self, size: int, stride: int) -> RankGroup:
        """Return the slowest pair of neighbours on an axis. If the axis spans hosts, the network joins the pair."""
        on_host = self.cluster.devices_per_host
        return self.group(2, stride) if size * stride <= on_host else RankGroup(2, 1, max(1, min(on_host, stride)))

    def link(self, group: RankGroup) -> Link:
        """Return the link of the slowest hop between two ranks of the group."""
        link = self.cluster.between if group.hosts > 1 else self.cluster.within
        assert link is not None, "ranks of several devices have a link between them"
        return link

    def _narrowest(self, group: RankGroup, reached: Callable[[Link, int], float]) -> float:
        """Return the least bytes per second on the links of a group, each of which has `reached(link, ranks)`."""
        rates, within, between = [], self.cluster.within, self.cluster.between
        if group.per_host > 1 and within is not None:
            rate = reached(within, group.per_host)
            rates.append(rate / (group.per_host * group.neighbours) if within.shared else rate)
        if group.hosts > 1 and between is not None:
            # All rings of a host leave it at the same time, each through one rank. A ring uses every NIC of its own.
            rates.append(reached(between, group.hosts) / group.neighbours)
        return min(rates, default=float("inf"))

    def least_per_byte(self, kind: str, group: RankGroup) -> float:
        """Return a lower bound of a collective's seconds per byte, for any size and algorithm.

        The bound uses the best rate of each link. A tree moves bytes no faster than a ring.
        """
        n = group.size
        if n == 1:
            return 0.0
        if kind == "all_to_all":
            least = (self.to_all(_MANY_BYTES, group) - self.to_all(0.0, group)) / _MANY_BYTES
        else:
            passes = 2 if kind == "all_reduce" else 1
            least = passes * (n - 1) / n / self._narrowest(group, lambda link, count: link.best(kind, count))
        if group.hosts > 1 or self._in_shared_memory is None:
            return least
        return min(least, self._in_shared_memory.least_per_byte(kind, group))

    def seconds(self, kind: str, num_bytes: float, group: RankGroup) -> float:
        """Return the seconds of one collective of `num_bytes` without overlap; 0 for a lone rank."""
        key = kind, num_bytes, group
        seconds = self._known.get(key)
        if seconds is None:
            seconds = self._known[key] = self._seconds(kind, num_bytes, group)
        return seconds

    def all_reduce(self, algorithm: str, num_bytes: float, group: RankGroup) -> float:
        """Return the seconds of an all_reduce by this algorithm if measured, else those of any all_reduce."""
        link, n = self.cluster.algorithms.get(algorithm), group.size
        if link is None or group.hosts > 1 or n == 1 or num_bytes <= 0:
            return self.seconds("all_reduce", num_bytes, group)
        return link.sum_seconds(num_bytes, n)

    def serving(self, algorithm: str, group: RankGroup) -> Network:
        """Return the network of model-parallel and optimizer collectives: shared memory if the plan selects it.

        `algorithm`: the plan's all_reduce. Shared memory serves groups on one host.
        """
        shares = algorithm == SHARED_MEMORY and group.hosts == 1
        return (self._in_shared_memory if shares else None) or self

    @cached_property
    def _in_shared_memory(self) -> Network | None:
        """This network with the measured links of a process group in shared memory; None if not measured."""
        link = self.cluster.algorithms.get(PROCESS_GROUP)
        return Network(replace(self.cluster, within=link, algorithms={})) if link is not None else None

    def _seconds(self, kind: str, num_bytes: float, group: RankGroup) -> float:
        n = group.size
        if n == 1 or num_bytes <= 0:
            return 0.0
        link = self.link(group)
        call, latency = link.call_seconds, link.latency_seconds
        if kind in ("send", "recv"):
            within = self.cluster.within if group.per_host > 1 else None
            rate = (within or link).reached("send", num_bytes, 2)
            neighbours = group.neighbours if within is None or within.shared else 1
            return call + latency + num_bytes / (rate / neighbours)
        if kind == "all_to_all":
            return self.to_all(num_bytes, group)
        rate = self._narrowest(group, lambda link, count: link.reached(kind, num_bytes, count))
        moved = num_bytes / rate * (n - 1) / n
        # Each step of a ring takes as long as the slowest hop, since every hop sends a message in every step.
        hops = (n - 1) * latency
        if kind == "all_reduce":
            ring = 2 * (moved + hops)
            tree = 2 * (moved * n / (n - 1) + ceil(log2(group.hosts or 1)) * latency)
            hop = self.cluster.within.latency_seconds if self.cluster.within is not None else 0.0
            tree += 2 * (group.per_host - 1) * hop
            return call + (min(ring, tree) if group.hosts > 1 else ring)
        if kind == "broadcast":
            return call + num_bytes / rate + hops
        return call + moved + hops  # all_gather, reduce_scatter

    def to_all(self, num_bytes: float, group: RankGroup, share: float = 1.0) -> float:
        """Return the seconds of an all_to_all: each rank sends 1/n of its bytes to each other, off-host by NICs.

        `share`: fraction of the bandwidth of a host's links that the all_to_all reaches.
        """
        n, within, between, link = group.size, self.cluster.within, self.cluster.between, self.link(group)
        seconds = link.call_seconds + (n - 1) * link.latency_seconds / 4
        if group.per_host > 1 and within is not None:
            shared = group.per_host * group.neighbours if within.shared else 1
            seconds += num_bytes * (group.per_host - 1) / n / (share * within.bytes_per_second) * shared
        if group.hosts > 1 and between is not None:
            rate = between.bytes_per_second / (group.neighbours * group.per_host)
            seconds += num_bytes * ((n - group.per_host) / n) / rate
        return seconds


@lru_cache(maxsize=65536)
def _group(size: int, stride: int, on_host: int) -> RankGroup:
    per_host = max(1, min(size, on_host // stride))
    return RankGroup(size, per_host, max(1, min(on_host // per_host, stride)))


# ------------------------------------------------------------------------------------------ collectives of the accounts


class Accounts:
    """Inputs of the memory and traffic accounts, computed once for all plans that give a rank the same units."""

    def __init__(self) -> None:
        self._gradients: dict[tuple[ModelPart, int, str, bool], Gradients] = {}
        self._of_bodies: dict[tuple[Body, int], tuple[Array, ...]] = {}
        self._rests: dict[tuple[tuple[Body, ...], int], tuple[Array, ...]] = {}
        self._units: dict[tuple[ModelPart, int], tuple[tuple[tuple[Array, ...], ...], int]] = {}

    def _arrays(self, body: Body, tensor: int) -> tuple[Array, ...]:
        """Return the largest rank's part of each weight of a body, on a tensor axis of this degree.

        Experts that an expert axis divides are not among them: replicas do not have the same ones.
        """
        key = body, tensor
        if key not in self._of_bodies:
            own = (w for w in body.weights if not w.apart)
            arrays = (Array(w.shape_of(tensor), w.itemsize, trainable=w.trainable) for w in own)
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
        self, plan: Plan, layout: Layout, part: ModelPart, microbatches: int = 1, *, rounds: bool = True
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
            after = (w for unit in part.units[last + 1 :] for w in unit.body.weights if w.trainable and not w.apart)
            self._units[key] = (*blocks, rest), sum(weight.numel_of(tensor) for weight in after)
        units, root_early = self._units[key]
        return Sharding(
            units,
            degree=layout.shard,
            replicas=layout.data,
            microbatches=microbatches,
            resident=frozenset(range(len(units))) if plan.shard.level == "gradients" else frozenset(),
            gather_itemsize=ITEMSIZE[precision.parameters],
            reduce_itemsize=ITEMSIZE[precision.reduce],
            reduce_every=plan.shard.reduce == "every_microbatch",
            root_early=root_early,
            rounds=rounds,
        )


def price(network: Network, layout: Layout, sent: Iterable[SizedCollective], algorithm: str = "native") -> float:
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

    def exchanges(self, plan: Plan, layout: Layout, part: ModelPart) -> UnitExchanges:
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

    def totals(self, plan: Plan, layout: Layout, part: ModelPart) -> tuple[float, float]:
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

    def _key(self, plan: Plan, layout: Layout, part: ModelPart) -> _ShardKey:
        widths, shard = (plan.precision.parameters, plan.precision.reduce), self._network.axis(layout, "shard")
        return part, widths, layout.tensor, shard, plan.collectives.all_reduce

    def _on_shard(self, plan: Plan, layout: Layout, part: ModelPart) -> list[_UnitSeconds]:
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
