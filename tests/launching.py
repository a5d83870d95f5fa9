"""Commands under test run as users run them: own session, hard time limit, and not one of their processes left over.

Python commands are forks of one process, see forks.py; `fresh` asks for a real interpreter.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tests import forks

from shoal.runs.records import read_steps

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
JOBS = ROOT / "tests" / "jobs"
EXAMPLES = ROOT / "examples"

TIME_LIMIT_SECONDS = 60.0
# A killed launcher's workers die by a signal of the kernel; the promise is two seconds.
GONE_WITHIN_SECONDS = 2.0
# Two cores: more at once only makes each slower.
AT_ONCE = 2

_MARK = "SHOAL_TEST_MARK"
# A file for the messages of failures, from which benchmarks/results/faults.md has its table.
TOLD = "SHOAL_TEST_TOLD"
_ERROR = re.compile(
    r"^error(?: on rank (?P<rank>\d+)(?: \((?P<host>[^)]+)\))?| on (?P<alone>\S+))?: (?P<kind>\w+)"
    r"(?:: (?P<conflict>\S.*))?$",
    re.MULTILINE,
)
_BEATS = ("  you gave:", "  conflicts with:", "  write instead:")
# A command under test must not believe that it is one of an outer run's ranks.
_SCRUBBED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
_SCRUBBED_PREFIXES = (
    "SHOAL_LISTEN",
    "SHOAL_REPORT",
    "SHOAL_RUN",
    "SHOAL_REQUEST",
    "SHOAL_LAUNCHER",
    "TORCHELASTIC",
    "SLURM_",
    "PMI_",
    "MPI_LOCAL",
    "PET_",
    "JOB_COMPLETION",
    "GROUP_",
    "SHOAL_ENGINE",
    "SHOAL_RESTARTS",
    "OMPI_",
)


def unlaunched(variables: Mapping[str, str]) -> dict[str, str]:
    """Without what a launcher or an outer run may have set."""
    return {k: v for k, v in variables.items() if k not in _SCRUBBED and not k.startswith(_SCRUBBED_PREFIXES)}


@dataclass(frozen=True)
class Message:
    """Error of a command as it is told: its first line, where, and the first line of each beat."""

    headline: str
    kind: str
    rank: str | None
    host: str | None
    given: str
    conflict: str
    remedy: str


@dataclass(frozen=True)
class Ended:
    """How a command ended, and the run directory that it was given."""

    code: int
    stdout: str
    stderr: str
    out: Path

    @property
    def output(self) -> str:
        return self.stdout + self.stderr

    @property
    def result(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.out / "result.json").read_text(encoding="utf-8"))
        return document

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(record.to_line()) for record in read_steps(self.out / "records.jsonl")]

    def expect(self, code: int) -> Ended:
        """Itself. Raises: AssertionError with the output where the exit code is another."""
        assert self.code == code, f"exit code {self.code}, expected {code}\n{self.stdout}\n{self.stderr}"
        return self

    def fails(self, code: int) -> Ended:
        """Itself, whose one message says where, what and what to do. Raises: AssertionError."""
        message = self.expect(code).message
        noted = os.environ.get(TOLD)
        if noted:
            test = os.environ.get("PYTEST_CURRENT_TEST", "").split(" ")[0]
            with open(noted, "a", encoding="utf-8") as file:
                file.write(json.dumps({"test": test, **asdict(message)}) + "\n")
        return self

    @property
    def message(self) -> Message:
        """Its error. Raises: AssertionError where there is none, or more than it."""
        found = list(_ERROR.finditer(self.stderr))
        assert len(found) == 1, f"{len(found)} errors are told\n{self.stderr}"
        lines = self.stderr[found[0].end() + 1 :].splitlines()
        if found[0]["conflict"]:
            lines.append(f"  conflicts with: {found[0]['conflict']}")
        beats = [line.removeprefix(beat).strip() for beat in _BEATS for line in lines if line.startswith(beat)]
        assert len(beats) == len(_BEATS), f"not three beats\n{self.stderr}"
        assert all(beats), f"an empty beat\n{self.stderr}"
        rank, host = found[0]["rank"], found[0]["host"] or found[0]["alone"]
        assert rank is None or host, f"a rank without its host\n{self.stderr}"
        assert bool(host) == bool(found[0]["conflict"]), f"a first line without the cause\n{self.stderr}"
        # Of a rank that crashed the interpreter shows its stack, which in a fork begins with what has forked it.
        assert "Traceback (most recent call last)" not in self.output, self.output
        return Message(found[0][0], found[0]["kind"], rank, host, *beats)


@dataclass
class Run:
    """What to run: `shoal run JOB` with a number of devices and further arguments."""

    job: str | Path
    out: Path
    devices: int | None = 1
    exact: bool = False
    arguments: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    cwd: Path | None = None
    launcher: tuple[str, ...] = ("-m", "shoal")
    fresh: bool = False
    restarts: int = 0  # of lost ranks: most tests are about how a run ends

    @property
    def command(self) -> list[str]:
        devices = () if self.devices is None else ("--devices", str(self.devices))
        settings = [text for name, value in self.settings.items() for text in ("--set", f"{name}={value}")]
        exact = ("--exact",) if self.exact else ()
        out = ("--out", str(self.out), "--max-restarts", str(self.restarts))
        return [
            sys.executable,
            *self.launcher,
            "run",
            str(self.job),
            *devices,
            *exact,
            *out,
            *settings,
            *self.arguments,
        ]


def run(wanted: Run, timeout: float = TIME_LIMIT_SECONDS) -> Ended:
    """Runs to the end. Raises: AssertionError past the limit, or where a process of the command is left."""
    with start(wanted) as started:
        return started.wait(timeout)


def run_all(wanted: Sequence[Run]) -> list[Ended]:
    """Each run's end, in order; a few run at once."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(run, wanted))


