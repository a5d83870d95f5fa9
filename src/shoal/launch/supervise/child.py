"""Child processes: their start, input, output, time limit and death; and function calls in a forked child."""

from __future__ import annotations

import atexit
import codecs
import contextlib
import ctypes
import io
import json
import math
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO, TextIO

from shoal.errors import ExitCode, LaunchError, RankLostError, ShoalError, say_note
from shoal.launch.environment import LAUNCHER_PID, LOCK_FD
from shoal.launch.signals import Signals, handle_stop_signals, handling, pausing, stop_signals

_POLL_SECONDS = 0.02
# A process that the child has left running may keep its pipes open.
_PATIENCE_SECONDS = 2.0
_CHUNK_BYTES = 1 << 16
_LAST_LINES, _LONGEST_LINE = 5, 200
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 15, 36, 37
_CGROUPS, _FROZEN = Path("/sys/fs/cgroup"), re.compile(r"^(FROZEN|FREEZING|frozen 1)$|refrigerator|freezer_trap", re.M)

# Kernel functions that wait for an answer of FUSE or of a network file system, in a sleep that a signal may end.
_DISK_WAITS, _DISK_SECONDS = re.compile(r"^(request_wait_answer|fuse_|rpc_|nfs|cifs_|smb|ceph_|p9_)"), 30.0

# What gets the text that a child writes: a file, subprocess.PIPE, or a function that a thread calls with each line.
Sink = int | IO[Any] | Callable[[str], object] | None


class Child:
    """Child process in a session of its own, so that Ctrl-C in the terminal reaches only this process.

    The child inherits `descriptors`, and this process's environment with additional `variables`. If it `listens`, it
    reads the lines of `tell`. `output` and `errors`: what gets its text; default: this process's own.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        variables: Mapping[str, str] | None = None,
        folder: str | None = None,
        descriptors: Sequence[int] = (),
        listens: bool = False,
        output: Sink = None,
        errors: Sink = None,
    ) -> None:
        self.process = subprocess.Popen(
            words,
            env={**os.environ, **(variables or {})},
            cwd=folder,
            pass_fds=descriptors,
            stdin=subprocess.PIPE if listens else subprocess.DEVNULL,
            stdout=subprocess.PIPE if callable(output) else output,
            stderr=subprocess.PIPE if callable(errors) else errors,
            start_new_session=True,
            encoding="utf-8",
            errors="replace",
        )
        self._pipes: list[tuple[IO[str], threading.Thread | None]] = []
        for pipe, sink in ((self.process.stdout, output), (self.process.stderr, errors)):
            if pipe is not None:
                reader = threading.Thread(target=_read, args=(pipe, sink), daemon=True) if callable(sink) else None
                self._pipes.append((pipe, reader))
                if reader is not None:
                    reader.start()

    def tell(self, line: Any) -> bool:
        """Send a line of JSON. Return False if the child is gone."""
        assert self.process.stdin is not None, "it listens"
        text = json.dumps(line, default=str) + "\n"
        try:
            self.process.stdin.write(text)
            self.process.stdin.flush()
        except (OSError, ValueError):
            return False
        return True

    def send(self, number: int) -> None:
        """Send a signal to the child if it has not ended."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def is_over(self) -> bool:
        """Return True if the child has ended and all its output has been read."""
        return self.process.poll() is not None and not any(r is not None and r.is_alive() for _, r in self._pipes)

    def kill(self) -> None:
        """Kill the child and its own child processes if it has not ended."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def finish(self, seconds: float | None = None) -> int:
        """Close the child's input, wait for its end, and kill it after `seconds`. Return its exit code."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):  # unread input
                self.process.stdin.close()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
        code = self.process.wait()
        for pipe, reader in self._pipes:
            if reader is None:
                pipe.close()
            else:
                reader.join(_PATIENCE_SECONDS)
        return code


def _read(pipe: IO[str], sink: Callable[[str], object]) -> None:
    with pipe:
        for line in pipe:
            sink(line.rstrip("\n"))


# ---------------------------------------------------------------------------------------------------- output and death


def other_stream() -> TextIO | None:
    """Return sys.stdout if child processes do not inherit it (in a notebook, for example), else None."""
    stream = sys.stdout
    if stream is None:
        return None
    own = type(stream) is io.TextIOWrapper and isinstance(getattr(stream.buffer, "raw", None), io.FileIO)
    return None if own and stream.fileno() == 1 else stream


