"""Process of a rank below a worker of an engine (Ray actor, Spark task), which starts and watches it."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from shoal.launch.environment import LAUNCHER_PID, LISTEN_FD, REPORT_FILE, Environment
from shoal.launch.supervise.child import Child, OutputRelay, how_it_ended, last_lines, rank_lost
from shoal.launch.supervise.recovery import EndedRank
from shoal.runs.directory import read_json

_KEPT_CHARACTERS = 1 << 20  # of a rank's output


@dataclass(frozen=True)
class RankCommand:
    """Command of one rank: the words after `shoal`, its working directory, and the variables that number it."""

    arguments: tuple[str, ...]
    folder: str
    variables: Mapping[str, str]
    logs: str = ""  # folder in the run directory for a rank's own output; empty: the output is shown


class RankLook(NamedTuple):
    """State of a rank's process: its new text and, once it has ended, its exit code, report and last lines."""

    text: str = ""
    code: int | None = None
    report: dict[str, Any] | None = None
    last: str = ""


class _Output(io.TextIOBase):
    """Output of a rank: the last part of it, and all that `new` has not returned yet if it is `shown`."""

    def __init__(self, *, shown: bool) -> None:
        self.text, self._returned, self._shown, self._lock = "", 0, shown, threading.Lock()

    def write(self, text: str) -> int:
        with self._lock:
            self.text += text
            gone = max(0, min(self._returned if self._shown else len(self.text), len(self.text) - _KEPT_CHARACTERS))
            self.text, self._returned = self.text[gone:], max(0, self._returned - gone)
        return len(text)

    def new(self, *, everything: bool) -> str:
        """Return the lines that no call has returned yet; if `everything`, also an incomplete line."""
        with self._lock:
            before = self._returned
            self._returned = len(self.text) if everything else max(before, self.text.rfind("\n") + 1)
            return self.text[before : self._returned]


class EngineRank:
    """Process of a rank, which dies with this process."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="shoal-"))
        self._listener: socket.socket | None = None
        self._child: Child | None = None

    def listen(self, address: str) -> int:
        """Listen on a free port of the address, for rank 0's store. Return the port."""
        family, _, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        self._listener = socket.create_server(place, family=family)
        port: int = self._listener.getsockname()[1]
        return port

    def start(self, command: RankCommand) -> None:
        """Start the process, in the command's folder if this host has the folder."""
        variables = {
            **command.variables,
            LAUNCHER_PID: str(os.getpid()),
            REPORT_FILE: str(self._folder / "report.json"),
        }
        inherited = [] if self._listener is None else [self._listener.fileno()]
        if inherited:
            variables[LISTEN_FD] = str(inherited[0])
        self._logs, self._rank = Path(command.logs) if command.logs else None, command.variables["RANK"]
        self._output = _Output(shown=self._logs is None)
        self._relay = OutputRelay(self._output)
        self._child = Child(
            [sys.executable, "-m", "shoal", *command.arguments],
            variables=variables,
            folder=command.folder if Path(command.folder).is_dir() else None,
            descriptors=inherited,
            output=self._relay.writer,
            errors=subprocess.STDOUT,
        )
        self._relay.writer.close()

    def look(self, seconds: float) -> RankLook:
        """Return the state after `seconds` or at the process's end. The text is empty if the output goes to a log."""
        assert self._child is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.process.wait(seconds)
        code = self._child.process.poll()
        if code is None:
            return RankLook(self._output.new(everything=False) if self._logs is None else "")
        self._relay.close()
        text, new = self._output.text, self._output.new(everything=True)
        with contextlib.suppress(OSError):
            if self._logs is not None and text and self._logs.parent.is_dir():
                self._logs.mkdir(exist_ok=True)
                (self._logs / f"rank-{self._rank}.txt").write_text(text, encoding="utf-8")
        shown = new if self._logs is None else ""
        return RankLook(shown, code, read_json(self._folder / "report.json"), last_lines(text))

    def tell(self, number: int) -> None:
        """Send a signal to the process if it is alive."""
        if self._child is not None:
            self._child.send(number)

    def close(self) -> None:
        """Kill the process if it still runs, and remove its files."""
        if self._child is not None:
            self._child.finish(0.0)
            self._relay.close()
        if self._listener is not None:
            self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def environments(
    engine: str, places: Sequence[str], store: tuple[str, int], *, own_gpu: bool = False
) -> list[Environment]:
    """Return the environment of each rank on its place, a node. `store`: address and port of rank 0's store."""
    nodes, known = list(dict.fromkeys(places)), []
    for rank, node in enumerate(places):
        place = Environment(rank, len(places), places[:rank].count(node), places.count(node), *store, own_gpu=own_gpu)
        known.append(replace(place, host=nodes.index(node), num_hosts=len(nodes), engine=engine))
    return known


@dataclass(frozen=True)
class RankEnd:
    """End of a rank, from its engine's point of view. `gone`: why the engine has lost the process with its worker."""

    rank: int
    host: str
    look: RankLook = field(default_factory=RankLook)
    gone: str = ""
    given_up: bool = False  # this launcher ended it after another rank had failed

    def ended(self) -> EndedRank:
        """Return this end for the verdict. A rank that the engine has lost has no report."""
        how = self.gone or f"{how_it_ended(self.look.code or 0)} without a word{self.look.last}"
        error = rank_lost(f"rank {self.rank} on {self.host}", f"it {how}", rank=self.rank, host=self.host)
        return EndedRank(None if self.gone else self.look.report, lambda _: error, self.look.code, self.given_up)
