"""Whom the launcher ends, and whom it asks to end first; the processes and the clock are made up."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal.errors import ExitCode
from shoal.launch.signals import Signals
from shoal.launch.supervise import ranks
from shoal.launch.supervise.heartbeat import Watch
from shoal.launch.supervise.ranks import RankProcess, _watch


class Process:
    """Ends with a code so many seconds after SIGTERM, where it takes note of that at all."""

    def __init__(self, clock: list[float], code: int | None = None, saves: float | None = None) -> None:
        self.clock, self.returncode, self.saves = clock, code, saves
        self.told: list[tuple[int, float]] = []
        self.ends, self.pid = float("inf"), 0

    def poll(self) -> int | None:
        if self.returncode is None and self.clock[0] >= self.ends:
            self.returncode = ExitCode.PREEMPTED
        return self.returncode

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        self.told.append((number, self.clock[0]))
        if number == signal.SIGKILL:
            self.returncode = -number
        elif self.saves is not None:
            self.ends = self.clock[0] + self.saves


def watched(monkeypatch: pytest.MonkeyPatch, saves: float | None) -> tuple[RankProcess, RankProcess]:
    """Rank 0 and a worker that is well, after the other worker has died for good."""
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    processes = Process(clock, saves=saves), Process(clock, code=-9), Process(clock)
    workers = [RankProcess(rank, process, Path("none"), None, Path("none")) for rank, process in enumerate(processes)]  # type: ignore[arg-type]
    start = SimpleNamespace(workers=workers, run=SimpleNamespace(replaceable=range(1, 3)), again=lambda rank: None)
    _watch(start, Signals(impatient=False), Watch({}, lambda: 0.0))  # type: ignore[arg-type]
    return workers[0], workers[2]


def test_a_conductor_that_is_well_is_asked_to_end_and_may_save(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, other = watched(monkeypatch, saves=20.0)
    assert leader.process.returncode == ExitCode.PREEMPTED
    assert [number for number, _ in leader.process.told] == [signal.SIGTERM]  # type: ignore[attr-defined]
    ((number, at),) = other.process.told  # type: ignore[attr-defined]
    assert number == signal.SIGKILL
    assert at > 20.0, "what the conductor waits for may be another worker's"
    assert leader.given_up


def test_a_rank_that_the_launcher_ended_is_not_said_to_have_been_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, _ = watched(monkeypatch, saves=None)
    monkeypatch.setattr(leader.process, "wait", leader.process.poll, raising=False)
    assert leader.loss({}).conflict.startswith("the launcher ended it")
    leader.given_up = False
    assert leader.loss({}).conflict.startswith("it was killed by SIGKILL without a word")


def test_a_conductor_that_is_asked_in_vain_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, _ = watched(monkeypatch, saves=None)
    (asked, first), (ended, second) = leader.process.told  # type: ignore[attr-defined]
    assert (asked, ended) == (signal.SIGTERM, signal.SIGKILL)
    assert second - first > ranks._PATIENCE_SECONDS
