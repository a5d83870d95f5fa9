"""Standard output and error of a command, whose writes never fail: text that nobody takes is dropped."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

_STREAMS = (("stdout", 1, contextlib.redirect_stdout), ("stderr", 2, contextlib.redirect_stderr))


class _UnfailingFile(io.FileIO):
    """A file whose writes succeed: a closed pipe, a terminal that is gone or a full disk takes no more of the text."""

    def write(self, data: Any, /) -> int:
        try:
            written = super().write(data)
        except OSError:
            written = None
        return len(data) if written is None else written


@contextlib.contextmanager
def unfailing_output() -> Iterator[None]:
    """A context in which no print fails, neither of shoal nor of the job's own code, nor in processes forked in it.

    A stream that is not Python's own (a test's, a notebook's) stays; one that is closed already takes all.
    """
    with contextlib.ExitStack() as redirected:
        for name, descriptor, redirect in _STREAMS:
            stream = _unfailing(getattr(sys, name), descriptor)
            if stream is not None:
                redirected.callback(stream.flush)
                redirected.enter_context(redirect(stream))
        yield


def _unfailing(stream: TextIO | None, descriptor: int) -> TextIO | None:
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    if type(stream) is not io.TextIOWrapper or not isinstance(getattr(stream.buffer, "raw", stream.buffer), io.FileIO):
        return None
    with contextlib.suppress(OSError):
        stream.flush()
    raw = _UnfailingFile(descriptor, "wb", closefd=False)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),  # PYTHONUNBUFFERED, python -u
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
