"""Process attributes that the kernel stores: a rank's name in `ps`, and its end together with its launcher."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from shoal.errors import ExitCode
from shoal.launch.environment import LAUNCHER_PID, LOCK_FD

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def die_with_launcher() -> None:
    """End this worker if its launcher ends, even if that is killed. The worker's commands do not inherit the lock."""
    launcher, lock = os.environ.get(LAUNCHER_PID), os.environ.pop(LOCK_FD, None)
    if lock is not None:
        os.set_inheritable(int(lock), False)
    if launcher is not None and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(launcher):  # it died before the line above; in a container it may be process 1 itself
            os._exit(ExitCode.RANK_LOST)


def name_process(name: str) -> None:
    """Set the name of this process, at most 15 characters, which `ps -e`, `top` and `pgrep` show.

    `name` must not contain blanks: Slurm's proctrack/linuxproc, among others, would not find the parent process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)