@contextlib.contextmanager
def start(wanted: Run) -> Iterator[Started]:
    """A running command; whatever is left of it when the context ends is killed, by process id."""
    with start_command(wanted.command, wanted.out, wanted.environment, cwd=wanted.cwd, fresh=wanted.fresh) as started:
        yield started


@contextlib.contextmanager
def start_command(
    command: list[str],
    out: Path,
    environment: dict[str, str] | None = None,
    *,
    cwd: Path | None = None,
    fresh: bool = False,
) -> Iterator[Started]:
    """As `start`, for a command that is not `shoal run`."""
    mark = uuid.uuid4().hex
    variables = {**unlaunched(os.environ), **(environment or {}), _MARK: mark}
    out.parent.mkdir(parents=True, exist_ok=True)
    # Files, not pipes: a process left over would hold a pipe open, and a full one would stop the run.
    paths = [out.parent / f".{out.name}-{mark[:8]}.{name}" for name in ("stdout", "stderr")]
    with paths[0].open("wb") as stdout, paths[1].open("wb") as stderr:
        process = (subprocess.Popen if fresh else forks.Popen)(
            command,
            env=variables,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    started = Started(process, out, mark, paths)
    try:
        yield started
    finally:
        started.kill_all()
        process.wait()
        for path in paths:
            path.unlink()


class Started:
    """A command on its way. Its processes are known by a mark in their environment, whatever session they are in."""

    def __init__(self, process: subprocess.Popen[bytes], out: Path, mark: str, paths: list[Path]) -> None:
        self.process, self.out, self._mark, self._paths = process, out, mark, paths

    @property
    def pid(self) -> int:
        """The process that was started: the launcher, or the only rank."""
        return self.process.pid

    def processes(self) -> dict[int, dict[str, str]]:
        """The environments of the command's processes that are alive, by process id."""
        found = {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdecimal():
                continue
            with contextlib.suppress(OSError):
                content = (folder / "environ").read_bytes()
                if self._mark.encode() in content:
                    pairs = [v.split("=", 1) for v in content.decode(errors="replace").split("\0") if "=" in v]
                    found[int(folder.name)] = dict(pairs)
        return found

    def workers(self) -> dict[int, int]:
        """Process ids of the ranks that have begun, by rank, as they are named; what they start is younger."""
        names = {pid: _name(pid).rpartition("shoal-rank-")[2] for pid in sorted(self.processes(), reverse=True)}
        return {int(rank): pid for pid, rank in names.items() if rank.isdecimal() and pid != self.pid}

    def named(self, name: str) -> list[int]:
        """Ids of the command's processes of that name that are alive."""
        return [pid for pid in self.processes() if _name(pid) == name]

    def send(self, number: int) -> None:
        """A signal to the process that was started, and to it alone: it has arrived when this returns.

        On a busy machine, the process may run on for a while before the kernel hands it over.
        """
        self.process.send_signal(number)
        bit = 1 << (number - 1)
        with contextlib.suppress(OSError):  # it has ended
            while True:
                text = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
                state = dict(line.split(":\t", 1) for line in text.splitlines())
                waiting, blocked = (int(state["ShdPnd"], 16) & bit, int(state["SigBlk"], 16) & bit)
                if not waiting or blocked or state["State"][0] in "TtZX":
                    return
                time.sleep(0.005)

    def kill_all(self) -> None:
        """SIGKILL to every process of the command, until none is left."""
        while True:
            alive = self.processes()
            if not alive:
                return
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.01)

    def kill_group_and_workers(self) -> None:
        """SIGKILL at one moment: nothing of it gets to say a last word."""
        victims = list(self.processes())
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait(self, timeout: float = TIME_LIMIT_SECONDS) -> Ended:
        """Waits for the end and for the last of its processes."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill_all()
            raise AssertionError(f"not done after {timeout} s\n{self._text(0)}\n{self._text(1)}") from None
        ended = Ended(code, self._text(0), self._text(1), self.out)
        self.wait_until_gone()
        return ended

    def wait_until_gone(self) -> None:
        """Raises: AssertionError where a process of the command is still there after GONE_WITHIN_SECONDS."""
        deadline = time.monotonic() + GONE_WITHIN_SECONDS
        left = self.processes()
        while left and time.monotonic() < deadline:
            time.sleep(0.02)
            self.process.poll()
            left = self.processes()
        assert not left, f"processes left over: {sorted(left)}\n{self._text(0)}\n{self._text(1)}"

    def until(self, condition: Callable[[], T], what: str, timeout: float = TIME_LIMIT_SECONDS) -> T:
        """The condition's first true value. Raises: AssertionError past the deadline or where the command ends."""
        deadline = time.monotonic() + timeout
        while True:
            ended = self.process.poll() is not None
            found = condition()
            if found:
                return found
            said = f"\n{self._text(0)}\n{self._text(1)}"
            assert not ended, f"the command ended before {what}{said}"
            assert time.monotonic() < deadline, f"no sign of {what} within {timeout} s{said}"
            time.sleep(0.01)

    @property
    def output(self) -> str:
        """What it has said so far."""
        return self._text(0) + self._text(1)

    def _text(self, which: int) -> str:
        return self._paths[which].read_text(encoding="utf-8", errors="replace")


def _name(pid: int) -> str:
    """A process's, empty where it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


@dataclass(frozen=True)
class Gate:
    """A place in a run, between the sums and the optimizer of one step, where its ranks wait; see jobs/witness.py.

    Signals and kills arrive there, so that no test depends on how fast a machine is. `step` counts from 0.
    """

    folder: Path
    step: int
    ranks: str = "all"  # or one rank's number

    @property
    def environment(self) -> dict[str, str]:
        self.folder.mkdir(parents=True, exist_ok=True)
        return {"TEST_GATE": f"{self.folder}:{self.step}:{self.ranks}"}

    def reached(self, num_ranks: int) -> bool:
        """Whether so many ranks wait there."""
        return len(list(self.folder.glob("reached-*"))) >= num_ranks

    def seconds(self) -> float:
        """How long the last of them has waited there."""
        return time.time() - max(path.stat().st_mtime for path in self.folder.glob("reached-*"))

    def open(self) -> None:
        """Lets them go on."""
        (self.folder / "open").touch()


def newest_checkpoint(out: Path) -> Path:
    """The checkpoint directory of the latest step."""
    return max((out / "checkpoints").glob("step-????????"))


def spoil(path: Path, place: int) -> None:
    """Flips one bit of a file."""
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= 1
    path.write_bytes(content)
