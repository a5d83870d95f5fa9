"""Overlap of communication and computation: the exposed part of a collective."""

from __future__ import annotations

from collections.abc import Sequence


def gathered(computes: Sequence[float], gathers: Sequence[float], scatters: Sequence[float], slowed: float) -> float:
    """Seconds until units that are gathered before they compute and scattered after have all done so.

    One unit is gathered ahead while another computes, as fully_shard prefetches; collectives are one after another on a
    stream of their own. Compute beside a collective takes `slowed` of the collective's time longer.
    """
    computed = scattered = before = 0.0
    ready = stream = gathers[0] if gathers else 0.0
    for compute, following, scatter in zip(computes, [*gathers[1:], None], scatters, strict=False):
        start, beside = max(computed, ready), before
        if following is not None:
            ready = stream = max(stream, start) + following
            beside = following + before
        computed = start + compute + slowed * min(beside, compute)
        if scatter:
            stream = scattered = max(stream, computed) + scatter
        before = scatter
    return max(computed, scattered)


def hidden(total: float, last: float, behind: float) -> float:
    """Exposed seconds of `total` ones of bucketed sums behind `behind` ones of backward: at least the last bucket."""
    return max(min(last, total), total - behind) if total else 0.0
