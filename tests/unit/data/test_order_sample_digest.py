"""The digest of a step adds up over grains in any order and tells every change."""

import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shoal.checkpoint.keeper import chain_digest
from shoal.data.order import DIGEST_WORDS, EMPTY_DIGEST, grain_words, words_of_steps

IDS = st.lists(st.integers(0, 2**40), min_size=1, max_size=6, unique=True)


def grain_digest(step: int, grain: int, ids: list[int]) -> np.ndarray:
    return np.array(grain_words(step, [grain], [np.array(ids, np.int64)]))


def words(step: int, parts: list[list[int]]) -> np.ndarray:
    return sum((grain_digest(step, g, ids) for g, ids in enumerate(parts)), np.zeros(DIGEST_WORDS))


@given(st.lists(IDS, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_grains_add_up_in_any_order(parts: list[list[int]], random: object) -> None:
    each = [grain_digest(5, g, ids) for g, ids in enumerate(parts)]
    order = list(range(len(each)))
    random.shuffle(order)  # type: ignore[attr-defined]
    assert np.array_equal(sum(each[i] for i in order), words(5, parts))


def test_every_change_shows() -> None:
    base = words(5, [[1, 2], [3, 4]])
    changed = [
        words(6, [[1, 2], [3, 4]]),  # step
        words(5, [[2, 1], [3, 4]]),  # order in a grain
        words(5, [[3, 4], [1, 2]]),  # grains exchanged
        words(5, [[1, 2, 3], [4]]),  # another division
        words(5, [[1, 2], [3, 5]]),  # an id
        words(5, [[1, 2], [3]]),  # one lost
        words(5, [[1, 2]]),  # a grain lost
    ]
    digests = {chain_digest(EMPTY_DIGEST, w) for w in [base, *changed]}
    assert len(digests) == 8


@given(st.integers(1, 4), st.integers(15, 40), st.lists(IDS, max_size=3))
def test_many_grains_at_once_are_the_sum_of_each(size: int, count: int, uneven: list[list[int]]) -> None:
    """In one array as far as they are equally long, the short last one and others beside it."""
    parts = [*np.arange(count * size, dtype=np.int64).reshape(count, size), *(np.array(u, np.int64) for u in uneven)]
    parts.append(np.arange(max(1, size - 1), dtype=np.int64))
    numbers = list(range(7, 7 + len(parts)))
    one_by_one = sum(np.array(grain_words(5, [n], [p])) for n, p in zip(numbers, parts, strict=True))
    assert np.array_equal(np.array(grain_words(5, numbers, parts)), one_by_one)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(1, 3), st.booleans())
def test_words_of_several_steps_are_those_of_each(counts: list[int], size: int, short: bool) -> None:
    """From one table, or from several where the last grain of a pass over the data is short."""
    parts = []
    for step, count in enumerate(counts):
        ids = [np.arange(size, dtype=np.int64) + 100 * grain + step for grain in range(count)]
        if short and step == len(counts) - 1:
            ids[-1] = np.arange(size + 1, dtype=np.int64)
        parts.append((step + 3, list(range(7, 7 + count)), ids))
    assert words_of_steps(parts) == [grain_words(*part) for part in parts]


def test_words_are_whole_and_below_two_to_the_32() -> None:
    found = grain_digest(1, 2, [0, 1, 2])
    assert found.shape == (DIGEST_WORDS,)
    assert np.array_equal(found, np.floor(found))
    assert found.max() < 2**32
    expected = hashlib.sha256(b"".join(n.to_bytes(8, "little") for n in (1, 2, 0, 1, 2))).digest()
    assert found.astype("<u4").tobytes() == expected


def test_the_chain_remembers_what_came_before() -> None:
    one, two = words(0, [[1]]), words(1, [[2]])
    there = chain_digest(chain_digest(EMPTY_DIGEST, one), two)
    assert there != chain_digest(chain_digest(EMPTY_DIGEST, two), one)
    assert there != chain_digest(EMPTY_DIGEST, two)
    assert len(there) == 64
