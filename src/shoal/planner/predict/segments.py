"""Segments of a model between legal pipeline cuts, given the modules before which the engine can cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shoal.planner.profile.values import Amount, Exchange, Operation, Phase, Unit, Weight

# Units that no cut divides. A stage is a run of segments.
Segment = tuple[Unit, ...]


def segments(units: Sequence[Unit], places: Sequence[str] | None) -> tuple[Segment, ...]:
    """Return the units between the places, in order. Each unit is a segment if `places` is None.

    A unit that is no block and has places within it is divided there, by the modules of its operations.
    """
    if places is None:
        return tuple((unit,) for unit in units)
    found: list[Segment] = []
    left = list(places)
    for unit in units:
        for part in _divided(unit, places):
            # The first part within a place begins there. Of nested lists the outer one is the place.
            begun = next((place for place in left if _within(part.name, place)), None)
            if begun is not None:
                left.remove(begun)
            if found and begun is None:
                found[-1] = (*found[-1], part)
            else:
                found.append((part,))
    return tuple(found)


def _within(module: str, place: str) -> bool:
    return module == place or module.startswith(f"{place}.")


def _divided(unit: Unit, places: Sequence[str]) -> tuple[Unit, ...]:
    """Return the parts of a unit. The first part keeps the unit's name."""
    body = unit.body
    if body.repeated:
        return (unit,)
    order = {place: number + 1 for number, place in enumerate(places)}
    numbers = _numbers(body.operations, order)
    starts = sorted(set(numbers))
    if len(starts) < 2:
        return (unit,)
    names = [unit.name, *(places[number - 1] for number in starts[1:])]
    weights = _weights(body.weights, numbers, body.operations, order)
    bodies = []
    incoming = body.input_bytes
    for start in starts:
        own = tuple(o for o, number in zip(body.operations, numbers, strict=True) if number == start)
        last = start == starts[-1]
        outgoing = body.output_bytes if last else _handed_on(own)
        bodies.append(
            replace(
                body,
                operations=own,
                weights=tuple(weight for weight, number in weights if number == start or (last and number > start)),
                exchanges=_shared(body.exchanges, len(starts)),
                input_bytes=incoming,
                output_bytes=outgoing,
            )
        )
        incoming = outgoing
    return tuple(Unit(name, own) for name, own in zip(names, bodies, strict=True))


def _numbers(operations: Sequence[Operation], order: dict[str, int]) -> list[int]:
    """Return for each operation the number of the place before it, or 0 before all places.

    Forwards go up the places, backwards go down.
    """
    found, number, highest = [], 0, 0
    for operation in operations:
        own = _number(operation.module, order)
        if operation.phase is Phase.FORWARD:
            number = highest = max(highest, own)
        elif own:
            number = own
        elif operation.module:
            number = 0
        found.append(number)
    return found


def _number(module: str, order: dict[str, int]) -> int:
    """Return the number of the innermost place that contains a module, or 0 if none does."""
    return max((number for place, number in order.items() if _within(module, place)), default=0)


def _weights(
    weights: Sequence[Weight], numbers: Sequence[int], operations: Sequence[Operation], order: dict[str, int]
) -> list[tuple[Weight, int]]:
    """Return each weight with the number of the place before the first operation of its module."""
    first: dict[str, int] = {}
    for operation, number in zip(operations, numbers, strict=True):
        first.setdefault(operation.module, number)
    homes = {w.name: w.name.rpartition(".")[0] for w in weights}
    return [(w, first.get(homes[w.name], _number(homes[w.name], order))) for w in weights]


def _handed_on(operations: Sequence[Operation]) -> Amount:
    """Return the bytes that the last forward operation writes, since an activation crosses a cut as it was made."""
    forwards = [
        o for o in operations if o.phase is Phase.FORWARD and (o.written_bytes.fixed or o.written_bytes.per_sample)
    ]
    return forwards[-1].written_bytes if forwards else Amount()


def _shared(exchanges: Sequence[Exchange], number: int) -> tuple[Exchange, ...]:
    """Return an even part of each exchange, since the module of an exchange is unknown."""
    return tuple(replace(e, bytes=Amount(e.bytes.fixed / number, e.bytes.per_sample / number)) for e in exchanges)


def flat(parts: Sequence[Segment]) -> Segment:
    """Return all units in order."""
    return tuple(unit for part in parts for unit in part)
