"""All-reduce algorithms as numbers: they are played through on vectors of sets, so that who has what is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.plans.accounting.all_reduce import (
    DOUBLING_BYTES,
    HEADER_BYTES,
    SEGMENT_BYTES,
    cuts,
    data_parallel,
    halving,
    messages,
    place_in_tree,
    segments,
)
from shoal.plans.accounting.collectives import WORLD, Array, Gradients, Volume, Volumes
from shoal.plans.accounting.collectives import data_parallel as native
from shoal.plans.accounting.rank import Described, traffic
from shoal.plans.plan import Layout, Plan

worlds = st.integers(2, 40)
HEADER = Volume(1, HEADER_BYTES)


def sent(algorithm: str, numel: int, rank: int, world_size: int, kind: str = "send") -> Volume:
    """What a rank sends of float32 numbers, or receives."""
    return Volumes.of(messages(algorithm, numel, 4, rank, world_size)).get((WORLD, kind), Volume(0, 0))


@given(worlds, st.integers(0, 1))
def test_a_tree_has_one_root_and_everyone_in_it(world_size: int, tree: int) -> None:
    places = [place_in_tree(rank, world_size, tree) for rank in range(world_size)]
    assert [place.parent for place in places].count(None) == 1
    for rank, place in enumerate(places):
        assert len(place.children) <= 2
        for child in place.children:
            assert places[child].parent == rank
        seen, above = {rank}, place.parent
        while above is not None:  # every way up ends at the root
            assert above not in seen
            seen.add(above)
            above = places[above].parent
        assert len(seen) <= world_size.bit_length() + 1


@given(worlds)
def test_nobody_passes_on_in_both_trees(world_size: int) -> None:
    for rank in range(world_size):
        assert not all(place_in_tree(rank, world_size, tree).children for tree in (0, 1))


@given(worlds, st.integers(0, 200))
def test_halving_and_doubling_give_everyone_the_whole_sum(world_size: int, numel: int) -> None:
    ways = [halving(numel, rank, world_size) for rank in range(world_size)]
    held = [[{rank} for _ in range(numel)] for rank in range(world_size)]
    for rank, way in enumerate(ways):
        if way.folds_into is not None:
            assert ways[way.folds_into].folded == rank
            held[way.folds_into] = [a | b for a, b in zip(held[way.folds_into], held[rank], strict=True)]
    depth = max(len(way.exchanges) for way in ways)
    for number in range(depth):
        before = [list(h) for h in held]
        for rank, way in enumerate(ways):
            if way.exchanges:
                step = way.exchanges[number]
                other = ways[step.partner].exchanges[number]
                assert (other.partner, other.sends, other.stays) == (rank, step.stays, step.sends)
                for i in range(*step.stays):
                    assert not before[rank][i] & before[step.partner][i], "counted twice"
                    held[rank][i] = before[rank][i] | before[step.partner][i]
    everyone = set(range(world_size))
    for rank, way in enumerate(ways):
        if way.exchanges:
            assert all(held[rank][i] == everyone for i in range(*way.exchanges[-1].stays))


@given(worlds, st.integers(0, 10_000))
def test_a_ring_sends_no_more_than_it_must(world_size: int, numel: int) -> None:
    all_sent = [sent("ring", numel, rank, world_size) for rank in range(world_size)]
    assert sum(v.bytes - HEADER_BYTES for v in all_sent) == 2 * (world_size - 1) * numel * 4
    assert all(v.messages <= 2 * (world_size - 1) + 1 for v in all_sent)
    got = [sent("ring", numel, rank, world_size, "recv") for rank in range(world_size)]
    assert sum(v.bytes for v in got) == sum(v.bytes for v in all_sent)


@pytest.mark.parametrize("world_size", [2, 4, 8, 16])
def test_formulas_of_powers_of_two(world_size: int) -> None:
    numel = 1 << 20
    exact = 2 * numel * 4 * (world_size - 1) // world_size + HEADER_BYTES
    for rank in range(world_size):
        assert sent("ring", numel, rank, world_size) == Volume(2 * (world_size - 1) + 1, exact)
        log = world_size.bit_length() - 1
        assert sent("recursive_doubling", numel, rank, world_size) == Volume(2 * log + 1, exact)
        small = DOUBLING_BYTES // 4
        assert sent("recursive_doubling", small, rank, world_size) == Volume(
            log + 1, log * DOUBLING_BYTES + HEADER_BYTES
        )
        assert sent("tree", numel, rank, world_size).bytes <= 2 * numel * 4 + HEADER_BYTES


def test_one_rank_sends_nothing() -> None:
    assert {sent(name, 100, 0, 1) for name in ("ring", "tree", "recursive_doubling")} == {Volume(0, 0)}


def test_segments_and_cuts() -> None:
    assert segments(0, 4) == []
    assert segments(SEGMENT_BYTES // 4 + 1, 4) == [SEGMENT_BYTES // 4, 1]
    assert cuts(10, 4) == [0, 2, 5, 7, 10]


def test_a_step_by_messages() -> None:
    gradients, layout = Gradients((Array((100, 7)), Array((3,)))), Layout(data=3)
    (length,) = gradients.buckets(layout)
    assert Volumes.of(data_parallel(gradients, layout, "ring", 1)) == {
        (WORLD, "send"): sent("ring", length, 1, 3),
        (WORLD, "recv"): sent("ring", length, 1, 3, "recv"),
    }
    assert list(data_parallel(gradients, layout, "shared_memory", 1)) == []
    hierarchical = Plan().with_sections(layout={"data": 3}, collectives={"all_reduce": "hierarchical"})
    assert traffic(hierarchical, Described(gradients), 1) is None
    assert list(data_parallel(gradients, layout, "native", 1)) == list(native(gradients, layout)) != []
