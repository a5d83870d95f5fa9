"""Output of a process that another stream than this process's own is to show: a notebook's, say."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
import threading
from typing import BinaryIO, TextIO

# A process that a rank has left behind may hold the pipe open.
_PATIENCE_SECONDS = 2.0
_CHUNK_BYTES = 1 << 16


def other_stream() -> TextIO | None:
    """sys.stdout where that is not what processes inherit: in a notebook, say; None where it is."""
    stream = sys.stdout
    if stream is None:
        return None
    own = type(stream) is io.TextIOWrapper and isinstance(getattr(stream.buffer, "raw", None), io.FileIO)
    return None if own and stream.fileno() == 1 else stream


class OutputRelay:
    """A pipe whose text a thread writes to a stream; `writer` is for the process that is to be heard."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._reader, descriptor = os.pipe()
        self.writer: BinaryIO = os.fdopen(descriptor, "wb")
        self._thread = threading.Thread(target=self._relay, name="shoal-output", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Waits until all is written that a process has said which has ended."""
        self.writer.close()
        self._thread.join(_PATIENCE_SECONDS)

    def _relay(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        with os.fdopen(self._reader, "rb", buffering=0) as pipe:
            while chunk := pipe.read(_CHUNK_BYTES):
                with contextlib.suppress(OSError, ValueError):  # nobody takes it any more
                    self._stream.write(decoder.decode(chunk))
                    self._stream.flush()
