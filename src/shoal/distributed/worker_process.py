"""Exit protocol of a rank's process towards the launcher that started it."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import signal
import sys
from pathlib import Path

from shoal.distributed.failures import to_json
from shoal.errors import ExitCode, PeerError, ShoalError
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


def tell(environment: Environment, code: ExitCode, error: ShoalError | None) -> None:
    """Tells the launcher how this rank ended; where there is none, an error is printed."""
    report = os.environ.get(REPORT_FILE)
    if report:
        told = to_json(error, environment.rank, platform.node()) if error else None
        write_file(Path(report), json.dumps({"exit_code": int(code), "error": told}))
    elif error is not None and not isinstance(error, PeerError):
        print(error.render(), file=sys.stderr)
