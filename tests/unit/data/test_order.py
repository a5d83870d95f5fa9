"""The order of samples is arithmetic: a permutation without a table, the same anywhere and at any size."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.order import Order, permute
from shoal.jobs.job import Epochs, Length, Samples, Steps
from shoal.plans.grains import random_key

HUGE = 10**10


def order(num_samples: int, global_batch: int, length: Length, grains: int = 8, shuffle: bool = True) -> Order:
    return Order(num_samples, global_batch, grains, seed=3, shuffle=shuffle, length=length)


def step_ids(order: Order, step: int) -> np.ndarray:
    ids = order.ids(step, order.grains(step))
    return np.concatenate(ids) if ids else np.empty(0, np.int64)


@settings(max_examples=60)
@given(st.integers(1, 5000), st.integers(0, 2**63 - 1))
def test_a_permutation_is_a_bijection(count: int, key: int) -> None:
    ids = permute(np.arange(count), count, key)
    assert ids.dtype == np.int64
    assert np.array_equal(np.sort(ids), np.arange(count))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 255, 256, 257, 4096, 4097])
def test_sizes_about_powers_of_two(count: int) -> None:
    for key in range(3):
        assert sorted(permute(np.arange(count), count, key).tolist()) == list(range(count))


@given(st.integers(0, HUGE - 2000))
def test_any_place_of_ten_thousand_million_samples(start: int) -> None:
    ids = permute(np.arange(start, start + 2000), HUGE, 7)
    assert ids.min() >= 0
    assert ids.max() < HUGE
    assert len(np.unique(ids)) == 2000


def test_an_id_depends_on_its_position_alone() -> None:
    whole = permute(np.arange(1000), 1000, 5)
    assert np.array_equal(permute(np.array([999, 0, 500]), 1000, 5), whole[[999, 0, 500]])


def test_the_order_at_a_huge_size_is_read_in_blocks() -> None:
    big = order(HUGE, 1000, Epochs(1))
    last = big.num_steps - 1
    assert last == HUGE // 1000 - 1
    for step in (0, 17, 4_999_999, last):
        key = random_key(3, "order", 0)
        assert np.array_equal(step_ids(big, step), permute(np.arange(step * 1000, step * 1000 + 1000), HUGE, key))


def test_neighbouring_keys_share_no_order() -> None:
    orders = [permute(np.arange(2000), 2000, random_key(seed, "order", epoch)) for seed in range(3) for epoch in (0, 1)]
    for i, one in enumerate(orders):
        assert np.mean(one == np.arange(2000)) < 0.01
        assert all(np.mean(one == other) < 0.01 for other in orders[:i])


def test_every_position_gets_every_id_about_equally_often() -> None:
    """Chi-squared over 20 x 20 cells of 600 permutations: 361 degrees of freedom, 6 standard deviations of 26.9."""
    rows = np.stack([permute(np.arange(20), 20, random_key("uniform", k)) for k in range(600)])
    counts = np.stack([np.bincount(rows[:, place], minlength=20) for place in range(20)])
    chi_squared = float(((counts - 30.0) ** 2 / 30.0).sum())
    assert abs(chi_squared - 361.0) < 6 * np.sqrt(2 * 361.0)


def test_a_step_is_no_run_of_neighbours() -> None:
    ids = np.sort(step_ids(order(60_000, 256, Epochs(1)), 0))
    assert np.ptp(ids) > 50_000
    assert np.mean(np.diff(ids) == 1) < 0.05


@given(st.integers(1, 200), st.integers(1, 60), st.integers(1, 12), st.booleans())
def test_an_epoch_holds_every_sample_once(num_samples: int, batch: int, grains: int, shuffle: bool) -> None:
    one = order(num_samples, batch, Epochs(2), grains, shuffle)
    for epoch in range(2):
        steps = range(one.first_step(epoch), one.first_step(epoch + 1))
        ids = [int(i) for step in steps for i in step_ids(one, step)]
        assert sorted(ids) == list(range(num_samples))
        assert all(one.epoch(step) == epoch for step in steps)
        if not shuffle:
            assert ids == list(range(num_samples))


def test_each_epoch_has_its_own_order() -> None:
    one = order(100, 10, Epochs(2))
    assert not np.array_equal(step_ids(one, 0), step_ids(one, 10))
    other = Order(100, 10, 8, seed=4, shuffle=True, length=Epochs(2))
    assert not np.array_equal(step_ids(one, 0), step_ids(other, 0))


def test_the_number_of_grains_changes_no_step() -> None:
    wide, narrow = order(100, 12, Epochs(1), grains=2), order(100, 12, Epochs(1), grains=5)
    assert all(np.array_equal(step_ids(wide, s), step_ids(narrow, s)) for s in range(9))


@pytest.mark.parametrize(
    ("length", "steps"),
    [
        (Epochs(1), 10),
        (Epochs(3), 30),
        (Epochs(0.5), 5),
        (Epochs(1.25), 12),
        (Epochs(0.001), 1),
        (Steps(7), 7),
        (Steps(1000), 1000),
        (Samples(32), 1),
        (Samples(33), 2),
        (Samples(300), 10),
        (Samples(301), 11),
        (Samples(640), 22),
        (Samples(1), 1),
    ],
)
def test_length_in_steps(length: Length, steps: int) -> None:
    assert order(300, 32, length).num_steps == steps


@given(st.integers(1, 120), st.integers(1, 40), st.integers(1, 400))
def test_samples_are_counted_to_the_last(num_samples: int, batch: int, count: int) -> None:
    one = order(num_samples, batch, Samples(count))
    sizes = [sum(g.size for g in one.grains(step)) for step in range(one.num_steps)]
    assert sum(sizes) == count
    assert all(0 < size <= batch for size in sizes)
    assert [one.samples_before(step) for step in range(one.num_steps)] == [sum(sizes[:i]) for i in range(len(sizes))]
    assert all(len(step_ids(one, step)) == size for step, size in enumerate(sizes))


def test_a_short_step_keeps_the_size_of_its_grains() -> None:
    assert [g.size for g in order(20, 16, Epochs(1)).grains(0)] == [2] * 8
    assert [g.size for g in order(20, 16, Epochs(1)).grains(1)] == [2, 2]
    assert [g.size for g in order(19, 16, Epochs(1)).grains(1)] == [2, 1]


def test_ids_of_some_grains_are_those_of_the_whole_step() -> None:
    one = order(100, 16, Epochs(1))
    grains = one.grains(2)
    whole = one.ids(2, grains)
    part = one.ids(2, grains[3:6])
    assert [i.tolist() for i in part] == [i.tolist() for i in whole[3:6]]
    assert one.ids(2, []) == []


def test_a_golden_order() -> None:
    """A change of these ids would change every run and break every resume."""
    assert step_ids(order(1000, 8, Epochs(1)), 0).tolist() == [741, 190, 862, 626, 887, 647, 611, 199]
