"""Sentence on the limit of a run, from the parts of its wall clock and the extremes over its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shoal.report.wall_clock import WallClock

# Causes: parts of the wall clock, and a description.
_CAUSES: dict[str, tuple[tuple[str, ...], str]] = {
    "computing": (("forward", "backward"), "the model's forward and backward"),
    "communication": (("exposed_communication",), "waiting for sums and for other ranks"),
    "data": (("data_wait", "host_to_device"), "waiting for samples"),
    "optimizer": (("optimizer",), "the optimizer's update"),
    "host": (("other", "between_steps"), "what the host does beside the model"),
    "evaluation": (("evaluation",), "evaluation"),
    "checkpoints": (("checkpoint",), "checkpoints"),
    "start-up": (("start_up",), "start-up"),
    "recovery": (("trained_again", "lost"), "steps that were lost and trained again"),
    "shut-down": (("shut_down",), "the end of the run: hashing weights, writing the result"),
}
_STEPS = ("computing", "communication", "data", "optimizer", "host")
# Share of a step from which a wait for the slowest rank is mentioned.
_UNEVEN = 0.05


class _Extremes(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def least(self) -> float: ...
    @property
    def most(self) -> float: ...
    @property
    def rank_of_most(self) -> int: ...


def causes(wall: WallClock) -> dict[str, float]:
    """Return shares of the time for which the run had its devices, by cause, the largest first."""
    busy = wall.busy_seconds
    found = {name: wall.of(*parts) / busy if busy > 0 else 0.0 for name, (parts, _) in _CAUSES.items()}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def limit(wall: WallClock, ranks: Sequence[_Extremes]) -> str:
    """Return a sentence on the largest part of the time and, for waits, on the slowest rank."""
    shares = causes(wall)
    name, share = next(iter(shares.items()))
    if share <= 0.0:
        return "Nothing is recorded of where the time went."
    words = _CAUSES[name][1]
    told = f"{share:.0%} of the time went to {words}"
    if name not in _STEPS:
        inside = next(other for other in shares if other in _STEPS)
        return f"{told}; within steps most went to {_CAUSES[inside][1]} ({shares[inside]:.0%})."
    if name == "communication":
        told += _uneven(ranks)
    second = next(other for other in shares if other != name)
    return f"{told}; next is {_CAUSES[second][1]} ({shares[second]:.0%})."


def _uneven(ranks: Sequence[_Extremes]) -> str:
    known = {extremes.name: extremes for extremes in ranks}
    busy, step = known.get("busy_seconds"), known.get("step_seconds")
    if busy is None or step is None or not step.most or (busy.most - busy.least) / step.most < _UNEVEN:
        return ""
    wait = (busy.most - busy.least) / step.most
    return f", {wait:.0%} of a step for the slowest rank (most often rank {busy.rank_of_most})"
