"""Process of a rank below a worker of an engine (Ray actor, Spark task), which starts and watches it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from shoal.errors import ExitCode, RankLostError
from shoal.launch.environment import LAUNCHER_PID, LISTEN_FD, REPORT_FILE, Environment
from shoal.launch.signals import how_it_ended
from shoal.runs.directory import read_json

_POLL_SECONDS = 0.05
_LAST_LINES = 5
_KEPT_BYTES = 1 << 20  # of a rank's output


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


class EngineRank:
    """Process of a rank, which dies with this process."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="shoal-"))
        self._listener: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._text, self._told, self._lock = bytearray(), 0, threading.Lock()
        self._reader: threading.Thread | None = None
        self._logs = ""
        self._rank = "0"

    def listen(self, address: str) -> int:
        """Listen on a free port of the address, for rank 0's store. Return the port."""
        family, kind, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        self._listener = socket.socket(family, kind)
        self._listener.bind(place)
        self._listener.listen()
        port: int = self._listener.getsockname()[1]
        return port

    def start(self, command: RankCommand) -> None:
        """Start the process, in the command's folder if this host has the folder."""
        kept = () if self._listener is None else (self._listener.fileno(),)
        variables: dict[str, str] = {
            **os.environ,
            **command.variables,
            LAUNCHER_PID: str(os.getpid()),
            REPORT_FILE: str(self._folder / "report.json"),
        }
        if kept:
            variables[LISTEN_FD] = str(kept[0])
        self._logs, self._rank = command.logs, command.variables["RANK"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "shoal", *command.arguments],
            env=variables,
            cwd=command.folder if Path(command.folder).is_dir() else None,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=kept,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name="shoal-output", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        while chunk := self._process.stdout.read1(1 << 16):  # type: ignore[attr-defined]
            with self._lock:
                self._text += chunk
                told = len(self._text) if self._logs else self._told
                gone = max(0, min(told, len(self._text) - _KEPT_BYTES))
                del self._text[:gone]
                self._told = max(0, self._told - gone)

    def look(self, seconds: float) -> RankLook:
        """Return the state after `seconds` or at the process's end. The text is empty if the output goes to a log."""
        assert self._process is not None
        deadline = time.monotonic() + seconds
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        code = self._process.returncode
        if code is not None and self._reader is not None:
            self._reader.join(2.0)  # processes that the rank has left running may keep the pipe open
        new = "" if self._logs else self._untold(everything=code is not None)
        if code is None:
            return RankLook(new)
        with self._lock:
            text = self._text.decode(errors="replace")
        self._keep_log(text)
        return RankLook(new, code, read_json(self._folder / "report.json"), _last(text))

    def _untold(self, *, everything: bool) -> str:
        """Return the lines that no look has returned yet; at the end, also an incomplete line."""
        with self._lock:
            end = len(self._text) if everything else max(self._told, self._text.rfind(b"\n") + 1)
            new, self._told = bytes(self._text[self._told : end]), end
        return new.decode(errors="replace")

    def _keep_log(self, text: str) -> None:
        logs = Path(self._logs)
        with contextlib.suppress(OSError):
            if self._logs and text and logs.parent.is_dir():
                logs.mkdir(exist_ok=True)
                (logs / f"rank-{self._rank}.txt").write_text(text, encoding="utf-8")

    def tell(self, number: int) -> None:
        """Send a signal to the process if it is alive."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def close(self) -> None:
        """Kill the process if it still runs, and remove its files."""
        self.tell(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
            if self._reader is not None and self._process.stdout is not None:
                self._reader.join(2.0)
                self._process.stdout.close()
        if self._listener is not None:
            self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _last(text: str) -> str:
    return "".join(f"\n{line[:200]}" for line in text.strip().splitlines()[-_LAST_LINES:])


def environments(
    engine: str, places: Sequence[str], store: tuple[str, int], *, own_gpu: bool = False
) -> list[Environment]:
    """Return the environment of each rank, in rank order.

    Args:
        engine: name of the engine.
        places: node of each rank.
        store: address and port of rank 0's store.
        own_gpu: whether each rank sees only its own GPU.
    """
    nodes = list(dict.fromkeys(places))
    return [
        Environment(
            rank=rank,
            world_size=len(places),
            local_rank=places[:rank].count(place),
            local_world_size=places.count(place),
            address=store[0],
            port=store[1],
            own_gpu=own_gpu,
            host=nodes.index(place),
            num_hosts=len(nodes),
            engine=engine,
        )
        for rank, place in enumerate(places)
    ]


@dataclass(frozen=True)
class RankEnd:
    """End of a rank, from its engine's point of view. `gone`: why the engine has lost the process with its worker."""

    rank: int
    host: str
    look: RankLook = field(default_factory=RankLook)
    gone: str = ""
    given_up: bool = False  # this launcher ended it after another rank had failed

    @property
    def is_well(self) -> bool:
        """Whether the rank is done, or has stopped on request."""
        return not self.gone and self.look.code in (ExitCode.DONE, ExitCode.PREEMPTED) and self.look.report is not None

    @property
    def code(self) -> int | None:
        """Exit code of the process; None if unknown."""
        return self.look.code

    def how_it_ended(self) -> dict[str, Any] | None:
        """Return its report; None if it ended without a report or the engine has lost it."""
        return None if self.gone else self.look.report

    def error(self, _: Mapping[int, str]) -> RankLostError:
        """Describe the rank's loss."""
        how = how_it_ended(self.look.code if self.look.code is not None else 0)
        error = RankLostError(
            given=f"rank {self.rank} on {self.host}",
            conflict=f"it {self.gone or f'{how} without a word{self.look.last}'}",
            remedy="--resume goes on from the newest checkpoint; SIGKILL by the system often means out of memory",
        )
        error.rank, error.host = self.rank, self.host
        return error
