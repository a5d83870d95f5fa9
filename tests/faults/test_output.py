"""Nobody reads what a run prints any more: it trains to its end all the same."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest
from tests.launching import JOBS, TIME_LIMIT_SECONDS, Gate, Run, start_command
from tests.usual import parametrize

pytestmark = pytest.mark.faults

JOB = f"{JOBS / 'tiny.py'}:job"
PRINTING = """
import sys
sys.path.insert(0, {folder!r})
import tiny

def loss(model, batch):
    print("a line of the job's own", flush=True)
    return tiny.classify(model, batch)

def job():
    return tiny.mlp(loss=loss)
"""


def assert_completed(out: Path) -> None:
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    assert (result["status"], result["steps"]) == ("completed", 16)


CASES = [(1, "| head -n 1"), (2, "| head -n 1"), (2, "> /dev/full"), (1, ">&-")]


@parametrize(("devices", "to"), CASES, ids=["pipe-1", "pipe-2", "full-2", "closed-1"], usual=["closed-1"])
def test_stdout_and_stderr_take_no_more(devices: int, to: str, tmp_path: Path) -> None:
    job, out, code = tmp_path / "printing.py", tmp_path / "run", tmp_path / "code"
    job.write_text(PRINTING.format(folder=str(JOBS)), encoding="utf-8")
    command = " ".join(Run(job, out, devices).command)
    redirected = f"{to} 2>&-" if to == ">&-" else f"2>&1 {to}" if to.startswith("|") else f"{to} 2>&1"
    shell = ["sh", "-c", f"({command}; echo $? > {code}) {redirected}"]
    with start_command(shell, out, fresh=True) as started:
        started.wait().expect(0)
    assert code.read_text(encoding="ascii").strip() == "0"
    assert_completed(out)


@pytest.mark.slow
def test_the_terminal_is_gone(tmp_path: Path) -> None:
    """A terminal that is closed sends SIGHUP to whom it controls; here the run has no controlling terminal."""
    out, gate = tmp_path / "run", Gate(tmp_path / "gate", 3)
    master, slave = pty.openpty()
    os.set_blocking(master, False)
    command = Run(JOB, out, 1, environment={**os.environ, **gate.environment})
    with subprocess.Popen(
        command.command,
        env={k: v for k, v in command.environment.items() if k not in ("CI", "NO_COLOR")} | {"TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    ) as process:
        os.close(slave)
        try:
            while not gate.reached(1):
                assert process.poll() is None
                with contextlib.suppress(BlockingIOError):
                    os.read(master, 1 << 16)
                time.sleep(0.01)
            os.close(master)
            gate.open()
            assert process.wait(TIME_LIMIT_SECONDS) == 0
        finally:
            process.kill()
    assert_completed(out)


def test_an_interrupt_at_a_terminal(tmp_path: Path) -> None:
    """Ctrl-C goes to every process of the terminal's foreground group: one request to stop, told in words."""
    out, gate = tmp_path / "run", Gate(tmp_path / "gate", 3)
    master, slave = pty.openpty()
    before, shown = termios.tcgetattr(slave), bytearray()

    def show() -> None:
        with contextlib.suppress(OSError):  # as it ends once nobody has the other end
            while True:
                shown.extend(os.read(master, 1 << 16))

    # The first terminal that the leader of a session opens is the one that controls it.
    opens = ["sh", "-c", f'exec "$@" <{os.ttyname(slave)} >{os.ttyname(slave)} 2>&1', "sh"]
    shows = threading.Thread(target=show)
    shows.start()
    try:
        with start_command([*opens, *Run(JOB, out, 1).command], out, gate.environment | {"TERM": "xterm"}) as started:
            started.until(lambda: gate.reached(1), "the gate")
            os.write(master, b"\x03")
            started.until(lambda: b"^C" in shown, "the terminal's echo, which comes after the signal")
            gate.open()
            started.wait().expect(75)
        assert termios.tcgetattr(slave) == before
    finally:
        os.close(slave)
        shows.join()
        os.close(master)
    assert b"Traceback" not in shown
    assert b"--resume" in shown
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    assert (result["status"], result["steps"]) == ("preempted", 4)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_line_is_there_before_the_command_ends(unbuffered: str) -> None:
    code = "import os, sys; from shoal.cli.main import unfailing_output as u; c = u(); c.__enter__()"
    command = [sys.executable, "-c", f"{code}; print('told', file=sys.stderr); os._exit(0)"]
    variables = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    assert subprocess.run(command, env=variables, stderr=subprocess.PIPE, check=True).stderr == b"told\n"
