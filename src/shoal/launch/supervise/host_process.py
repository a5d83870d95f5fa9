"""Process that ssh starts on each host of a run on several. It starts the host's ranks and reports to the launcher.

The launcher sends lines of JSON: first the ranks to start, later the signals. The process answers in lines of JSON, at
least once a second, whatever its ranks do. It announces a pause (Ctrl-Z) before it stops. When its standard input ends,
the launcher is gone, and the process ends itself and its ranks.

With the argument "ports" the process listens on two ports that the system chooses, tries those of other hosts, and
reports which it reaches. With "cluster" it reports its devices, links and memory, and the speed of its network.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO, cast

from shoal.errors import ExitCode, LaunchError, ShoalError
from shoal.hardware.detect import cores, here, network_gigabits
from shoal.hardware.values import to_table
from shoal.launch.environment import Environment
from shoal.launch.signals import Signals
from shoal.launch.supervise.ranks import LocalRun, launch, listener_at
from shoal.launch.supervise.recovery import Recovery
from shoal.runs.address import working_copy
from shoal.runs.directory import RunDirectory
from shoal.runs.version import __version__

# Certificates, learning rate schedules and trackers read clocks, and a run compares the times of its files.
MOST_APART_SECONDS = 60.0
NUM_PORTS = 2
_REACH_SECONDS = 4.0
# The same for rank 0's store, which every start waits for.
_STORE_SECONDS = 2.5
_BEAT_SECONDS = 1.0


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

    def beat(self) -> None:
        """Answer each second until the launcher is gone."""
        with contextlib.suppress(OSError, ValueError):
            while True:
                self.answer(alive=True)
                time.sleep(_BEAT_SECONDS)


def main() -> int:
    """Start the ranks that the first line of standard input describes, wait for them and return the exit code."""
    answers = _Answers(sys.stdout)
    message = json.loads(sys.stdin.readline() or "null")
    if message is None:
        return int(ExitCode.INTERRUPTED)
    signals = Signals(impatient=False)
    threading.Thread(target=answers.beat, daemon=True).start()
    try:
        with signals.handled(), contextlib.ExitStack() as until_end:
            place, address = Environment(**message["place"]), message["address"]
            refuse_differences(message)
            answers.answer(fit=True)
            os.chdir(message["folder"])
            os.environ.update(message["variables"])
            listener = listener_at(place)
            if listener is not None:
                place = replace(place, port=listener.getsockname()[1])
                answers.answer(port=place.port)
            elif not place.port:  # the launcher sends the port once rank 0's host listens
                place = replace(place, port=int(json.loads(sys.stdin.readline() or "0")))
                if not place.port:
                    os._exit(ExitCode.INTERRUPTED)
                why = _why_not_reached((place.address, place.port), _STORE_SECONDS)
                if why:
                    raise LaunchError(
                        given=f"host {socket.gethostname()}",
                        conflict=f"it does not reach rank 0's store at {place.address}:{place.port}: {why}",
                        remedy="mend the network between the hosts; shoal doctor --hosts tries every pair of them",
                    )
            out = Path(message["out"]) if address is None else until_end.enter_context(working_copy(address))
            run = LocalRun(
                message["arguments"],
                place.local_world_size,
                message["threads"] or max(1, cores() // place.local_world_size),
                out / "logs",
                stream=cast(TextIO, answers),
                share=place,
                unsaved=Recovery(0, RunDirectory(out)).unsaved_seconds,
                listener=listener,
                announce=lambda paused: answers.answer(paused=paused),
            )
            threading.Thread(target=_listen, args=(signals,), daemon=True).start()
            code, error, _ = launch(run, signals)
    except ShoalError as caught:
        code, error = int(caught.exit_code), caught
    described = None
    if error is not None:
        beats = {name: getattr(error, name) for name in ("given", "conflict", "remedy")}
        rank = error.rank if error.rank is not None else int(message["place"]["rank"])
        where = {"rank": rank, "host": error.host or socket.gethostname()}
        described = {"kind": type(error).__name__, **beats, **where, "traceback": error.traceback_text}
    answers.answer(code=int(code), error=described)
    return int(code)


def refuse_differences(message: Mapping[str, Any]) -> None:
    """Raise LaunchError, with all causes, if this host differs from the launcher's in folders, version or clock."""
    folders = [message["folder"], *([message["out"]] if message["address"] is None else [])]
    missing = [f"no folder {path}" for path in folders if not Path(path).is_dir()]
    apart = time.time() - float(message["time"])
    if message["version"] != __version__:
        missing.append(f"shoal {__version__}, where the command has {message['version']}")
    if abs(apart) > MOST_APART_SECONDS:
        missing.append(f"a clock that is {abs(apart):.0f} s {'ahead' if apart > 0 else 'behind'}")
    if missing:
        raise LaunchError(
            given=f"host {socket.gethostname()}",
            conflict="it has " + ", ".join(missing),
            remedy="give every host the same files, on a file system that all see, the same versions and time",
        )


def _listen(signals: Signals) -> None:
    """Record the signals that the launcher sends. End the process when the launcher is gone."""
    for line in sys.stdin:
        signals.takes(int(line), from_launcher=True)
    os._exit(ExitCode.RANK_LOST)  # the ranks die with this process


# ---------------------------------------------------------------------------------------------------- ports


def try_ports() -> int:
    """Exchange ports, and which of them can be reached, with the process that started this one."""
    both = socket.has_dualstack_ipv6()
    family, place = (socket.AF_INET6, "::") if both else (socket.AF_INET, "0.0.0.0")  # noqa: S104  (that is asked)
    # Nobody answers the connections: the system accepts them.
    listening = [
        socket.create_server((place, 0), family=family, backlog=128, dualstack_ipv6=both) for _ in range(NUM_PORTS)
    ]
    print(json.dumps([listener.getsockname()[1] for listener in listening]), flush=True)
    places = json.loads(sys.stdin.readline() or "[]")
    if places:
        with ThreadPoolExecutor(min(32, len(places))) as pool:
            print(json.dumps(list(pool.map(_why_not_reached, places))), flush=True)
    sys.stdin.read()
    return int(ExitCode.DONE)


def _why_not_reached(place: tuple[str, int], seconds: float = _REACH_SECONDS) -> str:
    """Return the reason why an address and port cannot be reached, or an empty text if they can."""
    try:
        socket.create_connection((place[0], place[1]), seconds).close()
    except OSError as error:
        return str(error) or type(error).__name__
    return ""


if __name__ == "__main__":
    if sys.argv[1:] == ["cluster"]:
        print(json.dumps([__version__, to_table(here()), network_gigabits()]), flush=True)
    else:
        sys.exit(try_ports() if sys.argv[1:] == ["ports"] else main())
