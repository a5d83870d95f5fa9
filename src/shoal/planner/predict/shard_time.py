"""Seconds of fully_shard's parameter gathers and gradient scatters on a rank, unit by unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from shoal.planner.predict.accounts import Accounts
from shoal.planner.predict.collective_time import Network, RankGroup
from shoal.planner.predict.remembered import Remembered
from shoal.planner.predict.stage_split import Held
from shoal.plans.accounting.collectives import Array, Sharding, SizedCollective
from shoal.plans.plan import LayoutSection, Plan


def price(network: Network, layout: LayoutSection, sent: Iterable[SizedCollective], algorithm: str) -> float:
    """Return the seconds of collectives without overlap."""
    asked, collectives = network.asked, list(sent)
    groups = {name: network.axis(layout, name) for name in {one.group for one in collectives}}
    return sum(one.count * asked(algorithm, one.kind, one.num_bytes, groups[one.group]) for one in collectives)


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


@dataclass(frozen=True)
class ShardExchanges:
    """Exchanges of plans that divide parameters. Equal units are priced once."""

    network: Network
    accounts: Accounts
    _known: Remembered = field(default_factory=Remembered, repr=False)

    def exchanges(self, plan: Plan, layout: LayoutSection, held: Held) -> UnitExchanges:
        """Return the exchanges of a rank with these units on that layout.

        The parameters outside of the blocks are gathered before all others, and their gradients are scattered last.
        """
        algorithm, data = plan.collectives.all_reduce, self.network.axis(layout, "data")

        def compute() -> UnitExchanges:
            if not held.units:
                return UnitExchanges([], [], [])
            units, parts = self._on_shard(plan, layout, held)
            summed = {part: self.network.asked(algorithm, "all_reduce", part, data) for part in parts}
            *blocks, (first, last) = [(one.gather, one.scatter + summed[one.part]) for one in units]
            left = iter(blocks)
            each = [next(left) if unit.body.repeated else (0.0, 0.0) for unit in held.units]
            gathers, scatters = [gather for gather, _ in each], [scatter for _, scatter in each]
            return UnitExchanges(
                [first + gathers[0], *gathers[1:]],
                [*gathers[:-1], gathers[-1] + first],
                [last + scatters[0], *scatters[1:]],
            )

        return self._known.once(("exchanges", *self._shard_key(plan, layout, held), data), compute)

    def totals(self, plan: Plan, layout: LayoutSection, held: Held) -> tuple[float, float]:
        """Return the total seconds of the gathers before a forward and of all scatters: the sums of `exchanges`."""
        if not held.units:
            return 0.0, 0.0
        algorithm, data = plan.collectives.all_reduce, self.network.axis(layout, "data")

        def compute() -> tuple[float, float, list[tuple[int, int]]]:
            units, _ = self._on_shard(plan, layout, held)
            parts = Counter(one.part for one in units)
            return sum(one.gather for one in units), sum(one.scatter for one in units), list(parts.items())

        key = self._shard_key(plan, layout, held)
        gathers, scatters, parts = self._known.once(("shard totals", *key), compute)
        asked = self.network.asked
        return gathers, scatters + sum(n * asked(algorithm, "all_reduce", part, data) for part, n in parts)

    def _shard_key(
        self, plan: Plan, layout: LayoutSection, held: Held
    ) -> tuple[Held, tuple[str, str], int, RankGroup, str]:
        widths, shard = (plan.precision.parameters, plan.precision.reduce), self.network.axis(layout, "shard")
        return held, widths, layout.tensor, shard, plan.collectives.all_reduce

    def _on_shard(self, plan: Plan, layout: LayoutSection, held: Held) -> tuple[list[_UnitSeconds], set[int]]:
        """Return the exchanges of each unit on the shard axis, and the distinct sizes in bytes of later sums."""
        of_shard = self._shard_key(plan, layout, held)

        def compute() -> tuple[list[_UnitSeconds], set[int]]:
            sharding = self.accounts.sharding(plan, layout, held)
            price = {}
            for unit in {id(unit): unit for unit in sharding.units}.values():  # equal blocks are one object
                key = "unit exchanges", id(unit), *of_shard[1:]
                price[id(unit)] = self._known.once(key, partial(self._of_unit, sharding, unit, *of_shard[-2:]))
            return [price[id(unit)] for unit in sharding.units], {one.part for one in price.values()}

        return self._known.once(("shard exchanges", *of_shard), compute)

    def _of_unit(self, sharding: Sharding, unit: tuple[Array, ...], shard: RankGroup, algorithm: str) -> _UnitSeconds:
        trained = sharding.trained_of(unit)
        gather = self.network.asked(algorithm, "all_gather", sharding.bytes_of(unit), shard)
        scatter = self.network.asked(algorithm, "reduce_scatter", trained * sharding.reduce_itemsize, shard)
        return _UnitSeconds(gather, scatter, sharding.part_of(trained))
