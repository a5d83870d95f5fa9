"""Relay of a process's output to a Python stream, for example in a notebook."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
import threading
from typing import BinaryIO, TextIO

# A process that a rank has left running may keep the pipe open.
_PATIENCE_SECONDS = 2.0
_CHUNK_BYTES = 1 << 16


def other_stream() -> TextIO | None:
    """Return sys.stdout if child processes do not inherit it (in a notebook, for example), else None."""
    stream = sys.stdout
    if stream is None:
        return None
    own = type(stream) is io.TextIOWrapper and isinstance(getattr(stream.buffer, "raw", None), io.FileIO)
    return None if own and stream.fileno() == 1 else stream


class OutputRelay:
    """Pipe from which a thread copies text to a stream; processes write to `writer`."""

    def __init__(self, stream: TextIO) -> None:
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
