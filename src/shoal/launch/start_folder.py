"""Temporary folder of one start of ranks. Folders of launchers that were killed are removed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX, _LOCK = "shoal-", "launcher.lock"


class StartFolder:
    """Folder of this process until `close`. An OS lock in it, not inherited, shows that the process is alive."""

    def __init__(self) -> None:
        remove_left(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        aside = self.path / f".{_LOCK}"
        self._lock = os.open(aside, os.O_RDWR | os.O_CREAT, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks: other launchers then do not remove the folder
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            aside.rename(self.path / _LOCK)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_left(place: Path) -> None:
    """Remove the folders under `place` that belong to dead launchers of this user."""
    for lock in place.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):
            descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.getuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(descriptor)
