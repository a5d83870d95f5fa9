"""Spans of strides: the divided part of a storage's geometry, independent of the view."""

from __future__ import annotations

from typing import NamedTuple

from shoal.planner.profile.events import StorageRef

# Strides [low, high), in elements, that the divided part of a storage covers.
Span = tuple[int, int]


class Along(NamedTuple):
    """Divided part of a dim: the factor of its index from `low` to `high`, as heads in a dim of samples x heads."""

    dim: int
    low: int
    high: int


def span(ref: StorageRef, along: Along) -> Span:
    """Return the divided part's strides in the storage."""
    return ref.stride[along.dim] * along.low, ref.stride[along.dim] * along.high


def along(ref: StorageRef, dim: int) -> Along:
    """Return the whole dim as the divided part."""
    return Along(dim, 1, ref.shape[dim])


def covers(ref: StorageRef, found: Span | None) -> Along | None:
    """Return the outermost dim of the view that lies along a span, or None."""
    if found is None:
        return None
    low, high = found
    dims = [
        (step, Along(dim, max(1, low // step), min(size, -(-high // step))))
        for dim, (size, step) in enumerate(zip(ref.shape, ref.stride, strict=True))
        if size > 1 and step and step < high and step * size > low
    ]
    return max(dims)[1] if dims else None
