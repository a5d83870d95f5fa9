"""When spare processes are started, and how much memory there is for them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.launch import heartbeat, spares
from shoal.launch.heartbeat import Heartbeat
from shoal.launch.spares import AFTER_SECONDS, Spares, _left_in_groups

PLENTY = 1 << 40


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    class Made:
        def __init__(self, run: object, **named: Any) -> None:
            found.append(named)

        def close(self) -> None: ...

    monkeypatch.setattr(spares, "Start", Made)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    return found


def worker(folder: Path, steps: int) -> Any:
    path = folder / "heartbeat"
    heartbeat.make(path)
    beats = Heartbeat(path)
    for _ in range(steps):
        beats.begin_step()
        beats.enter("forward")
    beats.close()
    return SimpleNamespace(heartbeat=path)


def test_after_a_while_of_training_and_then_at_once(started: list[dict[str, Any]], tmp_path: Path) -> None:
    clock = [1.0]
    held = Spares(True, clock=lambda: clock[0], available=lambda: PLENTY)
    run: Any = SimpleNamespace(num_processes=2)
    trains = worker(tmp_path, 3)
    for seconds in (0.0, 1.0, AFTER_SECONDS - 1.0):
        clock[0] = 1.0 + seconds
        held.tend(run, [trains])
        assert not started
    clock[0] += 2.0
    held.tend(run, [trains])
    held.tend(run, [trains])
    assert started == [{"waits": True}]
    held.take(run)
    clock[0] += 1.0
    held.tend(run, [worker(tmp_path, 1)])
    assert len(started) == 1, "their first step is not done"
    clock[0] += 1.0
    held.tend(run, [worker(tmp_path, 2)])
    assert len(started) == 2


@pytest.mark.parametrize("reason", ["restarts", "memory", "port"])
def test_none(reason: str, started: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run that has no other start, on a host with little memory, and where the user has chosen the port."""
    if reason == "port":
        monkeypatch.setenv("MASTER_PORT", "29500")
    held = Spares(reason != "restarts", available=lambda: 1 << 30 if reason == "memory" else PLENTY, _lost=True)
    held.tend(SimpleNamespace(num_processes=2), [worker(tmp_path, 3)])  # type: ignore[arg-type]
    assert not started


@pytest.mark.parametrize(
    ("membership", "place", "files"),
    [
        ("0::/job/step", "job", ("memory.max", "memory.current")),
        ("5:memory:/job\n0::/", "memory/job", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    ],
    ids=["version 2", "version 1"],
)
def test_the_memory_of_a_control_group(membership: str, place: str, files: tuple[str, str], tmp_path: Path) -> None:
    """Of any that the process is in; "max" is no limit."""
    (tmp_path / "own").write_text(membership)
    root = tmp_path / "root"
    (root / "job" / "step").mkdir(parents=True)
    (root / "job" / "step" / "memory.max").write_text("max\n")
    (root / place).mkdir(parents=True, exist_ok=True)
    for name, value in zip(files, (1000, 300), strict=True):
        (root / place / name).write_text(f"{value}\n")
    assert list(_left_in_groups(tmp_path / "own", root)) == [700]
    assert list(_left_in_groups(tmp_path / "nothing", root)) == []
