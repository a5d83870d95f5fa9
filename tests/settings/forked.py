"""Commands of shoal in forked children of one process that has imported everything: tens of milliseconds, not seconds.

Reads a JSON request a line, `{"ranks": 2, "argv": [...], "folder": ..., "environment": {...}}`, and answers each with
the exit codes by rank. Ranks are those of a launcher of another make, as torchrun is: they find each other by the
environment. With `loop` instead of `argv` the ranks run that loop of `subject.py`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import secrets
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LIMIT_SECONDS = 60.0
_LOADED = (
    *(
        "shoal.cli.main",
        "shoal.cli.run.train",
        "shoal.training.session",
        "shoal.parallel.shard.zero23",
        "shoal.parallel.pipeline.pipeline",
    ),
    *(
        "shoal.parallel.data.pushed",
        "shoal.parallel.sequence.context_parallel",
        "shoal.parallel.tensor.tensor_parallel",
    ),
    *(
        "shoal.training.parameter_server.members",
        "shoal.training.parameter_server.conductor",
        "shoal.cli.verify",
        "shoal.cli.plan",
    ),
)


def main() -> None:
    """Serves until the input ends."""
    sys.path[:0] = [str(HERE), str(HERE.parent / "jobs")]
    for name in _LOADED:
        importlib.import_module(name)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(served(json.loads(line))), flush=True)


def served(request: dict[str, Any]) -> list[int]:
    """The exit codes by rank; -9 for those that were not done in time."""
    folder, ranks = Path(request["folder"]), request["ranks"]
    key = secrets.token_hex(32)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        children: dict[int, int] = {}
        for rank in range(ranks):
            variables = dict(request["environment"])
            if ranks > 1:
                numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
                variables |= {name: str(number) for name, number in numbers.items()}
                variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "SHOAL_RUN_KEY": key}
                if rank == 0:
                    variables["SHOAL_LISTEN_FD"] = str(listener.fileno())
            pid = os.fork()
            if not pid:
                _child(request, folder, rank, variables)
            children[pid] = rank
    return _ended(children, ranks)


def _ended(children: dict[int, int], ranks: int) -> list[int]:
    codes, deadline = [-signal.SIGKILL] * ranks, time.monotonic() + LIMIT_SECONDS
    while children and time.monotonic() < deadline:
        for pid in list(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[children.pop(pid)] = os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return codes


def _child(request: dict[str, Any], folder: Path, rank: int, variables: dict[str, str]) -> None:
    code = 1
    try:
        os.chdir(folder)
        os.environ.update(variables, PYTHONPATH=str(HERE.parent / "jobs"))  # for ranks that the command starts
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(f"{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        code = (
            _loop(request["loop"])
            if request["loop"] is not None
            else importlib.import_module("shoal.cli.main").main(request["argv"])
        )
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _loop(name: str) -> int:
    """A loop of one's own; what shoal refuses is told as the command does."""
    from shoal.errors import ShoalError

    try:
        importlib.import_module("subject").loop(name)
    except ShoalError as error:
        print(error.render(), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    main()
