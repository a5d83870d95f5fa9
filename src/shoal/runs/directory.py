"""Run directory: names of its files, the check whether a run may use it, and its exclusive use.

The lock admits one run at a time, on one host or several. It is a file with an OS lock (flock). A hard link puts the
complete and already locked file in place. Within one kernel the OS lock decides, since it ends with the last process of
the run. On a directory that several hosts share, the OS lock may be local to each host. There the holder renews the
file's mtime, and another host counts the seconds without a change by its own monotonic clock. No date matters.

Each start of a run's ranks is a generation: a unique number, and a file of that name in the run directory. A new
generation creates its file, removes the files of earlier generations, and then their temporary files. A process that
was paused meanwhile, on any host, has two possible outcomes. Either it renamed its file before the new generation read
the directory, or it finds that its generation is over or its temporary file is gone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import platform
import re
import shlex
import shutil
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Container, Iterator
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shoal.bounded_files import append_text, objects_of, opened, read_object
from shoal.errors import ExitCode, FencedError, InUseError, RunDirectoryError, ShoalError, StorageError
from shoal.jobs.secret_settings import command_without_secrets

NAME = "lock.json"
# Names the call of a launcher of hosts. A start of its ranks takes over the lock of a start that it has given up.
CALL = "SHOAL_CALL"
_SINCE = "%Y-%m-%d %H:%M:%S UTC"
# Errors on file systems without OS locks, or without hard links.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True)
class Patience:
    """Time limits of a lock in seconds: for heartbeats, missed heartbeats, and processes that are ending."""

    beat_seconds: float = 5.0
    missed_beats: int = 6
    ending_seconds: float = 20.0
    settling_seconds: float = 2.0
    poll_seconds: float = 0.05

    @property
    def limit_seconds(self) -> float:
        """Seconds of silence after which a holder on another host counts as dead."""
        return self.beat_seconds * self.missed_beats


@dataclass(frozen=True)
class Holder:
    """The process that has locked a directory.

    `boot` identifies the kernel, `process_started` excludes a reused pid.
    """

    pid: int
    host: str
    boot: str
    process_started: int
    since: str
    command: str
    token: str

    @classmethod
    def here(cls) -> Holder:
        """Return a holder for this process, starting now."""
        pid, started = os.getpid(), datetime.now(UTC).strftime(_SINCE)
        path = Path(sys.argv[0] if sys.argv else "")
        name = path.parent.name if path.name == "__main__.py" else path.name
        command = shlex.join([name or platform.python_implementation(), *command_without_secrets(sys.argv[1:])])
        return cls(pid, socket.gethostname(), _boot(), _started(pid) or 0, started, command, _call() + uuid.uuid4().hex)

    @property
    def local(self) -> bool:
        """True if the holder is or was a process of this kernel."""
        return self.boot == _boot() and (bool(self.boot) or self.host == socket.gethostname())

    @property
    def runs_here(self) -> bool:
        """True if the holder is a live process of this host that is visible from here."""
        return self.local and self.host == socket.gethostname() and _started(self.pid) == self.process_started

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


def _call() -> str:
    """Return the beginning of the tokens of this call's holders; empty if the call may not take over locks."""
    return f"{os.environ[CALL]}-" if os.environ.get(CALL) else ""


