"""Process that ssh starts on each host of a run on several. It starts the host's ranks and reports to the launcher.

The launcher sends lines of JSON: first the ranks to start, later the signals. The process answers in lines of JSON.
When its standard input ends, the launcher is gone, and the process ends itself and its ranks.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO, cast

from shoal.errors import ExitCode, LaunchError, ShoalError
from shoal.hardware.detect import cores
from shoal.launch.environment import Environment
from shoal.launch.local import launch
from shoal.launch.rank_processes import LocalRun, listener_at
from shoal.launch.recovery import Recovery
from shoal.launch.signals import Signals
from shoal.runs.address import working_copy
from shoal.runs.directory import RunDirectory
from shoal.runs.version import __version__


class _Answers(io.TextIOBase):
    """Writer of answers to the launcher. As a text stream, it sends the output of rank 0 as answers."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._lock = stream, threading.Lock()

    def answer(self, **answer: Any) -> None:
        with self._lock:
            self._stream.write(json.dumps(answer) + "\n")
            self._stream.flush()

    def write(self, text: str) -> int:
        self.answer(output=text)
        return len(text)


def main() -> int:
    """Start the ranks that the first line of standard input describes, wait for them and return the exit code."""
    answers = _Answers(sys.stdout)
    asked = json.loads(sys.stdin.readline() or "null")
    if asked is None:
        return int(ExitCode.INTERRUPTED)
    signals = Signals(impatient=False)
    try:
        with signals.handled(), contextlib.ExitStack() as until_end:
            run = _run(asked, answers, until_end)
            threading.Thread(target=_listen, args=(signals,), daemon=True).start()
            code, error, _ = launch(run, signals)
    except ShoalError as caught:
        code, error = int(caught.exit_code), caught
    answers.answer(code=int(code), error=_described(error, asked) if error is not None else None)
    return int(code)


def _run(asked: Mapping[str, Any], answers: _Answers, until_end: contextlib.ExitStack) -> LocalRun:
    """Return this host's run. Raises: LaunchError, with all causes, if this host lacks what the run needs."""
    place = Environment(**asked["place"])
    _refuse_differences(asked)
    answers.answer(fit=True)
    os.chdir(asked["folder"])
    os.environ.update(asked["variables"])
    listener = listener_at(place)
    if listener is not None:
        place = replace(place, port=listener.getsockname()[1])
        answers.answer(port=place.port)
    elif not place.port:  # the launcher sends the port once rank 0's host listens
        place = replace(place, port=int(json.loads(sys.stdin.readline() or "0")))
        if not place.port:
            os._exit(ExitCode.INTERRUPTED)
    address = asked["address"]
    out = Path(asked["out"]) if address is None else until_end.enter_context(working_copy(address))
    return LocalRun(
        asked["arguments"],
        place.local_world_size,
        asked["threads"] or max(1, cores() // place.local_world_size),
        out / "logs",
        stream=cast(TextIO, answers),
        share=place,
        unsaved=Recovery(0, RunDirectory(out)).unsaved_seconds,
        listener=listener,
    )


# Certificates, learning rate schedules and trackers read clocks, and a run compares the times of its files.
MOST_APART_SECONDS = 60.0


def _refuse_differences(asked: Mapping[str, Any]) -> None:
    missing = [f"no folder {path}" for path in _folders(asked) if not Path(path).is_dir()]
    apart = time.time() - float(asked["time"])
    if asked["version"] != __version__:
        missing.append(f"shoal {__version__}, where the command has {asked['version']}")
    if abs(apart) > MOST_APART_SECONDS:
        missing.append(f"a clock that is {abs(apart):.0f} s {'ahead' if apart > 0 else 'behind'}")
    if missing:
        raise LaunchError(
            given=f"host {socket.gethostname()}",
            conflict="it has " + ", ".join(missing),
            remedy="give every host the same files, on a file system that all see, the same versions and time",
        )


def _folders(asked: Mapping[str, Any]) -> list[str]:
    """Return the folders that must exist on every host."""
    return [asked["folder"], *([asked["out"]] if asked["address"] is None else [])]


def _described(error: ShoalError, asked: Mapping[str, Any]) -> dict[str, Any]:
    rank = error.rank if error.rank is not None else int(asked["place"]["rank"])
    host = error.host or socket.gethostname()
    told = {name: getattr(error, name) for name in ("given", "conflict", "remedy")}
    return {"kind": type(error).__name__, **told, "rank": rank, "host": host, "traceback": error.traceback_text}


def _listen(signals: Signals) -> None:
    """Record the signals that the launcher sends. End the process when the launcher is gone."""
    for line in sys.stdin:
        signals.received.append(int(line))
    os._exit(ExitCode.RANK_LOST)  # the ranks die with this process


if __name__ == "__main__":
    sys.exit(main())
