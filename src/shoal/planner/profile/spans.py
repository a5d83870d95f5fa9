"""Spans of strides: the part of a storage's geometry that is divided, whatever view is taken of it."""

from __future__ import annotations

from typing import NamedTuple

from shoal.planner.profile.events import StorageRef

# Strides [low, high) of the elements from the one to the other end of what is divided.
Span = tuple[int, int]


class Along(NamedTuple):
    """Divided part of a dim: of its index, the factor from `low` to `high`, as heads in a dim of samples x heads."""

    dim: int
    low: int
    high: int


def span(ref: StorageRef, along: Along) -> Span:
    """Its strides in the storage."""
    return ref.stride[along.dim] * along.low, ref.stride[along.dim] * along.high


def along(ref: StorageRef, dim: int) -> Along:
    """All of a dim."""
    return Along(dim, 1, ref.shape[dim])


def covers(ref: StorageRef, found: Span | None) -> Along | None:
    """The outermost dim that lies along a span."""
    if found is None:
        return None
    low, high = found
    dims = [
        (step, Along(dim, max(1, low // step), min(size, -(-high // step))))
        for dim, (size, step) in enumerate(zip(ref.shape, ref.stride, strict=True))
        if size > 1 and step and step < high and step * size > low
    ]
    return max(dims)[1] if dims else None
