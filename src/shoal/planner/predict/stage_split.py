"""Division of a model's units into pipeline stages: by the plan's names, equally, or balanced by seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, groupby, islice, pairwise, repeat
from typing import TypeVar

from shoal.planner.profile.values import Body, Unit

# How near the slowest stage comes to the least that it can be, as a share of it.
_NEARLY = 1e-6

_Part = TypeVar("_Part")
Stages = tuple[tuple[Unit, ...], ...]
Run = tuple[float, int]  # seconds of a unit, and how many such units come one after the other
Counts = tuple[tuple[Body, int], ...]


@dataclass(frozen=True, eq=False)
class Held:
    """Units of one rank, and the number of each body among them."""

    units: tuple[Unit, ...]

    @cached_property
    def counts(self) -> Counts:
        """Bodies in the order of the units, each once."""
        return _counted(self.units)

    @cached_property
    def num_tensors(self) -> int:
        """Parameters that are trained."""
        return sum(weight.trainable for unit in self.units for weight in unit.body.weights)


@dataclass(frozen=True, eq=False)
class StageDivision:
    """Units of a model, stage by stage."""

    stages: Stages
    # Units by their bodies, shared by all divisions of a model: what they cost is then computed once. The first rank's
    # are told apart from equal ones, since what the batch keeps is there.
    known: dict[tuple[bool, tuple[Body, ...]], Held] = field(default_factory=dict, repr=False)
    _held: dict[int, tuple[Held, ...]] = field(default_factory=dict, repr=False)
    _alike: dict[int, list[tuple[Counts, list[int]]]] = field(default_factory=dict, repr=False)

    @cached_property
    def counts(self) -> tuple[Counts, ...]:
        """Of each stage."""
        return tuple(map(_counted, self.stages))

    def each(self, measured: Callable[[Counts], _Part]) -> list[_Part]:
        """A value of each stage; of stages with the same bodies as often it is computed once."""
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
        """The name of the first unit of each stage after the first; of empty stages none."""
        return tuple(stage[0].name for stage in self.stages[1:] if stage)

    def held(self, ranks: int) -> tuple[Held, ...]:
        """Units of each of so many ranks: stage s is on rank s % ranks."""
        if ranks not in self._held:
            own = (tuple(chain.from_iterable(self.stages[rank::ranks])) for rank in range(ranks))
            self._held[ranks] = tuple(
                self.known.setdefault((rank == 0, tuple(unit.body for unit in units)), Held(units))
                for rank, units in enumerate(own)
            )
        return self._held[ranks]

    def alike(self, ranks: int) -> list[tuple[Counts, list[int]]]:
        """Which of so many ranks have the same bodies as often, in the order of the first of them."""
        if ranks not in self._alike:
            found: dict[Counts, list[int]] = {}
            for rank, held in enumerate(self.held(ranks)):
                found.setdefault(held.counts, []).append(rank)
            self._alike[ranks] = list(found.items())
        return self._alike[ranks]


def _counted(units: Sequence[Unit]) -> Counts:
    return tuple(Counter(unit.body for unit in units).items())


def by_names(units: Sequence[Unit], split: Sequence[str]) -> Stages:
    """A stage begins with each named unit. Names that are no unit's are left out."""
    starts = [0, *(i for i, unit in enumerate(units) if i and unit.name in set(split)), len(units)]
    return tuple(tuple(units[a:b]) for a, b in pairwise(starts))


def equal(units: Sequence[Unit], num_stages: int) -> Stages:
    """As many blocks on each stage (the first ones one more where they do not divide), the rest on the outer stages."""
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
    """A stage takes units until the sum passes its share of the whole, the one that passes it too (as nanotron).

    So the first ones have most, and the last ones may have none at all.
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
    """Contiguous stages whose slowest is as fast as can be; fewer than asked for where there are fewer units."""
    lengths = balanced_lengths([(one, sum(1 for _ in equal)) for one, equal in groupby(seconds)], num_stages)
    left = iter(units)
    return tuple(tuple(islice(left, length)) for length in lengths)


def balanced_lengths(runs: Sequence[Run], num_stages: int) -> tuple[int, ...]:
    """How many units each of such stages has, where `runs` are equal units."""
    low = max((one for one, _ in runs), default=0.0)
    high = sum(chain.from_iterable(repeat(*run) for run in runs))
    taking = [run for run in runs if run[0] > 0]
    while high - low > _NEARLY * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _num_parts(taking, middle) <= num_stages else (middle, high)
    return _lengths(runs, high * (1 + 1e-9), num_stages)


def _num_parts(runs: Sequence[Run], limit: float) -> int:
    """The fewest parts of at most `limit` each."""
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
    """Each stage is filled up to the limit, but leaves a unit to each of those after it."""
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
            # What fills an empty stage fills those after it, as long as more are left than each needs.
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
