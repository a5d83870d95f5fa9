"""Grains divide a global batch the same way whatever the devices."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.plans.grains import (
    Grain,
    default_grains,
    divide,
    grain_size,
    grains_of_statistics,
    legal_data_degrees,
    microbatches,
    random_key,
    share,
    share_sizes,
)

COUNTS = st.integers(1, 300)


@given(COUNTS, COUNTS, st.data())
def test_grains_partition_the_samples(global_batch: int, num_grains: int, data: st.DataObject) -> None:
    num_samples = data.draw(st.integers(0, global_batch))
    grains = divide(num_samples, global_batch, num_grains)
    assert [i for g in grains for i in range(g.start, g.start + g.size)] == list(range(num_samples))
    assert [g.index for g in grains] == list(range(len(grains)))
    assert len(grains) <= num_grains
    size = grain_size(global_batch, num_grains)
    assert all(g.size == size for g in grains[:-1])
    assert all(0 < g.size <= size for g in grains)


@given(COUNTS, COUNTS)
def test_batch_statistics_are_of_two_samples_or_more(global_batch: int, num_samples: int) -> None:
    count = grains_of_statistics(global_batch, num_samples)
    size = grain_size(global_batch, count)
    if count != 8:
        assert grain_size(global_batch, 8) > 1
        assert 1 not in (global_batch % size, num_samples % global_batch % size)


def test_eight_grains_unless_one_has_a_single_sample() -> None:
    assert [grains_of_statistics(64, samples) for samples in (1500, 1497)] == [8, 6]
    assert [grains_of_statistics(batch, 1400) for batch in (32, 50, 8, 256)] == [8, 6, 8, 8]


def test_a_short_step_has_fewer_grains_not_smaller_ones() -> None:
    assert divide(9, 32, 8) == [Grain(0, 0, 4), Grain(1, 4, 4), Grain(2, 8, 1)]
    assert divide(0, 32, 8) == []


@given(st.integers(0, 100), st.integers(1, 40))
def test_shares_partition_the_grains_evenly(count: int, num_parts: int) -> None:
    grains = [Grain(i, i, 1) for i in range(count)]
    shares = [share(grains, part, num_parts) for part in range(num_parts)]
    assert [g for part in shares for g in part] == grains
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.integers(0, 12), st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_shares_by_speed_make_the_slowest_rank_as_early_as_whole_grains_allow(count: int, speeds: list[int]) -> None:
    sizes, ranks = share_sizes(count, len(speeds), tuple(speeds)), len(speeds)
    ways = (way for way in itertools.product(range(count + 1), repeat=ranks) if sum(way) == count)
    times = [max(size / speed for size, speed in zip(way, speeds, strict=True)) for way in ways]
    assert sum(sizes) == count
    assert max(size / speed for size, speed in zip(sizes, speeds, strict=True)) == min(times)
    grains = list(range(count))
    assert [g for part in range(ranks) for g in share(grains, part, ranks, tuple(speeds))] == grains


def test_shares_by_speed_of_some_clusters() -> None:
    assert share_sizes(24, 2, (2, 1)) == (16, 8)
    assert share_sizes(8, 2, (2, 1)) == (6, 2)
    assert share_sizes(8, 2, (5, 3)) == (5, 3)
    assert share_sizes(8, 2, (4, 4)) == share_sizes(8, 2) == (4, 4)


@given(st.integers(0, 100), st.integers(0, 40))
def test_microbatches_are_runs_of_neighbours(count: int, per: int) -> None:
    grains = [Grain(i, i, 1) for i in range(count)]
    runs = microbatches(grains, per)
    assert [g for run in runs for g in run] == grains
    assert all(len(run) == max(1, per) for run in runs[:-1])
    assert all(runs)


@pytest.mark.parametrize(("grains", "words"), [(8, "1 to 8 (evenly: 1, 2, 4, 8)"), (6, "1 to 6 (evenly: 1, 2, 3, 6)")])
def test_legal_degrees_in_words(grains: int, words: str) -> None:
    assert legal_data_degrees(grains) == words


def test_random_keys_are_63_bits_and_belong_to_their_parts() -> None:
    keys = {random_key(seed, name, step) for seed in range(20) for name in ("data", "model") for step in range(50)}
    assert len(keys) == 2000
    assert all(0 <= key < 2**63 for key in keys)
    # The value itself is part of what a run is: a change of it changes every run.
    assert random_key(0, "model", 1) == 8060184075517457471
    assert random_key(1, 23) != random_key(12, 3)


@given(COUNTS, st.floats(0, 1e12), st.floats(0, 1e12))
def test_heavier_samples_never_make_fewer_grains(global_batch: int, one: float, other: float) -> None:
    light, heavy = sorted((one, other))
    fewer, more = default_grains(global_batch, light), default_grains(global_batch, heavy)
    assert 8 <= fewer <= more <= max(8, global_batch)
    assert more == 8 or global_batch % more == 0


def test_default_grains_are_light_together_or_single_samples() -> None:
    gib = 2**30
    assert default_grains(256, gib / 32) == 8
    assert default_grains(256, gib / 31.9) == 16, "31 would not divide the batch"
    assert default_grains(96, gib / 5) == 24
    assert default_grains(256, gib) == default_grains(256, 100 * gib) == 256
    assert default_grains(4, 100 * gib) == 8, "one sample each, and four that are empty"
