"""Python commands as forks of one process that has imported torch and shoal: 20 ms each instead of three seconds.

`Popen` is subprocess.Popen but for how a Python command comes to be. A server forks, and the child takes on what exec
would have given it: arguments, environment (in /proc too), directory, descriptors, session, signals. What it starts in
turn, as `shoal run` its ranks, are forks of it, and so its own children. What is not as after exec: modules are loaded,
strings have the same hashes in every process, and a process ends without taking its modules down. A test that is about
any of these takes a real interpreter, and so does one of each way of starting: tests/starting.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib.machinery
import inspect
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.hidden import Hidden

# What Python, the loader or a library reads once, when it starts; threads and path can be set later.
_READ_AT_START = (
    "PYTHON",
    "LANG",
    "LC_",
    "LD_",
    "MALLOC_",
    "OMP_",
    "MKL_",
    "KMP_",
    "GOMP_",
    "OPENBLAS_",
    "TORCH_LOGS",
    "CUDA_",
)
_THREADS, _PATH = "OMP_NUM_THREADS", "PYTHONPATH"
# /proc/PID/environ is as long as the environment that a process was started with.
_SPACE = {"SPACE_FOR_ANOTHER_ENVIRONMENT": "x" * (1 << 16)}
_PIPE_ENDS = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
_FRESH = "SHOAL_TESTS_FRESH"  # 1 takes interpreters for all
_OBSERVER = "SHOAL_OBSERVER"
_INTERPRETER = subprocess.Popen  # also where a test puts a fork in its place
_EXECUTE = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
_MOST_BYTES = 1 << 17
_PID, _STATUS = struct.Struct("q"), struct.Struct("i")


@dataclass(frozen=True)
class _Image:
    """What a forked process becomes."""

    arguments: list[str]  # of the interpreter
    variables: dict[str, str]
    folder: str
    own_session: bool
    passed: tuple[int, ...] = ()


def _image(asked: Mapping[str, Any]) -> _Image | None:
    """By the arguments of Popen._execute_child; None where it takes an interpreter of its own."""
    command = asked["args"]
    if isinstance(command, str | bytes) or not command or os.fspath(command[0]) != sys.executable:
        return None
    arguments = [os.fspath(word) for word in command[1:]]
    rest = arguments[2:] if arguments[:2] == ["-W", "ignore"] else arguments
    known = bool(rest) and (rest[0] in ("-m", "-c") or not rest[0].startswith("-"))
    variables = dict(os.environ if asked["env"] is None else asked["env"])
    other = (
        asked["preexec_fn"]
        or asked["shell"]
        or variables.get(_FRESH)
        or _OBSERVER in os.environ  # this process is observed, and so is what it starts
        or _read_at_start(variables) != _read_at_start(os.environ)
    )
    if not known or other or sys.platform != "linux":
        return None
    folder = os.fspath(asked["cwd"] or Path.cwd())
    return _Image(arguments, variables, folder, bool(asked["start_new_session"]), tuple(asked["pass_fds"]))


def _read_at_start(variables: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in variables.items() if k.startswith(_READ_AT_START) and k not in (_THREADS, _PATH)}


class _Forked(subprocess.Popen[Any]):
    """A Popen whose Python commands are forks of the process that calls it."""

    def _execute_child(self, *words: Any, **named: Any) -> None:
        asked = _EXECUTE.bind(self, *words, **named).arguments
        image = _image(asked)
        if image is None:
            super()._execute_child(*words, **named)  # type: ignore[misc]
            return
        ends = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        try:
            self.pid = self._fork(image, [standard if end == -1 else end for standard, end in enumerate(ends)])
            self._child_created = True
        finally:
            self._close_pipe_fds(*(asked[name] for name in _PIPE_ENDS))  # type: ignore[attr-defined]

    def _fork(self, image: _Image, ends: list[int]) -> int:
        sys.stdout.flush()  # what is buffered is not the child's to write
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the child uses none that are here
            pid = os.fork()
        if not pid:
            weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # nor are temporary folders to remove
            _become(image, ends)
        return pid


class Popen(_Forked):
    """A Popen whose Python commands are forks of the server."""

    _says: int | None = None  # the end of a pipe, where the server says how the process has ended

    def _fork(self, image: _Image, ends: list[int]) -> int:
        assert not image.passed, "the server has no descriptors of this process"
        self._says, writer = os.pipe()
        try:
            _server().ask(image, [*ends, writer])
        finally:
            os.close(writer)
        text = os.read(self._says, _PID.size)
        assert text, "the server of forks has ended"
        return int(_PID.unpack(text)[0])

    def _internal_poll(self, _deadstate: int | None = None, *rest: Any) -> int | None:
        if self._says is None:
            found: int | None = super()._internal_poll(_deadstate, *rest)  # type: ignore[misc]
            return found
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._says is not None and self.returncode is None:
            select.select([self._says], [], [], timeout)
        found: int = super()._wait(timeout)  # type: ignore[misc]
        return found

    def _try_wait(self, flags: int) -> tuple[int, int]:
        if self._says is None:
            found: tuple[int, int] = super()._try_wait(flags)  # type: ignore[misc]
            return found
        if flags and not select.select([self._says], [], [], 0)[0]:
            return 0, 0
        text = os.read(self._says, _STATUS.size)
        os.close(self._says)
        self._says = None
        return self.pid, int(_STATUS.unpack(text)[0]) if text else signal.SIGKILL


def run(command: list[str], *, timeout: float, **named: Any) -> subprocess.CompletedProcess[str]:
    """As subprocess.run with captured texts. Raises: subprocess.TimeoutExpired."""
    with Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **named) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


# -------------------------------------------------------------------------------------------------------- the server


class _Server:
    """A process that forks; it ends with this one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = _INTERPRETER(
                [sys.executable, "-m", "tests.forks", str(theirs.fileno())],
                cwd=Path(__file__).resolve().parents[1],
                env={k: v for k, v in os.environ.items() if k != _THREADS} | _SPACE,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def ask(self, image: _Image, descriptors: list[int]) -> None:
        """For a process with these as its standard descriptors, and one more where to say its id and its end."""
        text = json.dumps(asdict(image)).encode()
        assert len(text) < _MOST_BYTES
        with self._lock:
            socket.send_fds(self._requests, [text], descriptors)

    def close(self) -> None:
        """Ends it, and what it has started."""
        self._requests.close()
        self._process.wait(30)


@functools.cache
def _server() -> _Server:
    found = _Server()
    atexit.register(found.close)
    return found


def _serve(requests: socket.socket) -> tuple[_Image, list[int]]:
    """Forks as it is asked to until nobody can ask: what a child is to become, and its descriptors."""
    running: dict[int, int] = {}
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writer)
    while True:
        ready = select.select([requests, reader], [], [])[0]
        if reader in ready:
            os.read(reader, 4096)
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with contextlib.suppress(BrokenPipeError):
                    os.write(running[pid], _STATUS.pack(status))
                os.close(running.pop(pid))
        if requests in ready:
            text, descriptors, _, _ = socket.recv_fds(requests, _MOST_BYTES, 4)
            if not text:
                break
            pid = os.fork()
            if not pid:
                fields = json.loads(text)
                return _Image(**{**fields, "passed": tuple(fields["passed"])}), descriptors
            running[pid] = descriptors.pop()
            for descriptor in descriptors:
                os.close(descriptor)
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(0)


