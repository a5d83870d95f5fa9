"""Ranks that do not come, come twice, or fail before they have met: all end soon, with who is there."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.launching import JOBS, Ended, Gate, Run, Started, run, start
from tests.usual import parametrize

pytestmark = pytest.mark.faults

JOB = f"{JOBS / 'tiny.py'}:job"
# Less than the 45 s for which ranks wait for each other.
SOON_SECONDS = 40.0


def free_port() -> int:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return int(own.getsockname()[1])


@contextlib.contextmanager
def ranks(
    tmp_path: Path, *given: tuple[int, int], environment: dict[str, str] | None = None
) -> Iterator[list[Started]]:
    """Processes that are told rank and world size by hand, as a script over ssh does."""
    port = str(free_port())
    with contextlib.ExitStack() as all_of_them:
        started: list[Started] = []
        for number, (rank, size) in enumerate(given):
            variables = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            variables |= environment or {}
            variables |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
            wanted = Run(JOB, tmp_path / f"run-{number}", None, environment=variables)
            started.append(all_of_them.enter_context(start(wanted)))
        yield started


def ends(tmp_path: Path, *given: tuple[int, int]) -> list[Ended]:
    with ranks(tmp_path, *given) as started:
        return [one.wait(SOON_SECONDS).fails(2) for one in started]


def test_two_processes_as_one_rank(tmp_path: Path) -> None:
    with ranks(tmp_path, (0, 3), (1, 3), (1, 3)) as started:
        pids = [one.pid for one in started]
        found = [one.wait(SOON_SECONDS).fails(2) for one in started]
    for ended in found:
        assert "have both come as rank 1" in ended.stderr
        assert all(f"process {pid} on" in ended.stderr for pid in pids[1:])


def test_world_sizes_that_differ(tmp_path: Path) -> None:
    for ended in ends(tmp_path, (0, 3), (1, 2)):
        assert "WORLD_SIZE=3" in ended.stderr
        assert "WORLD_SIZE=2" in ended.stderr


@pytest.mark.slow
def test_who_is_waited_for_is_told(tmp_path: Path) -> None:
    with ranks(tmp_path, (0, 3), (2, 3)) as started:
        first = started[0]
        first.until(lambda: "waiting for rank 1 of 3 (here are rank 0" in first.output, "a line about rank 1")
        assert f"rank 2 (process {started[1].pid} on" in first.output


@pytest.mark.slow
def test_a_rank_that_never_comes(tmp_path: Path) -> None:
    began = time.monotonic()
    with ranks(tmp_path, (0, 3), (2, 3)) as started:
        for one in started:
            ended = one.wait(200.0).fails(2)
            assert "rank 1 of 3 did not come within 45 s; here are rank 0 (process" in ended.stderr
    assert time.monotonic() - began < 200.0


def test_rank_0_that_is_waited_for_is_told(tmp_path: Path) -> None:
    port = str(free_port())
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": "0"}
    with start(Run(JOB, tmp_path / "run", None, environment=variables)) as one:
        one.until(lambda: f"waiting for rank 0's store at 127.0.0.1:{port}" in one.output, "a line about rank 0")


RAISING = """
import os, sys
sys.path.insert(0, {folder!r})
import tiny

if os.environ.get("RANK") == "1":
    {what}

def job():
    return tiny.mlp({changes})
"""


@parametrize("what", ["raise ValueError('no such table')", "raise SystemExit(4)"], ids=["raises", "exits"])
def test_a_rank_that_fails_before_it_has_joined(what: str, tmp_path: Path) -> None:
    job = tmp_path / "raising.py"
    job.write_text(RAISING.format(folder=str(JOBS), what=what, changes=""), encoding="utf-8")
    ended = run(Run(job, tmp_path / "run", 3), SOON_SECONDS).fails(2)
    assert "rank 1" in ended.stderr
    assert ("no such table" in ended.stderr) == ("table" in what)
    assert "PeerError" not in ended.stderr


def test_a_worker_that_ends_with_0_in_the_midst_of_its_work(tmp_path: Path) -> None:
    job = tmp_path / "ending.py"
    changes = "schedule=lambda progress: os._exit(0) if os.environ.get('RANK') == '1' and progress > 0.2 else 1.0"
    job.write_text(RAISING.format(folder=str(JOBS), what="pass", changes=changes), encoding="utf-8")
    ended = run(Run(job, tmp_path / "run", 2), SOON_SECONDS).fails(69)
    assert "rank 1" in ended.stderr
    assert "it ended with code 0 without a word" in ended.stderr


def test_a_peer_that_is_lost_without_a_launcher(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate", 3)
    with ranks(tmp_path, (0, 2), (1, 2), environment=gate.environment) as (zero, one):
        zero.until(lambda: gate.reached(2), "the gate")
        one.send(signal.SIGKILL)
        gate.open()
        ended = zero.wait(SOON_SECONDS).fails(69)
    assert "error on rank 0 (" in ended.stderr
    assert "rank 1 (process" in ended.stderr
    assert "Traceback" not in ended.output


@parametrize("devices", [1, 2], usual=[])
def test_threads_that_the_job_left_behind(devices: int, tmp_path: Path) -> None:
    job = tmp_path / "threads.py"
    what = "pass\nimport threading, time\nthreading.Thread(target=time.sleep, args=(10**6,), name='endless').start()"
    job.write_text(RAISING.format(folder=str(JOBS), what=what, changes=""), encoding="utf-8")
    ended = run(Run(job, tmp_path / "run", devices), SOON_SECONDS).expect(0)
    assert ended.result["status"] == "completed"
    assert "threads that the job's code left running: endless" in ended.stderr
