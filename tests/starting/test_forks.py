"""A fork is to a command under test what an interpreter of its own is: what exec would have set, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests import forks
from tests.usual import parametrize

# What a command sees of its start.
SEEN = """
import json, os, signal, sys, torch
shown = dict(pair.split("=", 1) for pair in open("/proc/self/environ").read().split("\\0") if "=" in pair)
handled = {int(n): str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGCHLD)}
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "name": __name__, "folder": os.getcwd(), "session": os.getsid(0) == os.getpid(),
    "environment": dict(os.environ), "shown": {name: shown.get(name) for name in ("OWN", "HOME")}, "signals": handled,
    "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd") if int(name) < 10)[:3],
    "threads": torch.get_num_threads(), "stdin": sys.stdin.read(),
    "compiler": ["torch._dynamo" in sys.modules, hasattr(torch._dynamo, "optimize"), "torch._dynamo" in sys.modules],
}))
"""


@parametrize("kind", ["-c", "script", "-m"], usual=["-m"])
def test_it_starts_as_after_exec(kind: str, tmp_path: Path) -> None:
    (tmp_path / "seen.py").write_text(SEEN)
    words = {"-c": ["-c", SEEN], "script": ["seen.py"], "-m": ["-m", "seen"]}[kind]
    variables = {"HOME": "/nowhere", "OWN": "é=1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path / "further")}

    def seen(start: type[subprocess.Popen[Any]]) -> dict[str, Any]:
        process = start(
            [sys.executable, *words, "a", "-b"],
            cwd=tmp_path,
            env=variables | {k: v for k, v in os.environ.items() if forks._read_at_start({k: v})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        with process:
            found: dict[str, Any] = json.loads(process.communicate("some text", timeout=60)[0])
        assert process.returncode == 0
        return found

    assert seen(forks.Popen) == seen(subprocess.Popen)


@pytest.mark.parametrize(
    "code",
    [
        *(
            "raise SystemExit(3)",
            "raise SystemExit('words')",
            "1 / 0",
            "import os; os._exit(7)",
            "raise KeyboardInterrupt",
        ),
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
        "import atexit; atexit.register(print, 'at the end')",
    ],
)
def test_it_ends_as_an_interpreter_does(code: str) -> None:
    command = [sys.executable, "-c", code]
    own = forks.run(command, timeout=60)
    other = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (own.returncode, own.stdout) == (other.returncode, other.stdout)
    assert own.stderr.splitlines()[-1:] == other.stderr.splitlines()[-1:]


def test_what_a_fork_starts_is_its_child_and_inherits_what_it_passes() -> None:
    code = """
import os, subprocess, sys
reader, writer = os.pipe()
command = [sys.executable, "-c", "import os, sys; os.write(int(sys.argv[1]), str(os.getppid()).encode())", str(writer)]
child = subprocess.Popen(command, pass_fds=[writer], start_new_session=True)
os.close(writer)
print(child.wait(), int(os.read(reader, 100)) == os.getpid(), type(child).__name__)
"""
    assert forks.run([sys.executable, "-c", code], timeout=60).stdout == "0 True _Forked\n"


def test_a_signal_and_a_limit_reach_it() -> None:
    with forks.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        began = time.monotonic()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == -signal.SIGTERM
        assert time.monotonic() - began < 30


def test_what_only_an_interpreter_reads_at_its_start_takes_one() -> None:
    command = [sys.executable, "-c", "import sys; print('torch' in sys.modules)"]
    assert forks.run(command, timeout=60).stdout == "True\n"
    assert forks.run(command, timeout=60, env={**os.environ, "PYTHONHASHSEED": "0"}).stdout == "False\n"
    assert forks.run(command, timeout=60, env={**os.environ, "SHOAL_TESTS_FRESH": "1"}).stdout == "False\n"


def test_a_sitecustomize_sees_the_import_of_torch(tmp_path: Path) -> None:
    """As the observer of `shoal verify --script` does."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nprint('torch' in sys.modules)")
    command = [sys.executable, "-c", "import torch, sys; print(torch.ones(1).item(), 'torch' in sys.modules)"]
    own = forks.run(command, timeout=60, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert own.stdout.split() == ["False", "1.0", "True"], own.stderr