@functools.cache
def _usual_threads() -> int:
    """What torch uses where the environment does not say; asked first in a process that nobody has changed."""
    return int(importlib.import_module("torch").get_num_threads())


# --------------------------------------------------------------------------------------------------------- the child


def _become(image: _Image, descriptors: list[int]) -> NoReturn:
    """Does what the image says until the process ends."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if image.own_session:
        os.setsid()
    os.chdir(image.folder)
    says = descriptors[3] if len(descriptors) > 3 else None
    _take(descriptors[:3], {*image.passed, *([says] if says is not None else [])})
    os.environ.clear()
    os.environ.update(image.variables)
    _show(image.variables)
    if says is not None:
        os.write(says, _PID.pack(os.getpid()))
        os.close(says)
    threads = image.variables.get(_THREADS, "")
    sys.modules["torch"].set_num_threads(int(threads) if threads.isdecimal() else _usual_threads())  # type: ignore[attr-defined]
    sys.modules["numpy.random"].seed()  # or all forks would draw the same
    subprocess.Popen = _Forked  # type: ignore[misc]
    with warnings.catch_warnings():
        pass  # on the way out what was warned of once is forgotten
    _end(_done(image.arguments))


def _take(descriptors: list[int], others: set[int]) -> None:
    """Makes them the standard ones, and closes all but these and the others."""
    kept = [os.dup(descriptor) for descriptor in descriptors]
    for standard, descriptor in enumerate(kept):
        os.dup2(descriptor, standard)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in others:
            with contextlib.suppress(OSError):
                os.close(int(name))
    for descriptor in others:
        os.set_inheritable(descriptor, True)


def _show(variables: Mapping[str, str]) -> None:
    """Writes the environment to where /proc/PID/environ reads it; nothing else points there any more."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    text = b"".join(f"{name}={value}".encode(errors="surrogateescape") + b"\0" for name, value in variables.items())
    ctypes.memmove(start, text[: end - start].ljust(end - start, b"\0"), end - start)


