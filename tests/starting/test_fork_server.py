"""When a process may be copied, and what a copy takes over; tests/faults shows that ranks are copies."""

from __future__ import annotations

import ast
import signal
import sys
from pathlib import Path

import pytest
from tests import forks

THREAD = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
GPU = (
    "from pathlib import Path; from shoal.launch.supervise import fork_server as server; "
    "server.GPU_FOLDER = Path('/dev/null')"
)
LOADED = """
from types import SimpleNamespace
from shoal.launch.supervise.fork_server import _loaded
{before}
def load():
    {then}
print(_loaded(load))
"""


@pytest.mark.parametrize(
    ("before", "then", "may"),
    [
        ("", "import torch", True),
        (THREAD, "import torch", False),
        ("", THREAD, False),
        ("", "import torch; torch.cuda._initialized = True", False),
        (GPU, "import torch; torch.cuda._is_in_bad_fork = lambda: True", False),
        (GPU, "import torch", True),
    ],
    ids=[
        "as it is",
        "a thread from before",
        "a thread of what is loaded",
        "CUDA",
        "a GPU asked for",
        "a GPU",
    ],
)
def test_what_may_be_copied(before: str, then: str, may: bool) -> None:
    command = [sys.executable, "-c", LOADED.format(before=before, then=then)]
    assert forks.run(command, timeout=60).stdout == f"{may}\n"


# A launcher, and ranks that say what they are given: by files, since both are Python commands of their own.
RANKS = """
import os, signal, socket, subprocess, sys, time
from shoal.launch.supervise import fork_server
from shoal.launch.supervise.fork_server import FORK_FD, ForkServer

if FORK_FD in os.environ:
    fork_server.become_rank(lambda: __import__("torch"), holds_signals=False)
    import random, numpy
    with os.fdopen(int(os.environ["HANDED"]), "w") as file:
        print(os.environ["OWN"], os.getsid(0) == os.getpid(), random.random(), numpy.random.random(), file=file)
    print("printed")
    if os.environ["OWN"] == "waits":
        time.sleep(60)
    raise SystemExit(3)

def command(arguments, variables, descriptors, output):
    numbers = {name: str(number) for name, number in descriptors.items()}
    return subprocess.Popen(
        [sys.executable, "-c", "import os; CODE = os.environ['CODE']; exec(CODE)"],
        env={**os.environ, **variables, **numbers, "SHOAL_LAUNCHER_PID": str(os.getpid()), "CODE": CODE},
        pass_fds=list(descriptors.values()),
    )

fork_server.fresh_interpreter = command
server = ForkServer([], 1)
assert server.until_loaded(lambda: False)
told = []
for own in ("first", "second", "waits"):
    handed, output = [open(f"{own}-{name}", "w+") for name in ("handed", "output")]
    rank = server.start({"OWN": own}, {"HANDED": handed.fileno()}, output.fileno())
    if own == "waits":
        while not handed.read():
            handed.seek(0)
        rank.send_signal(signal.SIGTERM)
    code = rank.wait(30)
    texts = []
    for file in (handed, output):
        file.seek(0)
        texts.append(file.read().split())
    told.append([code, rank.poll(), *texts])
print(told)
server.close()
assert server.start({}, {}, None) is None
"""


def test_a_copy_is_what_a_fresh_interpreter_would_be(tmp_path: Path) -> None:
    """Its variables, descriptors, output, session, random numbers, signals and end."""
    ended = forks.run([sys.executable, "-c", f"CODE = {RANKS!r}\nexec(CODE)"], timeout=60, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    first, second, last = ast.literal_eval(ended.stdout)
    assert [one[0] for one in (first, second, last)] == [3, 3, -signal.SIGTERM]
    assert all(code == again for code, again, *_ in (first, second, last))
    assert [one[2][:2] for one in (first, second, last)] == [[name, "True"] for name in ("first", "second", "waits")]
    assert len({number for one in (first, second, last) for number in one[2][2:]}) == 6, "each draws its own"
    assert [one[3] for one in (first, second)] == [["printed"], ["printed"]]
