"""Overlap of communication and computation: the exposed part of a collective."""

from __future__ import annotations

from collections.abc import Sequence


def gathered(computes: Sequence[float], gathers: Sequence[float], scatters: Sequence[float], slowed: float) -> float:
    """Return the seconds until all units are gathered, computed and scattered.

    The next unit is gathered while a unit computes, as fully_shard prefetches. Collectives run one by one on their own
    stream. Compute that overlaps a collective takes longer by `slowed` times the collective's seconds.
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
    """Return the exposed seconds of bucketed sums during `behind` seconds of backward: at least the `last` bucket."""
    return max(min(last, total), total - behind) if total else 0.0
