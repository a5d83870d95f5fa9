"""Collectives between real processes: every algorithm, operation, dtype and size, and each way that a rank can fail."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from subprocess import PIPE

import pytest
from tests.forks import Popen
from tests.launching import ROOT
from tests.usual import parametrize

from shoal.hardware.detect import ALGORITHMS

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]
TIME_LIMIT_SECONDS = 250.0


@contextlib.contextmanager
def ranks(world_size: int, *arguments: str) -> Iterator[list[Popen]]:
    """So many processes in one scenario; none is left when the context ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    common |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    processes = [
        Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.jobs.collective_rank", *arguments],
            cwd=ROOT,
            env={**os.environ, **common, "RANK": str(rank)},
            stdout=PIPE,
            stderr=PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate()


def results(processes: list[Popen]) -> list[list[object]]:
    """What each rank printed. Raises: AssertionError where one failed."""
    told = [process.communicate(timeout=TIME_LIMIT_SECONDS) for process in processes]
    for process, (_, stderr) in zip(processes, told, strict=True):
        assert process.returncode == 0, stderr[-3000:]
    return [[json.loads(line) for line in stdout.splitlines()] for stdout, _ in told]


@parametrize("world_size", [1, 2, 3, 4], usual=["3"])
def test_every_algorithm(world_size: int) -> None:
    """Values are right, bits are the same on all ranks, messages and bytes are the formula's."""
    with ranks(world_size, "all") as processes:
        found = results(processes)
    assert all(rank == found[0] for rank in found)
    assert [next(iter(line)) for line in found[0]] == list(ALGORITHMS)  # type: ignore[call-overload]


def test_groups_side_by_side() -> None:
    with ranks(4, "teams") as processes:
        assert results(processes) == [["ok"]] * 4


@parametrize("world_size", [2, 3], usual=["3"])
def test_the_fixed_tree_has_the_same_bits_through_shared_memory(world_size: int) -> None:
    """And others than a sum in the order of the grains, without which the comparison would show nothing."""
    with ranks(world_size, "tree") as processes:
        found = results(processes)
    assert found[0][0] == [True, True]
    assert all(line[0] for rank in found for line in rank)  # type: ignore[index]


def survivors(world_size: int, *scenario: str) -> list[dict[str, object]]:
    """What the ranks that are left say of the last one."""
    with ranks(world_size, *scenario) as processes:
        told = [process.communicate(timeout=TIME_LIMIT_SECONDS)[0] for process in processes[:-1]]
    lines = [[json.loads(line) for line in text.splitlines()] for text in told]
    assert all(len(own) == 3 for own in lines), lines
    return [own[1] for own in lines]


@parametrize(
    "name", ["shared_memory", "ring", "tree", "recursive_doubling", "hierarchical"], usual=["shared_memory", "tree"]
)
def test_a_rank_that_dies_is_named(name: str) -> None:
    for said in survivors(3, "fault", name, "killed"):
        text = str(said["text"])
        assert said["kind"] == "PeerError"
        # Who passes messages on may only notice once others have ended because of it: they are named as well.
        named = text.startswith("rank 2 (process ") if name in ("shared_memory", "hierarchical") else "rank 2 (" in text
        assert named, text
        assert "ended" in text
        assert said["call"] == 2


def test_a_rank_that_stops_is_named() -> None:
    for said in survivors(3, "fault", "shared_memory", "stopped"):
        assert said["kind"] == "PeerError"
        assert str(said["text"]).startswith("rank 2 (process ")
        assert "within 3 s: it is stopped" in str(said["text"])


@parametrize(
    ("name", "fault"),
    product(["shared_memory", "ring"], ["shape", "dtype"]),
    usual=["shared_memory-shape", "ring-dtype"],
)
def test_a_rank_with_another_call_is_named(name: str, fault: str) -> None:
    wrong = "399999 elements of float32" if fault == "shape" else "400000 elements of float64"
    said = survivors(2 if name == "ring" else 3, "fault", name, fault)
    for own in said:
        assert own["kind"] == "CollectiveError"
        assert f"rank {len(said)} calls all_reduce (sum) of {wrong}" in str(own["text"])
        assert "of 400000 elements of float32" in str(own["text"])


@parametrize("world_size", [2, 3], usual=["3"])
def test_a_process_group_gives_what_gloo_gives(world_size: int) -> None:
    """Bit for bit, whichever way torch is asked, and counts the same; what shared memory does not take is Gloo's."""
    with ranks(world_size, "group") as processes:
        found = results(processes)
    # Sixteen collectives of each of eleven tensors; ranks on different hosts do none there.
    assert found == [[{"through shared memory": 11 * 16, "of Gloo's": 0, "apart": 0}]] * world_size


@pytest.mark.parametrize("fault", ["killed", "shape"])
def test_a_rank_of_a_process_group_is_named(fault: str) -> None:
    for said in survivors(3 if fault == "killed" else 2, "group_fault", fault):
        text = str(said["text"])
        assert said["call"] == 2
        if fault == "killed":
            assert (said["kind"], text.startswith("rank 2 (process ")) == ("PeerError", True)
            assert "ended" in text
            assert "all_gather of 400000 elements" in text
        else:
            assert said["kind"] == "CollectiveError"
            assert text.startswith("rank 1 calls all_gather of 399999 elements of float32; rank 0 calls")


def shared_memory_in_use() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def test_nothing_is_left_when_all_are_killed() -> None:
    before = shared_memory_in_use()
    with ranks(2, "forever", "shared_memory") as processes:
        pids = [json.loads(process.stdout.readline())["pid"] for process in processes if process.stdout]
        maps = Path(f"/proc/{pids[1]}/maps").read_text()
        assert "/memfd:shoal (deleted)" in maps  # it is this memory that must go
        assert shared_memory_in_use() == before  # and it never had a name
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while any(process.poll() is None for process in processes):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert shared_memory_in_use() == before
