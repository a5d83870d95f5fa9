"""Division of a model's units into pipeline stages, between the modules before which the engine can cut.

The stages follow the names in a plan, have equally many blocks, or are balanced by seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, groupby, islice, pairwise, repeat
from typing import TypeVar

from shoal.planner.profile.values import Amount, Body, Phase, Unit

# Units that no cut divides. A stage is a run of segments.
Segment = tuple[Unit, ...]


def segments(units: Sequence[Unit], places: Sequence[str] | None) -> tuple[Segment, ...]:
    """Return the units between the places, in order. Each unit is a segment if `places` is None.

    A unit that is no block and has places within it is divided there, by the modules of its operations.
    """
    if places is None:
        return tuple((unit,) for unit in units)
    segments: list[Segment] = []
    left = list(places)
    for unit in units:
        for part in _divided(unit, places):
            # The first part within a place begins there. Of nested lists the outer one is the place.
            start = next((place for place in left if _within(part.name, place)), None)
            if start is not None:
                left.remove(start)
            if segments and start is None:
                segments[-1] = (*segments[-1], part)
            else:
                segments.append((part,))
    return tuple(segments)


def _within(module: str, place: str) -> bool:
    return module == place or module.startswith(f"{place}.")


def _divided(unit: Unit, places: Sequence[str]) -> tuple[Unit, ...]:
    """Return the parts of a unit. The first part keeps the unit's name."""
    body = unit.body
    if body.repeated:
        return (unit,)

    def innermost(module: str) -> int:
        """Return 1 + the index of the innermost place that contains a module, or 0 if none does."""
        return max((number for number, place in enumerate(places, 1) if _within(module, place)), default=0)

    # For each operation, the number of the place before it, or 0 before all places. Forwards go up, backwards down.
    numbers, number, highest = [], 0, 0
    for operation in body.operations:
        inner = innermost(operation.module)
        if operation.phase is Phase.FORWARD:
            number = highest = max(highest, inner)
        elif inner or operation.module:
            number = inner
        numbers.append(number)
    starts = sorted(set(numbers))
    if len(starts) < 2:
        return (unit,)
    first: dict[str, int] = {}  # by module: the place before its first operation
    for operation, number in zip(body.operations, numbers, strict=True):
        first.setdefault(operation.module, number)
    modules = [weight.name.rpartition(".")[0] for weight in body.weights]
    homes = [first.get(module, innermost(module)) for module in modules]
    # The module of an exchange is unknown, so that each part has an even share of all exchanges.
    exchanges = tuple(
        replace(e, bytes=Amount(e.bytes.fixed / len(starts), e.bytes.per_sample / len(starts))) for e in body.exchanges
    )
    parts: list[Unit] = []
    incoming = body.input_bytes
    for start in starts:
        own = tuple(o for o, number in zip(body.operations, numbers, strict=True) if number == start)
        is_last, outgoing = start == starts[-1], body.output_bytes
        if not is_last:  # the last forward operation's output, since an activation crosses a cut as it was made
            written = [o.written_bytes for o in own if o.phase is Phase.FORWARD]
            outgoing = next((a for a in reversed(written) if a.fixed or a.per_sample), Amount())
        weights = zip(body.weights, homes, strict=True)
        part = replace(
            body,
            operations=own,
            weights=tuple(weight for weight, home in weights if home == start or (is_last and home > start)),
            exchanges=exchanges,
            input_bytes=incoming,
            output_bytes=outgoing,
        )
        parts.append(Unit(places[start - 1] if parts else unit.name, part))
        incoming = outgoing
    return tuple(parts)


def flat(parts: Sequence[Segment]) -> Segment:
    """Return all units in order."""
    return tuple(unit for part in parts for unit in part)


# ----------------------------------------------------------------------------------------------------------- divisions

# Relative tolerance of the slowest stage's seconds above the optimum.
_NEARLY = 1e-6

_Part = TypeVar("_Part")
Stages = tuple[tuple[Unit, ...], ...]
Run = tuple[float, int]  # seconds of a unit, and the number of consecutive units like it
Counts = tuple[tuple[Body, int], ...]


