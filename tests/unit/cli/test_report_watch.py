"""`shoal watch` and `shoal report`: what they print and write, of runs that go on, end and vanish."""

import contextlib
import fcntl
import io
import json
import os
import shutil
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.run_folders import RunFolder, one_process

from shoal.cli import report as watching
from shoal.cli.finished_run import Run
from shoal.cli.main import main
from shoal.cli.options import WatchOptions
from shoal.runs.directory import NAME, Patience, claim, is_held

COLUMNS = 40


@contextlib.contextmanager
def terminal(columns: int) -> Iterator[tuple[io.TextIOWrapper, list[bytes]]]:
    """A terminal of so many columns, and what is written to it."""
    reading, writing = os.openpty()
    fcntl.ioctl(writing, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    written: list[bytes] = []

    def drain() -> None:
        with contextlib.suppress(OSError):
            while block := os.read(reading, 1 << 16):
                written.append(block)

    thread = threading.Thread(target=drain)
    thread.start()
    with os.fdopen(writing, "w", encoding="utf-8") as file:
        yield file, written
    thread.join(10)
    os.close(reading)


def going_on(folder: Path) -> RunFolder:
    run = RunFolder(folder)
    run.begins(num_steps=30)
    run.steps(10)
    run.written()
    return run


def on_each_look(monkeypatch: pytest.MonkeyPatch, *acts: Callable[[], None]) -> None:
    """Each pause of `watch` does the next of these."""
    left = list(acts)
    monkeypatch.setattr(watching.time, "sleep", lambda seconds: left.pop(0)())


def test_a_run_is_watched_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = going_on(tmp_path / "run")
    lock = claim(run.path, print)

    def more() -> None:
        run.steps(10)
        run.written()

    def end() -> None:
        run.steps(10)
        run.ends()
        run.written()
        lock.release()

    on_each_look(monkeypatch, more, end)
    with lock:
        assert is_held(run.path)
        assert main(["watch", str(run.path), "--openmetrics", str(tmp_path / "run.prom")]) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[:2] for line in told] == [
        ["run: running", "step 10/30"],
        ["run: running", "step 20/30"],
        ["run: completed", "step 30/30"],
    ]
    assert 'shoal_step{run="run"} 30.0' in (tmp_path / "run.prom").read_text()
    assert not is_held(run.path)


def test_a_run_that_another_host_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = going_on(tmp_path / "run")
    # As a directory shared with that host has it: a lock of no process of this kernel, whose time is renewed.
    holder = {"pid": 1, "host": "elsewhere", "boot": "another", "process_started": 1, "command": "shoal run"}
    lock = run.path / NAME
    lock.write_text(json.dumps({**holder, "since": "2026-01-01 00:00:00 UTC", "token": "its"}))

    def more() -> None:
        run.steps(10)
        run.written()
        os.utime(lock)

    def is_silent() -> None:
        long_ago = time.time() - 2 * Patience().limit_seconds
        os.utime(lock, (long_ago, long_ago))

    on_each_look(monkeypatch, more, is_silent)
    assert main(["watch", str(run.path)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in told[:2]] == ["run: running", "run: running"]
    assert "step 20/30" in told[1]
    assert "running" not in told[-1]


@pytest.mark.parametrize("ending", ["ends", "is deleted", "is interrupted"])
def test_in_a_terminal_of_40_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ending: str
) -> None:
    run = going_on(tmp_path / "run")
    lock = claim(run.path, print)

    def act() -> None:
        if ending == "is interrupted":
            raise KeyboardInterrupt
        if ending == "is deleted":
            shutil.rmtree(run.path)
            return
        run.steps(20)
        run.ends()
        run.written()
        lock.release()

    on_each_look(monkeypatch, lambda: None, act)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    with lock, terminal(COLUMNS) as (file, written), contextlib.redirect_stdout(file):
        assert watching.watch(WatchOptions(run=str(run.path))) == 0
    text = b"".join(written).decode()
    assert "step 10 of 30" in text
    assert ("is gone; that was the last of it" in capsys.readouterr().err) == (ending == "is deleted")
    assert ("run: completed" in text) == (ending == "ends")
    assert "\x1b[?25h" in text  # the cursor is shown again
    rows = text.replace("\x1b", "\n\x1b").splitlines()
    assert max(len(row) for row in rows if not row.startswith("\x1b")) <= COLUMNS


def test_a_look_takes_less_than_a_thousandth_of_a_core() -> None:
    assert watching.pause(0.0) == watching.pause(0.0005) == 2.0
    assert watching.pause(0.004) == pytest.approx(10.0)
    assert watching.pause(1.0) == 15.0


def test_once_prints_and_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = one_process(tmp_path / "run")
    assert main(["watch", str(run.written()), "--once"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "run: completed"
    assert max(map(len, told)) <= 80


def test_watching_writes_nothing_into_the_run(tmp_path: Path) -> None:
    run = one_process(tmp_path / "run")
    before = {path.name: path.stat().st_mtime_ns for path in run.written().iterdir()}
    assert main(["watch", str(run.path), "--once"]) == 0
    assert {path.name: path.stat().st_mtime_ns for path in run.path.iterdir()} == before


def test_no_run_and_no_file_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path)]) == 2
    assert "no run began there" in capsys.readouterr().err
    run = one_process(tmp_path / "run")
    assert main(["watch", str(run.written().parent / "rum")]) == 2
    assert "did you mean" in capsys.readouterr().err
    assert main(["watch", str(run.written()), "--once", "--openmetrics", str(tmp_path / "no" / "file")]) == 2
    assert "it cannot be written" in capsys.readouterr().err
    assert main(["report", str(run.path), "-o", str(tmp_path)]) == 2
    assert "it cannot be written" in capsys.readouterr().err


def test_the_report_writes_a_page_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = one_process(tmp_path / "run")
    assert main(["report", str(run.written())]) == 0
    assert (run.path / "report.html").read_text().startswith("<!DOCTYPE html>")
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith(f"{run.path}: completed after step 100, 16.")
    assert main(["report", str(run.path), str(run.path), "--json"]) == 0
    assert [one["steps"] for one in json.loads(capsys.readouterr().out)] == [100, 100]


def test_a_notebook_shows_the_account(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", name="<b>job</b>")
    run.begins()
    run.steps(10)
    shown = Run(run.written())._repr_html_()
    assert "<b>" not in shown
    assert "&lt;b&gt;job&lt;/b&gt;.py:job" in shown
    assert "killed after step 10" in shown
    assert "of the time went to" in shown
    assert "<svg" in shown
