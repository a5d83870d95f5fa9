"""What a rank says of its phases is what its launcher reads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.launch.supervise import heartbeat
from shoal.launch.supervise.heartbeat import Heartbeat


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(heartbeat.time, "perf_counter", lambda: now[0])
    return now


def test_the_phase_and_its_longest_time_of_late(tmp_path: Path, clock: list[float]) -> None:
    path = tmp_path / "heartbeat-1"
    heartbeat.make(path)
    assert heartbeat.read(path) is None, "it has not begun"
    rank = Heartbeat.joined({heartbeat.HEARTBEAT_FILE: str(path)})
    try:
        for seconds in (3.0, 1.0):
            rank.begin_step()
            rank.enter("forward")
            clock[0] += seconds
            rank.enter("backward")
        found = heartbeat.read(path)
        assert found is not None
        assert (found.steps, found.phase, found.since, found.longest) == (2, "backward", 104.0, 0.0)
        rank.enter("forward")
        found = heartbeat.read(path)
        assert found is not None
        assert found.longest == 3.0
        for _ in range(2 * 64):  # two windows later the slow one is forgotten
            rank.begin_step()
            rank.enter("forward")
            clock[0] += 0.5
            rank.enter("backward")
        rank.enter("forward")
        found = heartbeat.read(path)
        assert found is not None
        assert found.longest == 0.5
        rank.forget()  # before a compilation
        found = heartbeat.read(path)
        assert found is not None
        assert found.longest == 0.0
    finally:
        rank.close()


HANGING = """
import signal, sys, time
from pathlib import Path
from shoal.launch.supervise.heartbeat import Heartbeat

def hang():
    print("there", flush=True)
    time.sleep(60)

if len(sys.argv) > 1:
    rank = Heartbeat(Path(sys.argv[1]))
hang()
"""


@pytest.mark.parametrize("stopped", [False, True], ids=["runs", "stopped"])
def test_the_end_of_a_rank_shows_where_it_was(stopped: bool, tmp_path: Path) -> None:
    path = tmp_path / "heartbeat-0"
    heartbeat.make(path)
    with subprocess.Popen([sys.executable, "-c", HANGING, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        if stopped:
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert "in hang\n" in heartbeat.end(path, process)
        assert process.wait() == -heartbeat.STACKS


def test_who_has_not_begun_shows_nothing(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HANGING], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert heartbeat.end(tmp_path / "heartbeat-0", process) == ""
        assert process.wait() < 0


def test_without_a_launcher_it_does_nothing() -> None:
    rank = Heartbeat.joined({})
    rank.begin_step()
    rank.enter("no phase at all")
