"""Work in a child process: its value comes back, its death is told, a signal ends it."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ExitCode, LaunchError
from shoal.launch.supervise.child import in_child


@pytest.fixture(autouse=True)
def no_child_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of those that a test forks. Others may be there: tests that ran before have started a server of forks."""
    pids, fork = [], os.fork

    def noted() -> int:
        pids.append(fork())
        return pids[-1]

    monkeypatch.setattr(os, "fork", noted)
    yield
    assert pids
    for pid in pids:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_the_value_comes_back_from_another_process() -> None:
    here = os.getpid()
    found = in_child(lambda: {"pid": os.getpid(), "text": "x" * 200_000})
    assert found["pid"] != here
    assert len(found["text"]) == 200_000
    assert in_child(dict) == {}


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_death_is_told() -> None:
    def die() -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    with pytest.raises(LaunchError, match="ended with code -9"):
        in_child(die)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_what_it_raises_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LaunchError, match="ended with code 1"):
        in_child(lambda: {"half": 1 / 0})
    assert "ZeroDivisionError" in capfd.readouterr().err


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_signal_ends_it(tmp_path: Path) -> None:
    def sleep() -> None:
        (tmp_path / "began").touch()
        time.sleep(60)

    def interrupt() -> None:
        while not (tmp_path / "began").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(SystemExit) as stop:
        in_child(sleep)  # type: ignore[arg-type]
    thread.join()
    assert stop.value.code == ExitCode.INTERRUPTED
    assert signal.getsignal(signal.SIGTERM) is before