def _done(arguments: list[str]) -> int:
    """The exit code of a Python command."""
    try:
        if arguments[:2] == ["-W", "ignore"]:
            warnings.simplefilter("ignore")
            arguments = arguments[2:]
        folders = [folder for folder in os.environ.get(_PATH, "").split(os.pathsep) if folder]
        sys.path[:0] = folders
        if importlib.machinery.PathFinder.find_spec("sitecustomize", folders):
            sys.meta_path.insert(0, Hidden.of({"torch": sys.modules.pop("torch")}))
            sys.modules.pop("sitecustomize", None)  # some distributions have one, which the server has imported
            importlib.import_module("sitecustomize")
        kind, *rest = arguments
        if kind == "-m":
            sys.argv[:] = ["-m", *rest[1:]]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.argv[:] = ["-c", *rest[1:]]
            sys.path.insert(0, "")
            main = sys.modules["__main__"] = types.ModuleType("__main__")  # whose code is not this file's
            exec(compile(rest[0], "<string>", "exec"), vars(main))
        else:
            sys.argv[:] = arguments
            sys.path.insert(0, str(Path(kind).resolve().parent))
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


def _end(code: int) -> NoReturn:
    """As an interpreter ends, but that modules are not taken down: that takes a quarter of a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code & 0xFF)


@functools.cache
def load() -> None:
    """Imports all of shoal, but what adapts frameworks that few jobs need."""
    for module in pkgutil.walk_packages(importlib.import_module("shoal").__path__, "shoal."):
        if not module.name.endswith(("__main__", "mpi_worker")) and ".adapters" not in module.name:
            importlib.import_module(module.name)
    for name in ("numpy.random", "numpy.ma", "numpy.fft", "numpy.ctypeslib", "cProfile", "encodings.idna"):
        importlib.import_module(name)
    sys.modules["shoal.cli.run.start"].load_rank()  # with the parser of requests, 10 ms in each process
    # What some commands import, and shoal looks whether they have.
    sys.meta_path.insert(0, Hidden("sklearn.datasets"))
    profiler = ("torch.profiler", "torch.profiler._cupti_monitor", "torch._subclasses.schema_check_mode")
    sys.meta_path.insert(0, Hidden("torch._dynamo", "torch.distributed.pipelining", *profiler))


def _main() -> NoReturn:
    requests = socket.socket(fileno=int(sys.argv[1]))
    del sys.path[0]  # which has `tests`
    load()
    inherited = {os.path.abspath(folder) for folder in os.environ.get(_PATH, "").split(os.pathsep) if folder}
    for name in ("tests", "tests.hidden", "__mp_main__"):  # or a job's own code would have this file and that one
        sys.modules.pop(name, None)
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) not in inherited]  # a child has its own
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # of torch's operators: 40 ms where a child ends
    _usual_threads()
    gc.collect()
    gc.freeze()  # or a collection in a child would copy every page
    _become(*_serve(requests))


if __name__ == "__main__":
    _main()
