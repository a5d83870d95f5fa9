"""Faults: memory that ran out is named as that, whoever's code asked for it."""

from __future__ import annotations

import errno
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import shoal
from shoal.distributed.failures import as_shoal_error, is_lost_peer, to_json, user_error
from shoal.errors import (
    CollectiveError,
    JobError,
    LaunchError,
    OutOfMemoryError,
    PeerError,
    PlanError,
    StorageError,
    UserCodeError,
    from_json,
)
from shoal.planner.search.search import NothingFitsError

CPU = "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate 36"


@pytest.mark.parametrize("error", [RuntimeError(CPU), MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
def test_memory_that_ran_out_in_the_jobs_code_is_no_fault_of_it(error: Exception) -> None:
    for found in (user_error("the optimizer", error), as_shoal_error(error)):
        assert isinstance(found, OutOfMemoryError)
        assert "memory ran out" in found.conflict
        assert "shard = N" in found.remedy
    assert user_error("the optimizer", error).given == "the optimizer of this job"


def test_another_error_of_the_jobs_code_is_its_own() -> None:
    assert isinstance(user_error("the optimizer", RuntimeError("something else")), UserCodeError)


class UnprintableError(ValueError):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def raised_by_a_job(error: Exception) -> Exception:
    with pytest.raises(type(error)) as caught:
        raise error
    return caught.value


def test_an_exception_that_cannot_be_printed_is_the_jobs() -> None:
    found = user_error("the model or loss", raised_by_a_job(UnprintableError()))
    assert isinstance(found, UserCodeError)
    assert "it raised UnprintableError: it has no text, since its __str__ raised RuntimeError" in found.conflict
    assert "UnprintableError" in (found.traceback_text or "")
    assert not is_lost_peer(UnprintableError())


def test_a_lone_surrogate_in_a_message_is_shown_by_its_number() -> None:
    found = user_error("the model or loss", raised_by_a_job(ValueError("bad \udcff text")))
    assert "it raised ValueError: bad \\udcff text" in found.conflict
    for text in (found.conflict, found.remedy, found.traceback_text or ""):
        text.encode()


def test_a_full_dev_shm_is_no_full_disk() -> None:
    found = as_shoal_error(OSError(errno.ENOSPC, "No space left on device", "/dev/shm/torch_1"))
    assert isinstance(found, StorageError)
    assert found.conflict == "/dev/shm is full: No space left on device"
    assert "--shm-size" in found.remedy


@pytest.mark.parametrize("kind", [PeerError, CollectiveError])
def test_a_collective_within_a_backward_says_itself_who_is_lost(kind: type[PeerError] | type[CollectiveError]) -> None:
    error = kind(given="rank 1 (process 7)", conflict="it ended", remedy="look")
    assert is_lost_peer(error)
    assert as_shoal_error(error) is error
    assert is_lost_peer(RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer"))
    assert not is_lost_peer(JobError(given="gloo = 3", conflict="none", remedy="none"))


def test_what_the_system_lacks_is_no_fault_of_shoal() -> None:
    full = as_shoal_error(OSError(errno.ENOSPC, "No space left on device", "/full/job.json"))
    assert isinstance(full, StorageError)
    assert "/full/job.json" in full.given
    for error in (
        OSError(errno.EMFILE, "Too many open files"),
        RuntimeError("unable to open: Too many open files (24)"),
    ):
        found = as_shoal_error(error)
        assert isinstance(found, LaunchError)
        assert "ulimit -n" in found.remedy


LINE = "def fails():\n    shoal.mse('no tensor', 0)\n"


def raised_in(file: str) -> str:
    """Message of an error that a line of a file, or of none, gets out of shoal."""
    space: dict[str, Any] = {"shoal": shoal}
    exec(compile(LINE, file, "exec"), space)
    with ThreadPoolExecutor(1) as pool:  # so that no line of this file is on the way
        error = pool.submit(space["fails"]).exception()
    assert error is not None
    return user_error("data", error).conflict


@pytest.mark.parametrize("file", ["<stdin>", "<python-input-3>", "<ipython-input-1-ab>"])
def test_code_that_was_typed_in_is_named(file: str) -> None:
    assert raised_in(file).endswith(f" at {file}:2 in fails")


def test_shoals_own_lines_are_never_the_users() -> None:
    """Of a lambda that came by value from a process whose code has no source."""
    assert " at " not in raised_in("<string>")


def test_an_error_of_a_kind_that_only_one_room_knows_arrives_as_the_kind_that_it_is_one_of() -> None:
    error = from_json(to_json(NothingFitsError(given="a plan", conflict="no layout fits", remedy="more"), 0, "here"))
    assert type(error) is PlanError
    assert error.exit_code == NothingFitsError.exit_code