@dataclass(frozen=True, eq=False)
class ModelPart:
    """Units of one rank, how often each body occurs among them, and the number of their trained parameters."""

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
    # Cache of parts by bodies, shared by all divisions of a model, so that costs are computed once. The first rank has
    # its own entries, since only that rank keeps the batch.
    known: dict[tuple[bool, tuple[Body, ...]], ModelPart] = field(default_factory=dict, repr=False)
    _parts: dict[int, tuple[ModelPart, ...]] = field(default_factory=dict, repr=False)

    def each(self, measured: Callable[[Counts], _Part]) -> list[_Part]:
        """Return a value per stage. Stages with equal bodies share one call of `measured`."""
        distinct, places = self._distinct
        known = [measured(counts) for counts in distinct]
        return [known[place] for place in places]

    @cached_property
    def _distinct(self) -> tuple[list[Counts], list[int]]:
        """The distinct bodies of stages with their number of units, and the index of each stage's among them."""
        known: dict[Counts, int] = {}
        places = [known.setdefault(_counted(stage), len(known)) for stage in self.stages]
        return list(known), places

    def parts(self, ranks: int) -> tuple[ModelPart, ...]:
        """Return the units of each of `ranks` ranks. Stage s is on rank s % ranks."""
        if ranks not in self._parts:
            own = (tuple(chain.from_iterable(self.stages[rank::ranks])) for rank in range(ranks))
            self._parts[ranks] = tuple(
                self.known.setdefault((rank == 0, tuple(unit.body for unit in units)), ModelPart(units))
                for rank, units in enumerate(own)
            )
        return self._parts[ranks]


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
    stages: list[list[Unit]] = [[]]
    total, passed = sum(costs), 0.0
    for unit, cost in zip(units, costs, strict=True):
        stages[-1].append(unit)
        passed += cost
        if passed > total * len(stages) / num_stages and len(stages) < num_stages:
            stages.append([])
    return (*map(tuple, stages), *[()] * (num_stages - len(stages)))


def balanced(units: Sequence[_Part], seconds: Sequence[float], num_stages: int) -> tuple[tuple[_Part, ...], ...]:
    """Return contiguous stages with the fastest slowest stage; at most one stage per unit."""
    lengths = balanced_lengths([(one, sum(1 for _ in equal)) for one, equal in groupby(seconds)], num_stages)
    left = iter(units)
    return tuple(tuple(islice(left, length)) for length in lengths)


def balanced_lengths(runs: Sequence[Run], num_stages: int) -> tuple[int, ...]:
    """Return the number of units of each balanced stage. `runs`: runs of equal units."""
    low = max((one for one, _ in runs), default=0.0)
    high = sum(chain.from_iterable(repeat(*run) for run in runs))
    positive = [run for run in runs if run[0] > 0]
    while high - low > _NEARLY * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _num_parts(positive, middle) <= num_stages else (middle, high)
    # Fill each stage up to the limit, but leave at least one unit for each later stage.
    limit, lengths, filled = high * (1 + 1e-9), [0], 0.0
    left = sum(count for _, count in runs)
    for one, count in runs:
        while count:
            after = num_stages - len(lengths)
            fitting = int((limit - filled) / one) if after and one > 0 else count
            take = min(count, fitting, left - after)
            if take <= 0 and lengths[-1]:
                lengths.append(0)
                filled = 0.0
                continue
            take = max(take, 1)
            # Following stages take as many equal units, as long as enough units are left for the stages behind them.
            same, full = 0, take in (1, fitting) and not lengths[-1] and after > 0 and one > 0
            if full and min(int((limit - take * one) / one), left - take - after) <= 0:
                ahead = (left - after - take) // (take - 1) if take > 1 else count
                same = min(after - 1, (count - 1) // take - 1, ahead)
            if same > 0:
                lengths[-1:] = [take] * same + [0]
                left -= same * take
                count -= same * take
                continue
            lengths[-1] += take
            filled += take * one
            left -= take
            count -= take
    return tuple(lengths)


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
