"""Function calls in a child process, so that no import or data of the call (torch, a job) stays in the launcher."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from shoal.errors import ExitCode, LaunchError, ShoalError
from shoal.launch.signals import Signals, stop_signals

_POLL_SECONDS = 0.02


def fork(work: Callable[[], None]) -> int:
    """Fork a child that calls `work` and ends, with code 1 if `work` raises. Return its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads: the child uses no thread of this process
        child = os.fork()
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


def in_child(work: Callable[[], dict[str, Any]], seconds: float = math.inf) -> dict[str, Any]:
    """Return the result of `work` from a child process that has ended when this returns.

    Args:
        work: function that returns a JSON value.
        seconds: time limit.

    Raises:
        LaunchError: the child died or ran longer than `seconds`.
        SystemExit: a signal asked to stop; the child has been killed.
    """
    until = time.monotonic() + seconds
    signals = Signals(impatient=False)
    reader, writer = os.pipe()

    def told() -> None:
        os.close(reader)
        for number in stop_signals():
            signal.signal(number, signal.SIG_DFL)
        text = json.dumps(work()).encode()
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(text)

    ready, is_late = False, False
    with signals.handled():
        child = fork(told)
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
        raise LaunchError(
            given="a look at the job before any rank is started",
            conflict=f"the process that loaded it ended with code {code} and without a word",
            remedy="load the job by itself under `python`: its file crashes or ends the interpreter",
        )
    found: dict[str, Any] = json.loads(text)
    return found


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
