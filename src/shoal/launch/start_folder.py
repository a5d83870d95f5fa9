"""Folder of one start of ranks, under the system's temporary files; what a killed launcher left there is removed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX, _LOCK = "shoal-", "launcher.lock"


class StartFolder:
    """Folder of this process's, until `close`. An OS lock in it says that the process lives; its children have none."""

    def __init__(self) -> None:
        remove_left(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        aside = self.path / f".{_LOCK}"
        self._lock = os.open(aside, os.O_RDWR | os.O_CREAT, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks: then nobody takes it for left over
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            aside.rename(self.path / _LOCK)

    def close(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_left(place: Path) -> None:
    """Removes the folders there of this user's launchers that are dead."""
    for lock in place.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):
            descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.getuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(descriptor)
