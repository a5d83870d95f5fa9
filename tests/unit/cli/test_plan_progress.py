"""The line that says what a plan is doing."""

from __future__ import annotations

import subprocess
import sys
import time
from io import StringIO

import pytest

from shoal.cli import plan
from shoal.cli.plan import PlanProgress


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def until(stream: StringIO, words: str) -> None:
    while words not in stream.getvalue():
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [Terminal(), StringIO()])
def test_a_short_plan_shows_nothing(stream: StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_QUIET_SECONDS", 600.0)
    with PlanProgress(stream) as progress:
        progress.step()
    assert stream.getvalue() == ""


def test_torch_is_loaded_where_progress_is_said() -> None:
    said = "import sys, shoal.cli.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", said], check=False).returncode == 0


def test_a_file_has_a_line_for_what_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_QUIET_SECONDS", 0.01)
    monkeypatch.setattr(plan, "_FILE_SECONDS", 0.01)
    stream = StringIO()
    with PlanProgress(stream) as progress:
        until(stream, "loading the job (0 s) ...\n")
        progress.enter("searching")
        progress.step()
        until(stream, "searching: 1 groups of plans (")
    assert "\r" not in stream.getvalue()


def test_on_a_terminal_it_is_renewed_in_place_and_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_QUIET_SECONDS", 0.01)
    stream = Terminal()
    with PlanProgress(stream):
        until(stream, "\rloading the job (0 s)")
    assert stream.getvalue().endswith(f"\r{' ' * len('loading the job (0 s)')}\r")
    assert "\n" not in stream.getvalue()
