"""Device mesh as integers: the degrees of its axes, and the bijection between ranks and coordinates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from shoal.errors import PlanError

# Outermost first: neighbouring ranks are on the axis that communicates most, so tensor groups stay within a host.
AXES = ("pipeline", "data", "shard", "context", "tensor")


class Coordinate(NamedTuple):
    """A rank's index on each axis, each in [0, degree)."""

    pipeline: int
    data: int
    shard: int
    context: int
    tensor: int


@dataclass(frozen=True)
class Layout:
    """Degrees of the mesh axes, each at least 1; their product is the world size."""

    data: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        bad = {k: v for k, v in vars(self).items() if isinstance(v, bool) or not isinstance(v, int) or v < 1}
        if bad:
            raise PlanError(
                given="layout: " + ", ".join(f"{k} = {v!r}" for k, v in bad.items()),
                conflict="a degree counts processes along an axis: an integer of at least 1",
                remedy="write 1 for an axis that is not used",
            )

    @property
    def world_size(self) -> int:
        """Number of processes: the product of the degrees."""
        return self.data * self.shard * self.tensor * self.pipeline * self.context

    def degree(self, axis: str) -> int:
        """Return the degree of one axis."""
        return int(getattr(self, axis))

    def coordinate(self, rank: int) -> Coordinate:
        """Return the coordinate of `rank`; the inverse of `rank`. Raises: IndexError outside the world."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is not in a world of {self.world_size}")
        places: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, places[axis] = divmod(rank, self.degree(axis))
        return Coordinate(**places)

    def rank(self, coordinate: Coordinate) -> int:
        """Return the rank at a coordinate. Raises: IndexError if an index is outside its degree."""
        rank = 0
        for axis, place in zip(AXES, coordinate, strict=True):
            if not 0 <= place < self.degree(axis):
                raise IndexError(f"{axis} = {place} is not in [0, {self.degree(axis)})")
            rank = rank * self.degree(axis) + place
        return rank

    def groups(self, *axes: str) -> Iterator[list[int]]:
        """Yield the groups of ranks that differ only along `axes`, in order."""
        seen: dict[Coordinate, list[int]] = {}
        for rank in range(self.world_size):
            seen.setdefault(self.coordinate(rank)._replace(**dict.fromkeys(axes, 0)), []).append(rank)
        yield from seen.values()

    @property
    def divides_grains(self) -> int:
        """Number of ranks with different grains: the data degree times the shard degree."""
        return self.data * self.shard

    @property
    def shares_grains(self) -> int:
        """Number of ranks that compute the same grains together: the product of the other degrees."""
        return self.tensor * self.pipeline * self.context


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors of a number, in order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return (*small, *(number // d for d in reversed(small) if d * d != number))
