"""Writer of step records to a file."""

from __future__ import annotations

import contextlib
import errno
import os
import time
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path

from shoal.runs.directory_lock import Fence
from shoal.runs.records import StepRecord, read_steps

# Maximum records that wait for a disk (older ones are dropped), and the time between two attempts.
_MOST_LATE, _RETRY_SECONDS = 10_000, 1.0
# Records are written when this many wait, or with the first record after this time.
_TOGETHER, _TOGETHER_SECONDS = 64, 0.05


class RecordWriter:
    """Writer of step records, one line each. If the disk refuses, it warns once and writes the records later.

    Lines of short steps are written together, about 50 ms late: single writes would cost a step several times as much.
    `forgotten` is called with the records of steps that are about to be trained again.
    """

    def __init__(
        self,
        path: Path | None,
        forgotten: Callable[[list[StepRecord]], None] | None = None,
        fence: Fence | None = None,
    ) -> None:
        self._path, self._forgotten, self._fence = path, forgotten, fence or Fence()
        self._file = path.open("ab", buffering=0) if path else None
        self._waiting: deque[StepRecord] = deque(maxlen=_MOST_LATE)
        self._next = 0.0  # earliest time of the next write
        self._refused = False

    def write(self, record: StepRecord) -> None:
        """Append one line. It is written at once, by `flush`, or with the first record after 50 ms."""
        if self._file is None:
            return
        self._waiting.append(record)
        if time.monotonic() >= self._next or (len(self._waiting) >= _TOGETHER and not self._refused):
            self.flush()

    def flush(self) -> None:
        """Write the waiting lines; they keep waiting if the operating system refuses them."""
        if self._file is None or not self._waiting:
            return
        lines = "".join(f"{record.to_line()}\n" for record in self._waiting).encode()
        try:
            written = self._file.write(lines)
            if written != len(lines):  # half a line would spoil the next one
                os.ftruncate(self._file.fileno(), os.fstat(self._file.fileno()).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except (OSError, ValueError) as error:
            self._next = time.monotonic() + _RETRY_SECONDS
            if not self._refused:
                self._refused = True
                text = f"step records are kept until they can be written: {self._path}: {error}"
                warnings.warn(text, RuntimeWarning, stacklevel=3)
        else:
            self._waiting.clear()
            self._next, self._refused = time.monotonic() + _TOGETHER_SECONDS, False

    def forget_after(self, step: int) -> None:
        """Drop the records of steps after `step`, which are about to be trained again."""
        self.flush()
        if self._path is None or self._file is None:
            return
        try:
            self._file.close()
            records = list(read_steps(self._path))
            for late in [one for one in self._waiting if one.step > step]:
                self._waiting.remove(late)
            lines = [record.to_line() + "\n" for record in records if record.step <= step]
            self._fence.write(self._path, "".join(lines))  # a new file: an earlier generation appends to the old one
            self._file = self._path.open("ab", buffering=0)
            if self._forgotten is not None and len(lines) < len(records):
                self._forgotten([record for record in records if record.step > step])
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._waiting.clear()
            self.close()
            warnings.warn(f"no more step records: {self._path}: {error}", RuntimeWarning, stacklevel=3)

    def close(self) -> None:
        """Write the waiting lines if possible, and close the file."""
        self.flush()
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
