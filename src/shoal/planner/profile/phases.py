"""Phases of a backward: finds the operators that lead only to gradients of weights and so can be postponed."""

from __future__ import annotations

from shoal.planner.profile.events import OperatorTrace

# Operators between a computed weight gradient and `.grad`: sums for tied weights, casts after autocast.
_HANDS_ON = frozenset(("aten.add", "aten.add_", "aten._to_copy", "aten.clone"))


def weight_events(trace: OperatorTrace) -> set[int]:
    """Return the indices of the backward events that lead only to gradients of weights.

    A tensor that an operator passes to an earlier region counts as the gradient of its own region's input, whatever the
    earlier region computes from it.
    """
    gradients = _gradients(trace)
    found: set[int] = set()
    uses: dict[int, list[tuple[int, bool]]] = {}  # by storage: (region, leads to an input) of its readers
    for place in range(len(trace.events) - 1, -1, -1):
        event = trace.events[place]
        if not event.is_backward:
            break
        if event.is_view:
            continue
        made = {r.key for r in (*event.outputs, *(event.inputs[i] for i in event.written))}
        later = [use for key in made - gradients for use in uses.get(key, ())]
        onward = event.name == "stand_in" or any(region != event.region or leads for region, leads in later)
        if not onward:
            found.add(place)
        for ref in event.inputs:
            uses.setdefault(ref.key, []).append((event.region, onward))
    return found


def _gradients(trace: OperatorTrace) -> set[int]:
    """Return the storages of weights' gradients, also before accumulation or casts."""
    found = {ref.key for ref in trace.gradients.values()}
    for event in reversed(trace.events):
        if not event.is_backward:
            break
        if event.name in _HANDS_ON and any(o.key in found for o in event.outputs):
            found.update(i.key for i in event.inputs if i.numel == event.outputs[0].numel)
    return found
