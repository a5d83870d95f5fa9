"""Exit protocol of a rank's process towards the launcher that started it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from shoal.distributed.failures import as_shoal_error, to_json
from shoal.errors import ExitCode, InUseError, LaunchError, PeerError, ShoalError
from shoal.launch.environment import LAUNCHER_PID, LOCK_FD, REPORT_FILE, Environment
from shoal.runs.directory import write_file

_PR_SET_PDEATHSIG = 1


def die_with_launcher() -> None:
    """No worker of the local launcher outlives it, even one that was killed, and no command of its holds the lock."""
    launcher, lock = os.environ.get(LAUNCHER_PID), os.environ.pop(LOCK_FD, None)
    if lock is not None:
        os.set_inheritable(int(lock), False)
    if launcher is not None and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(launcher):  # it died before the line above; in a container it may be process 1 itself
            os._exit(ExitCode.RANK_LOST)


def _end_at_once(code: ExitCode) -> None:
    """Ends this rank, for which a new one is to start: torch's own end takes half a second on a free core.

    Functions that user code has registered with atexit are not called: one of torch's or of a library may wait for the
    peer that is lost, and ranks that were killed have not called theirs either.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def as_rank(environment: Environment, work: Callable[[], ExitCode | None], *, may_end_at_once: bool = True) -> ExitCode:
    """Exit code of `work`, done as a rank; the launcher is told how it ended, or an error is printed without one.

    `may_end_at_once`: whether a rank that lost a peer ends here, without what its callers and atexit would still do.
    """
    die_with_launcher()
    error: ShoalError | None = None
    try:
        code = work() or ExitCode.DONE
    except (Exception, SystemExit) as caught:
        error = as_shoal_error(caught)
        if error.rank is None and environment.world_size > 1:
            error.rank, error.host = environment.rank, platform.node()
        code = error.exit_code
        # Pods come and go one by one: who has missed the others, or the end of a lost one, is to try again.
        if environment.engine == "kubernetes" and isinstance(error, LaunchError | InUseError):
            code = ExitCode.RANK_LOST
    report = os.environ.get(REPORT_FILE)
    if report:
        told = to_json(error, environment.rank, platform.node()) if error else None
        path = Path(report.replace("%r", str(environment.rank)))  # of an engine's ranks, which have one variable
        try:
            write_file(path, json.dumps({"exit_code": int(code), "error": told}))
        except OSError:  # the launcher's folder is on no disk of this host
            if error is not None:
                print(error.render(), file=sys.stderr)
        else:
            if may_end_at_once and isinstance(error, PeerError) and not error.everywhere:
                _end_at_once(code)
    elif error is not None and not (isinstance(error, PeerError) and error.everywhere):  # then the culprit says it
        print(error.render(), file=sys.stderr)
    return code
