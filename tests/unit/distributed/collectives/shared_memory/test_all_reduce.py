"""Memory and words that processes share, in one process: what is cut how, what a counter says, what has no name."""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.distributed.collectives.hierarchical import _divide
from shoal.distributed.collectives.shared_memory.region import WORD_MASK, Words, has_futexes, is_behind, open_region
from shoal.distributed.collectives.shared_memory.staging import cut
from shoal.errors import CollectiveError, LaunchError

pytestmark = pytest.mark.skipif(not has_futexes(), reason="this machine has no futexes")


@given(st.integers(0, 5000), st.sampled_from([1, 2, 4, 8]), st.integers(1, 9))
def test_parts_cover_everything_from_cache_line_to_cache_line(numel: int, itemsize: int, world_size: int) -> None:
    cuts = cut(numel, itemsize, world_size)
    assert cuts[0] == 0
    assert cuts[-1] == numel
    assert sorted(cuts) == cuts
    assert all(place == numel or place * itemsize % 64 == 0 for place in cuts)
    longest = max(b - a for a, b in itertools.pairwise(cuts))
    assert longest * itemsize <= -(-numel // world_size) * itemsize + 64


@given(st.integers(0, WORD_MASK), st.integers(0, 1 << 30))
def test_counters_wrap(value: int, ahead: int) -> None:
    assert is_behind(value, value + ahead) == (ahead > 0)
    assert not is_behind((value + ahead) & WORD_MASK, value)


def test_a_wait_ends_with_a_wake_or_in_time() -> None:
    words = Words(mmap.mmap(-1, mmap.PAGESIZE))
    words.wait(3, seen=1, seconds=60.0)  # it is not 1: nothing to wait for
    began = time.monotonic()
    words.wait(3, seen=0, seconds=0.05)
    assert time.monotonic() - began >= 0.04
    woken = threading.Event()

    def wait() -> None:
        while words.values[3] == 0:
            words.wait(3, seen=0, seconds=60.0)
        woken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    words.publish(3, 7)
    assert woken.wait(30.0)
    thread.join()
    words.publish(3, WORD_MASK + 2)
    assert words.values[3] == 1


def alone(row: list[int]) -> list[list[int]]:
    return [row]


def test_a_region_is_zeros_without_a_name_and_goes_with_its_tensors() -> None:
    before, named = set(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))
    region = open_region(alone, 0, 1, 5000)
    assert region.slot_bytes == 8192
    tensor = region.tensor(0, 64, 10, torch.float32)
    assert tensor.tolist() == [0.0] * 10
    assert region.offset_in(0, tensor) == 64
    assert region.offset_in(0, torch.zeros(3)) is None
    assert region.own(0, 10, torch.float32).untyped_storage().nbytes() == 40
    assert set(os.listdir("/dev/shm")) == named
    assert "/memfd:shoal (deleted)" in Path("/proc/self/maps").read_text()
    del region
    assert "/memfd:shoal" in Path("/proc/self/maps").read_text()
    del tensor
    assert set(os.listdir("/proc/self/fd")) == before
    assert "/memfd:shoal" not in Path("/proc/self/maps").read_text()


def test_its_size_is_sealed() -> None:
    sizes: list[str] = []

    def look(row: list[int]) -> list[list[int]]:
        if len(row) == 5 and row[1] >= 0:
            with pytest.raises(PermissionError):
                os.ftruncate(row[1], 1)
            assert os.fstat(row[1]).st_mode & 0o777 == 0o600
            sizes.append("looked")
        return [row]

    open_region(look, 0, 1, 100)
    assert sizes == ["looked"]


def test_ranks_ask_for_the_same() -> None:
    def other(row: list[int]) -> list[list[int]]:
        return [row, [*row[:3], 2 * row[3], 0] if len(row) == 5 else [0]]

    with pytest.raises(CollectiveError, match="every rank asks for the same size"):
        open_region(other, 0, 2, 100)


def test_a_rank_that_cannot_map_it_is_named() -> None:
    def other(row: list[int]) -> list[list[int]]:
        return [row, row if len(row) == 5 else [13]]

    with pytest.raises(LaunchError, match=r"rank 1 cannot map it: Permission denied"):
        open_region(other, 0, 2, 100)


def test_hosts_in_the_order_of_their_first_ranks() -> None:
    assert _divide([0, 1, 2, 3, 5], [7, 4, 7, 4, 0, 4]) == [[0, 2], [1, 3, 5]]
