"""How long a pipeline takes at least, whatever its stages: a bound that needs no division into stages.

Let T be the seconds of one microbatch on all stages, m the microbatches, p the ranks, x the last rank's part of T. The
last rank begins when a microbatch has come down the others, and the step ends when the last gradient has gone up them:
T - x + m x. The busiest of the others has at least (T - x) / (p - 1) of each microbatch. The larger of the two is least
where they are equal; where even x = 0 does not make them so, the step takes T.
"""

from __future__ import annotations

from typing import NamedTuple


class PipelineShape(NamedTuple):
    """A schedule on so many ranks with so many stages each, of so many microbatches."""

    schedule: str
    pipeline: int
    stages: int
    microbatches: int


def filled(seconds: float, turns: PipelineShape) -> float:
    """Seconds that no division into stages goes below; `seconds` of one microbatch on all of them together."""
    ranks, microbatches = turns.pipeline, turns.microbatches
    even = seconds * microbatches / ranks
    if ranks == 1 or turns.schedule == "zero_bubble":  # which puts off gradients of weights: no microbatch waits for T
        return even
    if turns.stages > 1:
        return max(even, seconds)  # the first microbatch passes all stages, there and back
    last = max(0.0, (microbatches - ranks + 1) / (microbatches * ranks - ranks + 1))
    return max(even, seconds * (1.0 + (microbatches - 1) * last))
