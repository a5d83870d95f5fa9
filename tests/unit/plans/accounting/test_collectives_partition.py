"""Division of updates further than by whole parameters."""

from __future__ import annotations

import random

import pytest

from shoal.plans.accounting.collectives import Range, divide, level


def loads(sizes: list[int], owners: list[int], ranks: int, found: dict[int, dict[int, Range]]) -> list[int]:
    """The bytes that each rank updates."""
    held = [0] * ranks
    for i, (size, owner) in enumerate(zip(sizes, owners, strict=True)):
        for rank, (begin, end) in found.get(i, {owner: (0, size)}).items():
            held[rank] += end - begin
    return held


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_nobody_has_much_more_than_its_share(ranks: int) -> None:
    """One size is most of all; runs follow each other and are whole rows, and the owner has one of them."""
    draw = random.Random(ranks)
    sizes = [40 << 20, *(draw.randrange(1 << 10, 2 << 20, 4) for _ in range(20))]
    owners = divide(sizes, ranks)
    found = level(sizes, owners, ranks, [True] * len(sizes))
    assert list(found) == [0]
    runs = sorted(found[0].values())
    assert [begin for begin, _ in runs] == [0, *(end for _, end in runs[:-1])]
    assert runs[-1][1] == sizes[0]
    assert owners[0] in found[0]
    assert all(begin % 2048 == 0 for begin, _ in runs)
    held = loads(sizes, owners, ranks, found)
    assert sum(held) == sum(sizes)
    assert max(held) < 1.05 * sum(sizes) / ranks < max(loads(sizes, owners, ranks, {}))


def test_what_may_not_be_divided_is_whole() -> None:
    sizes = [40 << 20, 1 << 20, 1 << 20]
    assert level(sizes, divide(sizes, 2), 2, [False, True, True]) == {}


def test_even_parts_stay_whole() -> None:
    sizes = [1 << 20] * 8
    assert level(sizes, divide(sizes, 4), 4, [True] * 8) == {}
