"""Division of a model's units into pipeline stages: by the names in a plan, equally, or balanced by seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, groupby, islice, pairwise, repeat
from typing import TypeVar

from shoal.planner.profile.values import Body, Unit

# Relative tolerance of the slowest stage's seconds above the optimum.
_NEARLY = 1e-6

_Part = TypeVar("_Part")
Stages = tuple[tuple[Unit, ...], ...]
Run = tuple[float, int]  # seconds of a unit, and the number of consecutive units like it
Counts = tuple[tuple[Body, int], ...]


@dataclass(frozen=True, eq=False)
class Held:
    """Units of one rank, and how often each body occurs among them."""

    units: tuple[Unit, ...]

    @cached_property
    def counts(self) -> Counts:
        """Each distinct body in the order of the units, with its number of units."""
        return _counted(self.units)

    @cached_property
    def num_tensors(self) -> int:
        """Number of trained parameters."""
        return sum(weight.trainable for unit in self.units for weight in unit.body.weights)


@dataclass(frozen=True, eq=False)
class StageDivision:
    """Units of a model, stage by stage."""

    stages: Stages
    # Cache of `Held` by bodies, shared by all divisions of a model, so that costs are computed once. The first rank has
    # its own entries, since only that rank keeps the batch.
    known: dict[tuple[bool, tuple[Body, ...]], Held] = field(default_factory=dict, repr=False)
    _held: dict[int, tuple[Held, ...]] = field(default_factory=dict, repr=False)
    _alike: dict[int, list[tuple[Counts, list[int]]]] = field(default_factory=dict, repr=False)

    @cached_property
    def counts(self) -> tuple[Counts, ...]:
        """The bodies of each stage with their number of units."""
        return tuple(map(_counted, self.stages))

    def each(self, measured: Callable[[Counts], _Part]) -> list[_Part]:
        """Return a value per stage. Stages with equal bodies share one call of `measured`."""
        distinct, places = self._distinct
        known = [measured(counts) for counts in distinct]
        return [known[place] for place in places]

    @cached_property
    def _distinct(self) -> tuple[list[Counts], list[int]]:
        known: dict[Counts, int] = {}
        places = [known.setdefault(counts, len(known)) for counts in self.counts]
        return list(known), places

    @cached_property
    def firsts(self) -> tuple[str, ...]:
        """The name of the first unit of each stage after the first. Empty stages have no name."""
        return tuple(stage[0].name for stage in self.stages[1:] if stage)

    def held(self, ranks: int) -> tuple[Held, ...]:
        """Return the units of each of `ranks` ranks. Stage s is on rank s % ranks."""
        if ranks not in self._held:
            own = (tuple(chain.from_iterable(self.stages[rank::ranks])) for rank in range(ranks))
            self._held[ranks] = tuple(
                self.known.setdefault((rank == 0, tuple(unit.body for unit in units)), Held(units))
                for rank, units in enumerate(own)
            )
        return self._held[ranks]

    def alike(self, ranks: int) -> list[tuple[Counts, list[int]]]:
        """Group the ranks that have equal bodies equally often, in the order of the first rank of each group."""
        if ranks not in self._alike:
            found: dict[Counts, list[int]] = {}
            for rank, held in enumerate(self.held(ranks)):
                found.setdefault(held.counts, []).append(rank)
            self._alike[ranks] = list(found.items())
        return self._alike[ranks]


def _counted(units: Sequence[Unit]) -> Counts:
    return tuple(Counter(unit.body for unit in units).items())


def by_names(units: Sequence[Unit], split: Sequence[str]) -> Stages:
    """Begin a stage at each named unit. Names that no unit has are ignored."""
    starts = [0, *(i for i, unit in enumerate(units) if i and unit.name in set(split)), len(units)]
    return tuple(tuple(units[a:b]) for a, b in pairwise(starts))


def equal(units: Sequence[Unit], num_stages: int) -> Stages:
    """Give each stage the same number of blocks, and the units around the blocks to the outer stages.

    If the blocks do not divide evenly, the first stages have one more. With fewer blocks than stages, the units are
    balanced by their number.
    """
    blocks = [i for i, unit in enumerate(units) if unit.body.repeated]
    if len(blocks) < num_stages:
        return balanced(units, [1.0] * len(units), num_stages)
    share, more = divmod(len(blocks), num_stages)
    starts, place = [], 0
    for stage in range(num_stages):
        starts.append(blocks[place] if stage else 0)
        place += share + (stage < more)
    ends = [*starts[1:], len(units)]
    return tuple(tuple(units[a:b]) for a, b in zip(starts, ends, strict=True))


def thresholds(units: Sequence[Unit], costs: Sequence[float], num_stages: int) -> Stages:
    """Fill each stage until the summed costs pass its share of the total, including the unit that passes it.

    The first stages therefore have most units, and the last ones may be empty. This is the rule of nanotron.
    """
    found: list[list[Unit]] = [[]]
    total, passed = sum(costs), 0.0
    for unit, cost in zip(units, costs, strict=True):
        found[-1].append(unit)
        passed += cost
        if passed > total * len(found) / num_stages and len(found) < num_stages:
            found.append([])
    stages = [tuple(stage) for stage in found]
    return tuple(stages + [()] * (num_stages - len(stages)))


def balanced(units: Sequence[_Part], seconds: Sequence[float], num_stages: int) -> tuple[tuple[_Part, ...], ...]:
    """Return contiguous stages with the fastest slowest stage; at most one stage per unit."""
    lengths = balanced_lengths([(one, sum(1 for _ in equal)) for one, equal in groupby(seconds)], num_stages)
    left = iter(units)
    return tuple(tuple(islice(left, length)) for length in lengths)


def balanced_lengths(runs: Sequence[Run], num_stages: int) -> tuple[int, ...]:
    """Return the number of units of each balanced stage. `runs`: runs of equal units."""
    low = max((one for one, _ in runs), default=0.0)
    high = sum(chain.from_iterable(repeat(*run) for run in runs))
    taking = [run for run in runs if run[0] > 0]
    while high - low > _NEARLY * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _num_parts(taking, middle) <= num_stages else (middle, high)
    return _lengths(runs, high * (1 + 1e-9), num_stages)


def _num_parts(runs: Sequence[Run], limit: float) -> int:
    """Return the fewest contiguous parts of at most `limit` seconds each."""
    parts, filled = 1, 0.0
    for one, count in runs:
        fitting = int((limit - filled) / one)
        if fitting >= count:
            filled += count * one
            continue
        left, most = count - fitting, int(limit / one)
        more = -(-left // most)
        parts, filled = parts + more, (left - (more - 1) * most) * one
    return parts


def _lengths(runs: Sequence[Run], limit: float, num_stages: int) -> tuple[int, ...]:
    """Fill each stage up to `limit` seconds, but leave at least one unit for each later stage."""
    found, filled = [0], 0.0
    left = sum(count for _, count in runs)
    for one, count in runs:
        while count:
            after = num_stages - len(found)
            fitting = int((limit - filled) / one) if after and one > 0 else count
            take = min(count, fitting, left - after)
            if take <= 0 and found[-1]:
                found.append(0)
                filled = 0.0
                continue
            take = max(take, 1)
            # Following stages take as many equal units, as long as enough units are left for the stages behind them.
            same, full = 0, take in (1, fitting) and not found[-1] and after > 0 and one > 0
            if full and min(int((limit - take * one) / one), left - take - after) <= 0:
                ahead = (left - after - take) // (take - 1) if take > 1 else count
                same = min(after - 1, (count - 1) // take - 1, ahead)
            if same > 0:
                found[-1:] = [take] * same + [0]
                left -= same * take
                count -= same * take
                continue
            found[-1] += take
            filled += take * one
            left -= take
            count -= take
    return tuple(found)