class OutputRelay:
    """Pipe from which a thread copies text to a stream, for example in a notebook; processes write to `writer`."""

    def __init__(self, stream: TextIO | io.TextIOBase) -> None:
        self._stream = stream
        self._reader, descriptor = os.pipe()
        self.writer: BinaryIO = os.fdopen(descriptor, "wb")
        self._thread = threading.Thread(target=self._relay, name="shoal-output", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait until the stream has all output of the processes that have ended."""
        self.writer.close()
        self._thread.join(_PATIENCE_SECONDS)

    def _relay(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        with os.fdopen(self._reader, "rb", buffering=0) as pipe:
            while chunk := pipe.read(_CHUNK_BYTES):
                with contextlib.suppress(OSError, ValueError):  # the stream is closed
                    self._stream.write(decoder.decode(chunk))
                    self._stream.flush()


def how_it_ended(code: int) -> str:
    """Describe the end of a process: "was killed by SIGKILL" for code -9, else "ended with code N"."""
    with contextlib.suppress(ValueError):
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
    return f"ended with code {code}"


def standstill(pid: int) -> str:
    """Return "stopped (SIGSTOP)" or "frozen (by its cgroup)" if a process does not run until another resumes it.

    Otherwise return an empty text. A frozen process may look like one that waits for a disk; only its cgroup, of either
    version, or the kernel function that it waits in tells them apart. Stops by a debugger, state t, do not count.
    """
    about = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError):
        state = (about / "stat").read_bytes().rpartition(b") ")[2][:1]
        if state == b"T":
            return "stopped (SIGSTOP)"
        if state in (b"D", b"S"):
            signs = [(about / "wchan").read_text()]
            for line in (about / "cgroup").read_text().splitlines():
                _, controllers, path = line.split(":", 2)
                names = ("freezer",) if controllers == "freezer" else () if controllers else (".", "unified")
                for place in (_CGROUPS / name / path.lstrip("/") for name in names):
                    with contextlib.suppress(OSError):  # the root cgroup has no such file
                        signs.append((place / ("freezer.state" if controllers else "cgroup.events")).read_text())
            if any(_FROZEN.search(sign) for sign in signs):
                return "frozen (by its cgroup)"
    return ""


class DiskWaits:
    """Waits of processes, or of their child processes, for a disk. Each is noted once, after 30 s."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[int, float] = {}  # by process id; -inf after the note

    def look(self, pid: int, name: str) -> bool:
        """Return True if the process `pid` or a child process of it waits for a disk. `name`: of it, in the note."""
        children = ""
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
        who = next((one for one in (pid, *map(int, children.split())) if waits_for_disk(one)), None)
        if who is None:
            self._since.pop(pid, None)
            return False
        since, now = self._since.setdefault(pid, self._clock()), self._clock()
        if since > 0.0 and now - since > _DISK_SECONDS:
            self._since[pid] = -math.inf
            whose = f"process {who}" if who == pid else f"process {who}, which it has started"
            say_note(f"{name}: {whose}, has waited for a disk for {_DISK_SECONDS:.0f} s; the run waits for it")
        return True


def waits_for_disk(pid: int) -> bool:
    """Return True if the main thread of a process waits for a file system, of a network or a hung mount for example."""
    about = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError):
        state = (about / "stat").read_bytes().rpartition(b") ")[2][:1]
        waits = state == b"D" or (state == b"S" and _DISK_WAITS.search((about / "wchan").read_text()) is not None)
        return waits and not standstill(pid)
    return False


def kill(process: Any) -> None:
    """Kill a process with the methods of subprocess.Popen. A frozen one counts as dead: it dies when it is thawed."""
    process.kill()
    if process.poll() is None and "frozen" in standstill(process.pid):
        process.returncode = -signal.SIGKILL


def last_lines(text: str) -> str:
    """Return the last lines of a process's output, each after a newline."""
    return "".join(f"\n{line[:_LONGEST_LINE]}" for line in text.strip().splitlines()[-_LAST_LINES:])


def rank_lost(
    given: str,
    conflict: str,
    *,
    host: str,
    rank: int | None = None,
    remedy: str = "--resume goes on from the newest checkpoint; SIGKILL by the system often means out of memory",
) -> RankLostError:
    """Return the error for the loss of a rank, or of a host with its ranks."""
    error = RankLostError(given=given, conflict=conflict, remedy=remedy)
    error.rank, error.host = rank, host
    return error


def no_answer(code: int) -> LaunchError:
    """Return the error for a child that was to look at a job and has ended without a result."""
    return LaunchError(
        given="a look at the job before any rank is started",
        conflict=f"the process that loaded it ended with code {code} and without a word",
        remedy="load the job by itself under `python`: its code crashes or ends the interpreter",
    )


# ---------------------------------------------------------------------------------------------------- in the child


def die_with_launcher() -> None:
    """End this worker if its launcher ends, even if that is killed. The worker's commands do not inherit the lock."""
    launcher, lock = os.environ.get(LAUNCHER_PID), os.environ.pop(LOCK_FD, None)
    if lock is not None:
        os.set_inheritable(int(lock), False)
    if launcher is not None:
        _die_with(int(launcher))


def _die_with(parent: int) -> None:
    """End this process if its parent ends, even if that is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above; in a container it may be process 1 itself
            os._exit(ExitCode.RANK_LOST)


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Become the parent of descendants whose parent ends during the context, in place of process 1. Only on Linux."""
    if sys.platform != "linux":
        yield
        return
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def name_process(name: str) -> None:
    """Set the name of this process, at most 15 characters, which `ps -e`, `top` and `pgrep` show.

    `name` must not contain blanks: Slurm's proctrack/linuxproc, among others, would not find the parent process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def forked() -> int:
    """Fork this process, whose buffered output is written first. Return the child's process id, and 0 in the child."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads: the child uses no thread of this process
        return os.fork()


