"""The sum over grains is one fixed tree: the same bits whoever holds which grain and in whatever order they come."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.distributed.collectives.fixed_tree import TreeSum, evaluate, halves, pieces


def values(num_grains: int, length: int = 7) -> list[torch.Tensor]:
    """Of very different sizes, so that almost any other order of additions gives other bits."""
    generator = torch.Generator().manual_seed(num_grains)
    scale = 10.0 ** torch.randint(-4, 5, (num_grains, 1), generator=generator)
    return list(torch.randn(num_grains, length, generator=generator) * scale)


def by_definition(present: dict[int, torch.Tensor], lo: int, hi: int) -> torch.Tensor | None:
    """The docstring of the module, word for word."""
    if hi - lo == 1:
        return present.get(lo)
    half = 1
    while half * 2 < hi - lo:
        half *= 2
    left, right = by_definition(present, lo, lo + half), by_definition(present, lo + half, hi)
    if left is None or right is None:
        return left if right is None else right
    return left + right


@given(st.integers(0, 50), st.integers(2, 60))
def test_a_node_splits_at_the_largest_power_of_two_below(lo: int, size: int) -> None:
    (a, middle), (same, hi) = halves(lo, lo + size)
    assert (a, same, hi) == (lo, middle, lo + size)
    left = middle - lo
    assert left & (left - 1) == 0
    assert left < size <= 2 * left


@given(st.integers(1, 40), st.data())
def test_pieces_are_disjoint_and_cover_what_is_held(num_grains: int, data: st.DataObject) -> None:
    held = data.draw(st.sets(st.integers(0, num_grains - 1)))
    found = pieces(held, num_grains)
    assert [g for lo, hi in found for g in range(lo, hi)] == sorted(held)


def test_all_grains_are_one_piece_and_neighbours_are_few() -> None:
    assert pieces(range(13), 13) == [(0, 13)]
    assert pieces([], 8) == []
    assert pieces(range(3), 8) == [(0, 2), (2, 3)]
    assert pieces(range(1, 1023), 1024)[0] == (1, 2)
    assert len(pieces(range(1, 1023), 1024)) == 18


@settings(max_examples=150)
@given(st.integers(1, 24), st.integers(1, 6), st.data())
def test_any_grains_on_any_ranks_give_the_same_bits(num_grains: int, ranks: int, data: st.DataObject) -> None:
    held = sorted(data.draw(st.sets(st.integers(0, num_grains - 1))))
    holder = {g: data.draw(st.integers(0, ranks - 1)) for g in held}
    order = data.draw(st.permutations(held))
    all_values = values(num_grains)
    trees = [TreeSum(num_grains, all_values[0]) for _ in range(ranks)]
    for grain in order:
        trees[holder[grain]].add(grain, all_values[grain].clone())
    nodes: dict[tuple[int, int], torch.Tensor] = {}
    for rank, tree in enumerate(trees):
        wanted = pieces([g for g in held if holder[g] == rank], num_grains)
        assert sorted(tree.nodes) == sorted(wanted)
        nodes |= tree.nodes
    found = evaluate(nodes, num_grains, torch.Tensor.add)
    expected = by_definition({g: all_values[g] for g in held}, 0, num_grains)
    assert (found is None) == (expected is None) == (not held)
    if found is not None and expected is not None:
        assert torch.equal(found, expected)


def test_one_rank_alone_has_the_total() -> None:
    all_values = values(6)
    tree = TreeSum(6, all_values[0])
    order = list(range(6))
    random.Random(3).shuffle(order)
    for grain in order:
        tree.add(grain, all_values[grain].clone())
    assert set(tree.nodes) == {(0, 6)}
    total = tree.total([sorted(order)], rank=0)
    a, b, c, d, e, f = all_values
    assert torch.equal(total, ((a + b) + (c + d)) + (e + f))
    other = sum(all_values, torch.zeros(7))
    assert not torch.equal(total, other), "values for which the order of additions does not show test nothing"


def test_no_grain_at_all_sums_to_zero() -> None:
    tree = TreeSum(4, torch.ones(3))
    assert torch.equal(tree.total([[]], 0), torch.zeros(3))


def test_memory_is_used_again() -> None:
    tree = TreeSum(8, torch.ones(5))
    addresses = set()
    for _ in range(3):
        for grain in range(8):
            vector = tree.empty()
            addresses.add(vector.data_ptr())
            tree.add(grain, vector.fill_(grain))
        assert torch.equal(tree.total([list(range(8))], 0), torch.full((5,), 28.0))
        tree.clear()
        assert tree.nodes == {}
    assert len(addresses) <= 5  # log2(8) partial sums, one being filled and one being added


@pytest.mark.parametrize("num_grains", [1, 2, 3, 8])
def test_a_sum_of_a_sub_range_is_a_node(num_grains: int) -> None:
    all_values = values(num_grains)
    whole = evaluate({(g, g + 1): v for g, v in enumerate(all_values)}, num_grains, torch.Tensor.add)
    assert evaluate({(0, num_grains): all_values[0]}, num_grains, torch.Tensor.add) is all_values[0]
    assert whole is not None
