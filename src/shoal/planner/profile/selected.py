"""Bytes of a block that selective recomputation saves: results of products, as in `parallel.blocks.recompute`."""

from __future__ import annotations

from shoal.parallel.blocks.recompute import KEPT_NAMES
from shoal.planner.profile.events import OperatorEvent, OperatorTrace

_KEPT = {f"aten.{name}" for name in KEPT_NAMES} | {"shoal_profiling.attention"}


def selected_bytes(trace: OperatorTrace) -> dict[int, float]:
    """Map each event's index to the result bytes that selective recomputation saves.

    Each storage counts once; the outputs of a block do not count.
    """
    given_out = _given_out(trace)
    counted: set[int] = set()
    found: dict[int, float] = {}
    for place, event in enumerate(trace.forward):
        if event.name not in _KEPT or _draws(event):
            continue
        new = [r for r in event.outputs if r.key not in counted and r.key not in given_out[event.region]]
        counted.update(r.key for r in new)
        found[place] = float(sum(r.num_bytes for r in new))
    return found


def _draws(event: OperatorEvent) -> bool:
    return bool(event.arguments.get("dropout", event.arguments.get("dropout_p", 0.0)))


def _given_out(trace: OperatorTrace) -> list[set[int]]:
    """Return, for each region, the storages made there that other regions read."""
    made: dict[int, int] = {}
    found: list[set[int]] = [set() for _ in trace.regions]
    for event in trace.forward:
        for ref in event.inputs:
            if ref.key in made and made[ref.key] != event.region:
                found[made[ref.key]].add(ref.key)
        for ref in event.outputs:
            made.setdefault(ref.key, event.region)
    return found
