"""Progress of a run in a terminal and in a pipe."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.launching import JOBS, unlaunched

from shoal.cli.run.console import Live, Pace, Plain, choose_reporter
from shoal.runs.records import Spread


def record(step: int, memory_bytes: int, most: int = 0) -> Any:
    ranks = {"memory_bytes": Spread(0, most, 1)} if most else {}
    found = {"step": step, "loss": 0.5, "num_samples": 16, "seconds": 0.1, "skipped": None, "metrics": None}
    return SimpleNamespace(**found, memory_bytes=memory_bytes, ranks=ranks)


def test_a_line_has_the_most_memory_so_far() -> None:
    pace = Pace(0, 10, 2)
    assert "peak 1.50 GiB  slowest rank 1" in pace.line(record(1, 2**30, most=3 * 2**29), 1)
    assert "peak 1.50 GiB" in pace.line(record(2, 2**20), 1)
    assert "peak" not in Pace(0, 10, 1).line(record(1, 0), 0)  # without telemetry nothing is measured


def test_a_bar_in_the_room_that_there_is() -> None:
    pace = Pace(0, 8, 1)
    assert pace.bar(record(4, 0), 100) == "━" * 10 + "─" * 10 + "  50%  "
    assert pace.bar(record(8, 0), 17) == "━" * 10 + " 100%  "
    assert pace.bar(record(9, 0), 17) == "━" * 10 + " 100%  "  # --steps beyond
    assert pace.bar(record(4, 0), 8) == ""


def test_who_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal, unless CI, NO_COLOR or TERM=dumb says otherwise."""
    for name in ("CI", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert type(choose_reporter(0, Pace(0, 1, 1))) is Plain  # pytest's output is no terminal
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    live = choose_reporter(0, Pace(0, 1, 1))
    live.close()
    assert type(live) is Live
    for name, value in (("NO_COLOR", "1"), ("CI", "true"), ("TERM", "dumb")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert type(choose_reporter(0, Pace(0, 1, 1))) is Plain


@pytest.mark.slow
def test_a_real_terminal(tmp_path: Path) -> None:
    """One line is drawn again and again; with NO_COLOR there are plain lines."""

    def shown(**variables: str) -> str:
        ours, theirs = pty.openpty()
        usual = {name: value for name, value in unlaunched(os.environ).items() if name not in ("CI", "NO_COLOR")}
        command = [sys.executable, "-m", "shoal", "run", str(JOBS / "tiny.py"), "--out", str(tmp_path / str(variables))]
        environment = {**usual, "TERM": "xterm", "COLUMNS": "120", **variables}
        process = subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL, env=environment)
        os.close(theirs)
        text = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the other side is closed
                break
            text += part
        os.close(ours)
        assert process.wait(60) == 0
        return text.decode()

    drawn = shown()
    assert "\x1b[2K" in drawn
    assert "━" * 20 + " 100%  step 16/16  loss " in drawn
    assert "GiB" in drawn
    plain = shown(NO_COLOR="1")
    assert "\x1b" not in plain
    assert "step 16/16  loss " in plain