def _boot() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def _started(pid: int) -> int | None:
    """Return the start of a live process in clock ticks since boot, or None if it is dead or missing."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        after_name = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return None if after_name[0] in "ZX" else int(after_name[19])
    return None


class DirectoryLock:
    """Lock of this process, and of children that inherit `descriptor`, until `release`."""

    def __init__(self, folder: Path, descriptor: int, holder: Holder, new_folders: list[Path]) -> None:
        self.folder, self.descriptor, self.holder = folder, descriptor, holder
        self._new_folders = new_folders
        self._over = threading.Event()
        self._heart: threading.Thread | None = None

    @property
    def is_new(self) -> bool:
        """True if the directory was created for this lock."""
        return self.folder in self._new_folders

    def beat(self, every_seconds: float) -> None:
        """Start renewing the file's mtime, for hosts that do not see the OS lock."""
        self._heart = threading.Thread(target=self._beat, args=(every_seconds,), name="directory lock", daemon=True)
        self._heart.start()

    def _beat(self, every_seconds: float) -> None:
        said = False
        while not self._over.wait(every_seconds):
            with contextlib.suppress(OSError):
                os.utime(self.descriptor)
                holder = _read(self.folder / NAME)
                if holder is not None and holder.token != self.holder.token:  # after a long pause of this host
                    print(f"{self.folder} was taken over by {holder}: this run ends", file=sys.stderr, flush=True)
                    os._exit(ExitCode.RANK_LOST)
                if not said and not self.folder.exists():
                    said = True
                    lost = "what was written there is lost, and later checkpoints have no run to be resumed in"
                    print(f"warning: {self.folder} has vanished: {lost}", file=sys.stderr, flush=True)

    def release(self) -> None:
        """Remove the file and the empty directories that were created for it. Further calls do nothing."""
        if self._over.is_set():
            return
        self._over.set()
        if self._heart is not None:
            self._heart.join()
        with contextlib.suppress(OSError):
            if _same(self.folder / NAME, self.descriptor):
                (self.folder / NAME).unlink()
        os.close(self.descriptor)
        _unmake(self._new_folders)

    def __enter__(self) -> DirectoryLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def claim(
    folder: Path,
    say: Callable[[str], None],
    *,
    mode: int = 0o777,
    patience: Patience | None = None,
    removes: bool = False,
) -> DirectoryLock:
    """Lock the directory for this process, creating it with `mode` if it is missing.

    `removes`: whether the caller removes the directory, with the links in it.
    If the holder seems to be dead, wait until that is certain, with messages through `say`.
    Raises: InUseError that names the holder; RunDirectoryError if the directory is not writable or has links out of it.
    """
    patience = patience or Patience()
    new_folders: list[Path] = []
    links: list[str] = []
    with contextlib.suppress(OSError):  # without a right to read it
        inside = os.path.realpath(folder) + os.sep
        every = (one for one in os.scandir(folder) if one.is_symlink())
        links = sorted(one.name for one in every if not os.path.realpath(one).startswith(inside))
    if links and not removes:
        raise RunDirectoryError(
            given=str(folder),
            conflict=f"{links[0]} in it is a link out of it, and nothing is written or removed behind such a link",
            remedy="put there what the link leads to, or give another directory",
        )
    try:
        lock = _claim(folder, Holder.here(), _Judge(folder, say, patience), mode, new_folders)
    except InUseError:
        _unmake(new_folders)
        raise
    except OSError as error:
        _unmake(new_folders)
        raise RunDirectoryError(
            given=str(folder),
            conflict=f"nothing can be written there: {error.strerror or error}",
            remedy="give a directory that can be written to",
        ) from None
    lock.beat(patience.beat_seconds)
    return lock


def _claim(folder: Path, holder: Holder, judge: _Judge, mode: int, new_folders: list[Path]) -> DirectoryLock:
    target, aside = folder / NAME, folder / f".{NAME}-{holder.token}"
    descriptor = _begun(aside, mode, new_folders)
    try:
        _fill(descriptor, holder)
        while (lock_descriptor := _put(aside, target, descriptor, holder)) is None:
            other = _Other.at(target)
            if other is None:
                continue  # the lock was released in between
            try:
                if judge.is_gone(other) and _same(target, other.descriptor):
                    os.replace(aside, target)
                    if not other.decided_here:
                        judge.settle(holder)
                    lock_descriptor = descriptor
                    break
            finally:
                os.close(other.descriptor)
            time.sleep(judge.patience.poll_seconds)
        if lock_descriptor != descriptor:
            os.close(descriptor)
        return DirectoryLock(folder, lock_descriptor, holder, new_folders)
    except BaseException:
        os.close(descriptor)
        raise
    finally:
        aside.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Other:
    """An existing lock. `locked`: whether this process has just acquired its OS lock; None without OS locks.

    `holder`: None while the file cannot be read.
    """

    descriptor: int
    holder: Holder | None
    locked: bool | None
    mtime_ns: int

    @classmethod
    def at(cls, target: Path) -> _Other | None:
        """Open the lock at a path again, since only opening makes a network file system's client query the server."""
        try:
            descriptor = opened(target, os.O_RDWR)
        except FileNotFoundError:
            return None
        return cls(descriptor, _read(target), _lock(descriptor), os.fstat(descriptor).st_mtime_ns)

    @property
    def decided_here(self) -> bool:
        """True if the OS lock alone decides who comes next, since all candidates are processes of this kernel."""
        return bool(self.locked) and self.holder is not None and self.holder.local


