"""Owners of ZeRO-1 with unequal room."""

from __future__ import annotations

from shoal.plans.accounting.collectives import divide


def test_owners_have_bytes_in_proportion_to_their_room() -> None:
    sizes = [40, 30, 20, 10, 10, 10]
    owners = divide(sizes, 2, (3, 1))
    loads = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == one) for one in (0, 1)]
    assert loads == [90, 30]
    assert divide(sizes, 2, (1, 1)) == divide(sizes, 2)
