"""Stragglers: ranks that compute longer than the others in most steps, with the excess time and its main span."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.plans.plan import Plan
from shoal.runs.records import SPANS, Spread

WINDOW = 20  # steps
_EVERY = 5  # steps: a check costs some percent of a short step
_MOST_OF_THEM = 16  # steps of the window in which the same rank has to be the slowest
# Thresholds beyond the difference that the shares of grains explain: a ratio, and an absolute excess.
_RATIO, _SECONDS = 1.3, 0.001
# Only a rank's own work: a rank that waits for others is not slow.
_CAUSES = {
    "data_wait": "reading samples",
    "host_to_device": "copying samples to the device",
    "forward": "the forward",
    "backward": "the backward",
    "optimizer": "the update",
    "other": "what the host does beside the model",
}


@dataclass(frozen=True)
class Straggler:
    """Rank with a median step time of `ratio` times the fastest rank's; `cause`: the span with most of the excess."""

    rank: int
    ratio: float
    cause: str
    seconds: float  # excess per step

    def __str__(self) -> str:
        slower = f"rank {self.rank} takes {self.ratio:.1f} times as long for its steps as the fastest rank"
        return f"{slower}, {1e3 * self.seconds:.1f} ms more, mostly in {self.cause}"


class StragglerWatch:
    """Watch over the slowest rank of each step, which reports each straggler once until it recovers."""

    def __init__(self, plan: Plan, num_grains: int) -> None:
        ranks = plan.degrees.divides_grains
        # Off for pipelines, since stages differ in their layers, and for ranks without grains.
        self._is_on = plan.degrees.world_size > 1 and plan.layout.pipeline == 1 and num_grains >= ranks
        self._expected = -(-num_grains // ranks) / max(1, num_grains // ranks)
        self._steps: deque[Mapping[str, Spread]] = deque(maxlen=WINDOW)
        self._num_steps = 0
        self._known: int | None = None

    def take(self, spreads: Mapping[str, Spread]) -> Straggler | None:
        """Add a step's measures over the ranks, and return a straggler that was not reported yet."""
        if not self._is_on or "busy_seconds" not in spreads:
            return None
        self._steps.append(spreads)
        self._num_steps += 1
        if len(self._steps) < WINDOW or self._num_steps % _EVERY:
            return None
        slowest = [step["busy_seconds"].rank_of_max for step in self._steps]
        rank = statistics.mode(slowest)
        straggler = self._judged(rank) if slowest.count(rank) >= _MOST_OF_THEM else None
        if straggler is None:
            self._known = None
            return None
        if self._known == rank:
            return None
        self._known = rank
        return straggler

    def _judged(self, rank: int) -> Straggler | None:
        busy = [step["busy_seconds"] for step in self._steps]
        longest, least = statistics.median(s.max for s in busy), statistics.median(s.min for s in busy)
        more = longest - self._expected * least
        if least <= 0.0 or longest < _RATIO * self._expected * least or more < _SECONDS:
            return None
        excess = {span: self._excess(span, rank) for span in SPANS if span in _CAUSES}
        return Straggler(rank, longest / least, _CAUSES[max(excess, key=lambda span: excess[span])], more)

    def _excess(self, span: str, rank: int) -> float:
        """Return the median excess of a span in seconds, counting 0 for steps in which another rank is the slowest."""
        spreads = [step[span] for step in self._steps if span in step]
        return statistics.median(s.max - s.min if s.rank_of_max == rank else 0.0 for s in spreads) if spreads else 0.0