class _Judge:
    """Repeated check whether a holder is gone, until the answer is certain."""

    def __init__(self, folder: Path, say: Callable[[str], None], patience: Patience) -> None:
        self.patience = patience
        self._folder, self._say = folder, say
        self._seen: tuple[str | None, int] | None = None
        self._since = 0.0
        self._said = False

    def is_gone(self, other: _Other) -> bool:
        """Check once; False if not yet certain. Raises: InUseError."""
        holder = other.holder
        token = holder.token if holder is not None else None
        if self._seen is None or self._seen[0] != token:
            self._seen, self._since, self._said = (token, other.mtime_ns), time.monotonic(), False
        waited = time.monotonic() - self._since
        if token is not None and _call() and token.startswith(_call()):
            return True
        if holder is not None and holder.local and other.locked is not None:
            if other.locked:
                return True
            # Wait for the ranks of a dead launcher, which end shortly after it.
            if holder.runs_here or waited > self.patience.ending_seconds:
                raise _in_use(self._folder, holder)
            if waited > 1.0:
                self._tell(f"{self._folder}: waiting for the last processes of {holder} to end")
            return False
        if holder is not None and holder.local and holder.host == socket.gethostname():
            if holder.runs_here:
                raise _in_use(self._folder, holder)
            return True
        if self._seen[1] != other.mtime_ns and holder is not None:
            raise _in_use(self._folder, holder)
        limit, who = self.patience.limit_seconds, holder or "a process that cannot be named"
        if waited < limit:
            self._tell(f"{self._folder} is held by {who}: waiting up to {limit:.0f} s for a sign of life")
            return False
        self._say(f"{self._folder}: {who} has shown no sign of life for {waited:.0f} s; its lock is taken over")
        return True

    def _tell(self, text: str) -> None:
        if not self._said:
            self._said = True
            self._say(text)

    def settle(self, own: Holder) -> None:
        """Wait for another host that may have taken over the same lock at the same moment. Raises: InUseError."""
        time.sleep(self.patience.settling_seconds)
        holder = _read(self._folder / NAME)
        if holder is not None and holder.token != own.token:
            raise _in_use(self._folder, holder)


def _in_use(folder: Path, holder: Holder) -> InUseError:
    if holder.pid == os.getpid() and holder.runs_here:
        remedy = "close the Session of this process that has it, or give another directory"
    elif holder.local and holder.host == socket.gethostname() and not holder.runs_here:
        remedy = f"it is dead, and a process that it started still runs: end that (fuser {folder / NAME} names it)"
    else:
        remedy = f"wait until that has ended, or end it (kill {holder.pid} on {holder.host}), or give another directory"
    return InUseError(
        given=str(folder), conflict=f"it is in use by {holder} since {holder.since} ({holder.command})", remedy=remedy
    )


def _begun(aside: Path, mode: int, new_folders: list[Path]) -> int:
    """Create the file `aside` and its directories; directories that were missing are added to `new_folders`."""
    for again in range(10):
        absent = itertools.takewhile(lambda path: not path.exists(), aside.parents)
        new_folders.extend(path for path in absent if path not in new_folders)
        aside.parent.mkdir(mode=mode, parents=True, exist_ok=True)
        try:
            return os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        except FileNotFoundError:  # the process that created the directory has just removed it
            if again == 9:
                raise
    raise AssertionError("returned or raised")


def _unmake(new_folders: list[Path]) -> None:
    for path in new_folders:
        with contextlib.suppress(OSError):  # the directory is not empty
            path.rmdir()


# A process that examines an unlocked file holds its OS lock for a moment.
_EXAMINED_SECONDS = 5.0


def _fill(descriptor: int, holder: Holder) -> None:
    """Write the holder to the file and take its OS lock. Raises: OSError if another process keeps the OS lock."""
    os.write(descriptor, (json.dumps(asdict(holder), indent=2) + "\n").encode())
    until = time.monotonic() + _EXAMINED_SECONDS
    while _lock(descriptor) is False:
        if time.monotonic() > until:
            raise OSError(errno.EWOULDBLOCK, "another process keeps the lock of its own file")
        time.sleep(0.01)


def _put(aside: Path, target: Path, descriptor: int, holder: Holder) -> int | None:
    """Put the lock file at `target`. Return its descriptor, or None if another lock is there."""
    try:
        os.link(aside, target)
        return descriptor
    except FileExistsError:
        # A network file system may create the link and still report an error.
        return descriptor if os.fstat(descriptor).st_nlink > 1 else None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    try:
        own_descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return None
    _fill(own_descriptor, holder)
    return own_descriptor


