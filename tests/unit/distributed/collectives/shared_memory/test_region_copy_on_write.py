"""Private views of shared memory: what is written through them is this process's own, and is noticed."""

from __future__ import annotations

import mmap
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from shoal.distributed.collectives.shared_memory.region import CopyOnWrite, why_not_copied

PAGES = 3


def made() -> CopyOnWrite:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, PAGES * mmap.PAGESIZE)
    found = CopyOnWrite(descriptor, PAGES * mmap.PAGESIZE)
    os.close(descriptor)
    return found


@pytest.fixture
def memory() -> CopyOnWrite:
    return made()


def test_this_machine_has_them() -> None:
    assert why_not_copied() is None


def test_what_is_shared_is_seen(memory: CopyOnWrite) -> None:
    shared, private = memory.shared(8, 16), memory.private(8, 16)
    assert private.sum() == 0
    shared.fill_(3)
    assert private.tolist() == [3] * 16
    assert not memory.is_written()
    assert shared.untyped_storage().nbytes() == private.untyped_storage().nbytes() == 16


@given(some.integers(0, PAGES * mmap.PAGESIZE - 1))
def test_a_byte_anywhere_is_noticed(place: int) -> None:
    memory = made()
    memory.private(place, 1).fill_(7)
    assert memory.is_written()
    assert memory.shared(place, 1).item() == 0
    memory.drop()
    assert memory.private(place, 1).item() == 0
    assert not memory.is_written()


def test_nothing_of_nothing(memory: CopyOnWrite) -> None:
    assert memory.shared(0, 0).dtype == torch.uint8
    assert memory.private(0, 0).numel() == 0


def test_a_child_is_seen(memory: CopyOnWrite) -> None:
    child = os.fork()
    if not child:
        memory.shared(0, 4).fill_(5)
        os._exit(0)
    os.waitpid(child, 0)
    assert memory.private(0, 4).tolist() == [5] * 4


def test_a_machine_without_a_page_map_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refused)
    assert why_not_copied() == "the pages of a private mapping cannot be told: [Errno 13] Permission denied"
