"""Standard output and error of a command, whose writes never fail: text that cannot be written is dropped."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

_STREAMS = (("stdout", 1, contextlib.redirect_stdout), ("stderr", 2, contextlib.redirect_stderr))


class _UnfailingFile(io.FileIO):
    """File whose writes always succeed. A closed pipe, a lost terminal or a full disk drops the text."""

    def write(self, data: Any, /) -> int:
        try:
            written = super().write(data)
        except OSError:
            written = None
        return len(data) if written is None else written


@contextlib.contextmanager
def unfailing_output() -> Iterator[None]:
    """Run a context in which no print fails, in shoal, in the job's own code or in forked processes.

    A stream that is not Python's own (in a test or a notebook) is unchanged. A closed stream drops all text.
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