def _lock(descriptor: int) -> bool | None:
    """Try to take the OS lock of the file. Return whether it worked, or None if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return True


def _read(target: Path) -> Holder | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        document = read_object(target)
        return Holder(**{field.name: document[field.name] for field in fields(Holder)})
    return None


def is_held(folder: Path, patience: Patience | None = None) -> bool:
    """Check once, without waiting, whether a run seems to train in the directory."""
    holder = _read(folder / NAME)
    if holder is None or holder.runs_here:
        return holder is not None
    if holder.local and holder.host == socket.gethostname():
        return False
    with contextlib.suppress(OSError):
        return time.time() - (folder / NAME).stat().st_mtime < (patience or Patience()).limit_seconds
    return False


def held_since(folder: Path) -> float | None:
    """Return when the holder took the directory, in seconds since the epoch, or None if unknown."""
    holder = _read(folder / NAME)
    with contextlib.suppress(ValueError):
        return datetime.strptime(holder.since if holder else "", _SINCE).replace(tzinfo=UTC).timestamp()
    return None


def _same(path: Path, descriptor: int) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False


FOLDER = "generations"
_ASIDE = re.compile(r"\.(\d{6,})\.tmp$")
# Intervals at which a process that does not write checks the fence.
_LOOK_SECONDS, _SELDOM_SECONDS = 0.5, 5.0


def unwritten(path: Path, error: OSError) -> StorageError:
    """Return the error for a file of a run that could not be written."""
    return StorageError(
        given=str(path),
        conflict=f"it could not be written: {error}",
        remedy="mend the disk; --resume goes on from the newest checkpoint that is there",
    )


@dataclass(frozen=True)
class Fence:
    """Right of one generation's processes to write into a run directory. Without a folder, the fence is always open."""

    folder: Path | None = None
    generation: int = 0

    @classmethod
    def next(
        cls,
        folder: Path,
        world_size: int,
        reason: str,
        after: Fence | None = None,
        *,
        resizable: bool = False,
        gpus: int = 0,
    ) -> Fence:
        """Start the next generation, in a process that has locked the directory.

        Args:
            after: the generation to replace.
            resizable: whether the caller can continue with another number of processes.
            gpus: number of GPUs that the caller sees, if resizable.

        Raises: FencedError if another process has started a generation since; RunDirectoryError if nothing can be
        written.
        """
        place = folder / FOLDER
        try:
            place.mkdir(exist_ok=True)
            if after is not None:
                after.check()
            # The working copy of an address has no files of generations, and records of a lower one would not count.
            attempts = objects_of(RunDirectory(folder).attempts)
            known = [one["generation"] for one in attempts if isinstance(one.get("generation"), int)]
            fence = cls(folder, max([newest(folder), *known]) + 1)
            said = {"generation": fence.generation, "world_size": world_size, "reason": reason, "resizable": resizable}
            said |= {"gpus": gpus} if resizable else {}
            said |= {"host": socket.gethostname(), "pid": os.getpid(), "began_at": round(time.time(), 3)}
            with contextlib.suppress(FileExistsError), open(fence._path, "x", encoding="utf-8") as file:
                file.write(json.dumps(said) + "\n")
                fence.check()
                # Remove the files of earlier generations, and then their temporary files.
                for path in place.iterdir():
                    if path.name.isdecimal() and int(path.name) < fence.generation:
                        path.unlink(missing_ok=True)
                for aside in folder.glob(".*.tmp"):
                    match = _ASIDE.search(aside.name)
                    if match is not None and int(match[1]) < fence.generation:
                        aside.unlink(missing_ok=True)
                return fence
        except OSError as error:
            raise RunDirectoryError(
                given=str(folder),
                conflict=f"nothing can be written there: {error.strerror or error}",
                remedy="give a directory that can be written to",
            ) from None
        raise fence._error()

    @property
    def _path(self) -> Path:
        assert self.folder is not None, "a fence has a folder"
        return self.folder / FOLDER / f"{self.generation:06d}"

    @property
    def is_open(self) -> bool:
        """True if no later generation has started, also for a missing directory, since writing fails there anyway."""
        if self.folder is None:
            return True
        # Opening a name makes a network file system's client refresh its cached listing.
        with contextlib.suppress(OSError), self._path.open("rb"):
            pass
        return newest(self.folder) <= self.generation

    def check(self) -> None:
        """Check the fence just before a commit. Raises: FencedError if a later generation has started."""
        if not self.is_open:
            raise self._error()

    def write(self, path: Path, text: str) -> None:
        """Write a file atomically. Raises: OSError; FencedError."""
        aside = write_aside(path, text, f".{self.generation:06d}")
        if not self.is_open:
            aside.unlink(missing_ok=True)
            raise self._error()
        try:
            aside.replace(path)
        except FileNotFoundError:
            self.check()  # the next generation may have removed it
            raise

    def append(self, path: Path, line: str) -> None:
        """Append a line. Raises: OSError; FencedError."""
        self.check()
        append_text(path, line + "\n")

    def _error(self) -> FencedError:
        assert self.folder is not None, "a fence without a folder is open"
        now = newest(self.folder)
        said = about(self.folder, now)
        by = f", by process {said['pid']} on {said['host']} ({said['reason']})" if "pid" in said else ""
        host = socket.gethostname()
        error = FencedError(
            given=f"process {os.getpid()} on {host}, of generation {self.generation} of {self.folder}",
            conflict=f"generation {now} has begun{by}, while this process stood still or could not be reached",
            remedy="nothing: this process is fenced, has written nothing since, and ends; the run goes on without it",
        )
        error.host = host
        return error

    @contextlib.contextmanager
    def watched(self, *, says: bool, seldom: bool = False) -> Iterator[None]:
        """Run a context in which this process ends, with code 69, soon after a later generation has started."""
        if self.folder is None:
            yield
            return
        over = threading.Event()

        def watch() -> None:
            while not over.wait(_SELDOM_SECONDS if seldom else _LOOK_SECONDS):
                if not self.is_open:
                    error = self._error()
                    if says:
                        with contextlib.suppress(OSError, ValueError):
                            print(error.render(), file=sys.stderr, flush=True)
                    os._exit(error.exit_code)

        thread = threading.Thread(target=watch, name="fence", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def newest(folder: Path) -> int:
    """Return the number of the newest generation of a run directory, or 0 if there is none."""
    with contextlib.suppress(OSError):
        return max((int(name) for name in os.listdir(folder / FOLDER) if name.isdecimal()), default=0)
    return 0


def about(folder: Path, generation: int) -> dict[str, Any]:
    """Return the facts in a generation's file: world_size, reason, resizable, gpus, host, pid, began_at; or {}."""
    return read_json(folder / FOLDER / f"{generation:06d}") or {}


def withdraw(folder: Path) -> None:
    """Remove the generations from a directory that contains nothing else, before its lock is released."""
    with contextlib.suppress(OSError):
        if set(os.listdir(folder)) <= {FOLDER, NAME}:
            shutil.rmtree(folder / FOLDER)


# What job.json of a training in a user's own loop names as its function.
SESSION = "shoal.Session"


class RunDirectory:
    """The files of one run under one directory."""

    def __init__(self, path: Path, shown: str | None = None) -> None:
        """Create the value. `shown`: the directory's name in messages, if `path` is a working copy."""
        self.path, self.shown = path, shown or str(path)
        # File, function, settings and numbers of the job. This file marks a directory as a run directory.
        self.job = path / "job.json"
        self.plan = path / "plan.toml"  # the complete plan
        self.trial = path / "trial.json"  # which steps ran in which mode, if any were tried
        self.records = path / "records.jsonl"  # one step per line
        self.attempts = path / "attempts.jsonl"  # start and end of each call and restart
        self.events = path / "events.jsonl"  # one incident per line
        self.result = path / "result.json"  # how the run ended
        self.checkpoints = path / "checkpoints"  # one directory per checkpoint
        self.saved = path / "saved.json"  # the step of the newest checkpoint
        self.resize = path / "resize.json"  # the requested number of processes
        self.model = path / "model"  # configuration of a Transformers model
        self.errors = path / "errors"  # tracebacks, one text file per rank

    def trace(self, steps: str) -> Path:
        """Return the path of the trace of these steps."""
        return self.path / f"trace-{steps}.json.gz"

    def holds_run(self) -> bool:
        """Check whether a run has trained here. A run that failed before its first step does not count."""
        if not self.job.exists():
            return False
        result = read_json(self.result)
        return not (result and result.get("status") == "failed" and result.get("steps") == 0)

    def discard_failed_start(self) -> None:
        """Empty the directory if a start failed here before a step and nothing but its own description is there.

        A killed run has no result, and one that has begun its steps has attempts: both stay, as all with a traceback,
        logs or incidents.
        """
        result = read_json(self.result)
        failed = result.get("status") == "failed" and result.get("steps") == 0 if result else not self.attempts.exists()
        own = {path.name for path in (self.job, self.plan, self.trial, self.result, self.attempts, self.records)}
        own |= {"source", FOLDER, self.model.name}
        there = {path.name: path for path in self.path.iterdir() if path.name != "lock.json"}
        empty = [path for path in there.values() if path.is_dir() and not any(path.iterdir())]
        has_steps = self.records.exists() and self.records.stat().st_size > 0
        if failed and not has_steps and not there.keys() - own - {path.name for path in empty}:
            for path in there.values():
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def request_resize(self, devices: int) -> None:
        """Ask the run to continue with another number of processes, replacing a pending request. Raises: OSError."""
        write_file(self.resize, json.dumps({"devices": devices}) + "\n")

    def requested_devices(self) -> int | None:
        """Return the requested number of processes, or None."""
        devices = (read_json(self.resize) or {}).get("devices")
        return devices if isinstance(devices, int) and devices > 0 else None

    def end_resize(self) -> None:
        """Remove the request for another number of processes."""
        with contextlib.suppress(OSError):
            self.resize.unlink(missing_ok=True)

    def keep_traceback(self, who: str, error: ShoalError) -> None:
        """Write an error's traceback, if it has one, to a file named after the process that raised the error."""
        if error.traceback_text:
            self.errors.mkdir(exist_ok=True, parents=True)
            write_file(self.errors / f"{who}.txt", error.traceback_text)
            error.traceback_file = str(self.errors / f"{who}.txt")

    def check(self, resume: bool) -> None:
        """Check that a new run overwrites no run, or that there is a run to resume. Raises: RunDirectoryError."""
        given = f"--out {self.shown}"
        parent = next(p for p in (self.path, *self.path.absolute().parents) if p.exists())
        if self.path.exists() and not self.path.is_dir():
            conflict, remedy = "that is a file", "give a directory that is new or empty"
        elif resume and not self.job.exists():
            given, conflict = f"--resume {given}", "no run began there (it has no job.json)"
            remedy = "give the directory of the run to resume, or leave --resume out"
        elif (read_json(self.job) or {}).get("function") == SESSION:
            conflict = "it holds the training of a loop with shoal.Session"
            remedy = f"go on with it by Session(checkpoints={self.shown!r}, resume=True), or give another --out"
        elif not resume and self.holds_run():
            conflict = "it holds a run, and nothing is overwritten"
            remedy = "add --resume to go on with that run, or give another --out"
        elif not parent.is_dir():
            conflict, remedy = f"{parent} is a file", "give another --out"
        elif not os.access(parent, os.W_OK):
            conflict, remedy = f"{parent} is not writable", "give another --out"
        else:
            return
        raise RunDirectoryError(given=given, conflict=conflict, remedy=remedy)


@contextlib.contextmanager
def guarded_files(private: bool) -> Iterator[None]:
    """Let no new file or folder of this process be writable by others; with `private`, not readable either.

    The umask may be stricter. Processes that are started in the context inherit it.
    """
    before = os.umask(0o077)
    os.umask(before | (0o077 if private else 0o022))
    try:
        yield
    finally:
        os.umask(before)


def default_directory(name: str, resume: bool, in_use: Container[Path] = ()) -> Path:
    """Return runs/NAME or the first unused runs/NAME-2, ...; for a resume, return the last one that has a run."""
    number, path, newest = 1, Path("runs") / name, Path("runs") / name
    while RunDirectory(path).holds_run() or path in in_use:
        newest = path
        number += 1
        path = Path("runs") / f"{name}-{number}"
    return newest if resume else path


def write_file(path: Path, text: str) -> None:
    """Write a file atomically, without following a link at its temporary name. Raises: OSError."""
    write_aside(path, text).replace(path)


def write_aside(path: Path, text: str, mark: str = "") -> Path:
    """Write a temporary file next to `path`, following no link, and return its path. Raises: OSError."""
    aside = path.with_name(f".{path.name}{mark}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    try:
        with open(os.open(aside, flags, 0o644), "w", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    return aside


def read_json(path: Path, *, exactly: bool = False) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if it is missing or damaged. `exactly`: as for `json_value`."""
    try:
        return read_object(path, exactly=exactly)
    except (OSError, ValueError):
        return None