def fork(work: Callable[[], None]) -> int:
    """Fork a child that calls `work` and ends, with code 1 if `work` raises. Return its process id."""
    child = forked()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    except ShoalError:
        pass  # the parent's probe failed, and a later step reports why
    except Exception:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def as_command(
    work: Callable[[], int], signals: Signals, before_end: Callable[[int], object]
) -> tuple[int | None, int]:
    """Call `work` in a forked child of the same process group. Return its result once the child has ended.

    The result is None if the child ended before. Beside it stands the child's exit code, negative for a signal.
    Both record signals in their copy of `signals`. This process hands its own on, and kills the child after a second
    one of a kind. The child ends as an interpreter does, after `before_end` with the code. Child processes that it
    leaves behind in the process group are killed.
    """
    reader, writer = os.pipe()
    os.set_blocking(reader, False)  # a process that the child leaves behind may hold the other end
    parent, mask = os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())
    child = forked()
    if not child:
        code = 1
        try:
            _die_with(parent)
            for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
                finalizer.atexit = False  # temporary folders are the parent's
            with signals.handled():
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            os.write(writer, bytes([code]))
            before_end(code)
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            os._exit(code)

    def tell(number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    def hand_on(number: int, frame: object) -> None:
        if signals.takes(number):
            tell(signal.SIGKILL if signals.twice else number)

    os.close(writer)
    woken, wakes = os.pipe()  # without it, a signal just before a select would wait for its end
    os.set_blocking(woken, False)
    os.set_blocking(wakes, False)
    woke_before = signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    try:
        with handling(stop_signals(), hand_on), pausing(tell), adopting():
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            ended, waits = 0, DiskWaits()
            while not ended:
                waits.look(child, "the process that trains")
                says = reader in select.select([reader, woken], [], [], 1.0)[0]  # it is about to end, or has ended
                with contextlib.suppress(BlockingIOError):
                    os.read(woken, _CHUNK_BYTES)
                ended, status = os.waitpid(child, 0 if says else os.WNOHANG)
            _end_children()
    finally:
        signal.set_wakeup_fd(woke_before)
        os.close(woken)
        os.close(wakes)
    said = b""
    with contextlib.suppress(BlockingIOError):
        said = os.read(reader, 1)
    os.close(reader)
    return said[0] if said else None, os.waitstatus_to_exitcode(status)


def _end_children() -> None:
    """Kill the remaining child processes in this process group, with the child processes that they leave."""
    with contextlib.suppress(ChildProcessError):
        while True:
            if os.waitpid(-1, os.WNOHANG) != (0, 0):
                continue
            import psutil

            own = [one.pid for one in psutil.Process().children() if os.getpgid(one.pid) == os.getpgrp()]
            if not own:
                return
            for pid in own:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def in_child(work: Callable[[], dict[str, Any]], seconds: float = math.inf) -> dict[str, Any]:
    """Return the result of `work` from a forked child, so that no import or data of the call stays in this process.

    The result is a JSON value, and the child has ended when this returns. Raises: LaunchError if the child died or ran
    longer than `seconds`; SystemExit if a signal asked to stop, for which the child was killed.
    """
    until = time.monotonic() + seconds
    signals = Signals(impatient=False)
    reader, writer = os.pipe()

    def answer() -> None:
        os.close(reader)
        handle_stop_signals(signal.SIG_DFL)
        text = json.dumps(work()).encode()
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(text)

    ready, is_late = False, False
    with signals.handled():
        child = fork(answer)
        os.close(writer)
        try:
            with os.fdopen(reader, "rb") as pipe:
                while not (signals.received or ready or is_late):
                    ready = bool(select.select([pipe], [], [], _POLL_SECONDS)[0])
                    is_late = time.monotonic() > until
                text = pipe.read() if ready else b""
        finally:
            if signals.received or not ready:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if signals.received:
        raise SystemExit(ExitCode.INTERRUPTED)
    if code or not text:
        raise no_answer(code)
    result: dict[str, Any] = json.loads(text)
    return result


def look_in_child(work: Callable[[], dict[str, Any]], seconds: float) -> dict[str, Any] | None:
    """Return the result of `work` from a child process without output, or None if it raises, dies or is late.

    A signal that asks to stop ends the child and sends SIGTERM to this process.
    """

    def quiet() -> dict[str, Any]:
        sys.stdout = sys.stderr = null = open(os.devnull, "w")  # noqa: SIM115
        for stream in (1, 2):
            os.dup2(null.fileno(), stream)
        return work()

    try:
        return in_child(quiet, seconds)
    except LaunchError:
        return None
    except SystemExit:
        os.kill(os.getpid(), signal.SIGTERM)
        return None
