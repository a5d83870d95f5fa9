"""Which rank is taken for stuck, and after how long; clock and heartbeats are made up, the stopped process is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.launch.supervise import heartbeat
from shoal.launch.supervise.heartbeat import Watch
from shoal.launch.supervise.recovery import Recovery
from shoal.runs.directory import RunDirectory

LIVING = {0: os.getpid(), 1: os.getpid()}


def says(path: Path, steps: int, phase: str, since: float, longest: float) -> None:
    """As the rank would write it."""
    number = heartbeat.PHASES.index(phase)
    seconds = [longest if place == number else 0.0 for place in range(len(heartbeat.PHASES))]
    none = [0.0] * len(seconds)
    path.write_bytes(
        heartbeat._NOW.pack(steps, number, since) + heartbeat._LONGEST.pack(*seconds) + heartbeat._LONGEST.pack(*none)
    )


Silence = Callable[..., list[tuple[int, float]]]


@pytest.fixture
def alarms(tmp_path: Path) -> Silence:
    """The ranks of the first alarm and when it came, where both ranks say nothing any more from second 100 on."""

    def alarms(
        *ranks: tuple[int, str, float], unsaved: float = 0.0, excused: dict[str, float] | None = None
    ) -> list[tuple[int, float]]:
        now = [100.0]
        paths = {rank: tmp_path / f"heartbeat-{rank}" for rank in range(len(ranks))}
        for rank, (steps, phase, longest) in enumerate(ranks):
            says(paths[rank], steps, phase, 100.0, longest)
        watch = Watch(paths, lambda: unsaved + now[0] - 100.0, clock=lambda: now[0], excused=excused or {})
        while now[0] < 1000.0:
            found = watch.look(LIVING)
            if found:
                return [(rank, round(now[0] - 100.0)) for rank in found]
            now[0] += 0.3
        return []

    return alarms


def test_who_waits_for_others_is_not_blamed(alarms: Silence) -> None:
    assert alarms((7, "data_wait", 0.01), (7, "exposed_communication", 0.01)) == [(0, 5)]
    assert alarms((7, "backward", 0.01), (6, "forward", 0.01)) == [(1, 5)], "it is behind"


def test_who_waits_for_a_rank_of_another_host_is_not_blamed(tmp_path: Path) -> None:
    found = []
    for all_here in (True, False):
        says(tmp_path / "heartbeat", 7, "exposed_communication", 100.0, 0.1)
        now = iter(100.0 + 0.3 * n for n in range(200))
        watch = Watch({0: tmp_path / "heartbeat"}, lambda: 0.0, clock=lambda now=now: next(now), all_here=all_here)
        found.append(any(watch.look(LIVING) for _ in range(90)))
    assert found == [True, False]


def test_all_that_wait_are_named(alarms: Silence) -> None:
    assert alarms((7, "exposed_communication", 0.1), (7, "exposed_communication", 0.1)) == [(0, 5), (1, 5)]


@pytest.mark.parametrize(
    ("phase", "longest", "more", "after"),
    [
        ("forward", 20.0, {}, 60),
        ("forward", 0.0, {}, 600),  # a first step
        ("forward", 0.1, {"unsaved": 30.0}, 30),
        ("forward", 0.1, {"excused": {"forward": 10.0}}, 40),
    ],
)
def test_how_long_is_waited(phase: str, longest: float, more: dict[str, object], after: int, alarms: Silence) -> None:
    found = alarms((7, phase, longest), (7, "exposed_communication", 0.0), **more)
    assert found == [(0, pytest.approx(after, abs=1))]


@pytest.mark.parametrize("phase", ["away", "checkpoint"])
def test_a_disk_takes_as_long_as_it_likes(phase: str, alarms: Silence) -> None:
    assert alarms((7, phase, 0.1), (7, "exposed_communication", 0.1)) == []


def test_the_launchers_own_pause_counts_for_nobody(tmp_path: Path) -> None:
    now = [100.0]
    paths = {rank: tmp_path / f"heartbeat-{rank}" for rank in range(2)}
    for path in paths.values():
        says(path, 7, "forward", 100.0, 0.1)
    watch = Watch(paths, lambda: 0.0, clock=lambda: now[0])
    assert watch.look(LIVING) == {}
    now[0] += 60.0
    assert watch.look(LIVING) == {}
    now[0] += 0.9
    assert watch.look(LIVING) == {}


def test_a_clock_that_jumps_raises_no_alarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A year ahead and back, of the rank's own clock, of the wall clock and of the file server that has checkpoints."""
    path, now = tmp_path / "heartbeat-0", [100.0]
    monkeypatch.setattr("time.time", lambda: pytest.fail("nobody asks for the date"))
    directory = RunDirectory(tmp_path)
    recovery = Recovery(1, directory, clock=lambda: now[0])
    watch = Watch({0: path}, recovery.unsaved_seconds, clock=lambda: now[0])
    for jump in (0.0, 3e7, -6e7, 3e7):
        directory.saved.write_text("{}")
        os.utime(directory.saved, (1e9 + jump, 1e9 + jump))
        says(path, 7, "forward", 1e8 + jump, 0.1)
        now[0] += 0.3
        assert watch.look(LIVING) == {}
        assert recovery.unsaved_seconds() == 0.0
    while not watch.look(LIVING):
        now[0] += 0.3
    assert now[0] - 101.2 == pytest.approx(5.0, abs=0.7), "a rank that hangs is noticed as at other times"


def test_who_is_stopped_is_not_said_to_hang(tmp_path: Path) -> None:
    """Both are noticed after five seconds; a launcher that had no time at first has the hang's five sooner."""
    path, now = tmp_path / "heartbeat-0", [100.0]
    says(path, 7, "forward", 100.0, 0.1)
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    try:
        watch = Watch({0: path}, lambda: 0.0, clock=lambda: now[0])
        assert watch.look({0: process.pid}) == {}
        for _ in range(4):
            now[0] += 0.9
            assert watch.look({0: process.pid}) == {}
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        found: dict[int, str] = {}
        while not found and now[0] < 120.0:
            now[0] += 0.9
            found = watch.look({0: process.pid})
        assert [reason.split(" for")[0] for reason in found.values()] == ["was stopped (SIGSTOP)"]
    finally:
        process.kill()
        process.wait()


def test_a_stopped_process() -> None:
    now = [100.0]
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    try:
        watch = Watch({0: Path("none")}, lambda: 0.0, clock=lambda: now[0])
        assert watch.look({0: process.pid}) == {}
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        for _ in range(19):
            now[0] += 0.3
            found = watch.look({0: process.pid})
        assert list(found) == [0]
        assert "SIGSTOP" in found[0]
        os.kill(process.pid, signal.SIGCONT)
        os.waitid(os.P_PID, process.pid, os.WCONTINUED)
        now[0] += 0.3
        assert watch.look({0: process.pid}) == {}
    finally:
        process.kill()
        process.wait()
