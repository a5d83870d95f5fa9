"""Progress of a run in a notebook: one updated element of the cell, from rank 0's lines about steps."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
from html import escape
from typing import Any, TextIO

# Prefix of a line about a step, which no text of a job has.
MARK = "\x1e"


def record_line(step: int, last: int, text: str) -> str:
    """Return a line about a step, for a `ProgressDisplay` in another process."""
    return MARK + json.dumps({"step": step, "last": last, "text": text})


def progress_stream(stream: TextIO | None) -> tuple[TextIO | None, bool]:
    """Return the stream for a run's output, and whether it accepts lines about steps, as in a notebook."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None and hasattr(module, "get_ipython") else None
    kernel = getattr(shell, "kernel", None)
    handle = None
    with contextlib.suppress(Exception):  # the display failed: fall back to plain lines
        if stream is not None and kernel is not None:
            display = importlib.import_module("IPython.display").display
            handle = display({"text/plain": ""}, raw=True, display_id=True)
    if stream is None or handle is None:
        return stream, False
    shown: Any = ProgressDisplay(stream, handle)
    return shown, True


class ProgressDisplay(io.TextIOBase):
    """Text stream that shows lines about steps in one display element, and passes other text to another stream."""

    def __init__(self, stream: TextIO, handle: Any) -> None:
        """Create the stream. `handle` has a method `update`, like a display handle of IPython."""
        self._stream, self._handle, self._begun = stream, handle, ""

    def write(self, text: str) -> int:
        """Take text in pieces of any size. Return the number of characters."""
        *whole, self._begun = (self._begun + text).split("\n")
        passed = "".join(f"{line}\n" for line in whole if not self._show(line))
        if self._begun and not self._begun.startswith(MARK):  # show an incomplete line at once
            passed, self._begun = passed + self._begun, ""
        self._stream.write(passed)
        return len(text)

    def _show(self, line: str) -> bool:
        """Show a line if it is about a step. Return whether it is."""
        if not line.startswith(MARK):
            return False
        try:
            document = json.loads(line[len(MARK) :])
            html = html_of(document["step"], document["last"], document["text"])
            self._handle.update({"text/html": html, "text/plain": document["text"]}, raw=True)
        except Exception:  # a line of the job, or a display failure; never stop for it
            return False
        return True

    def flush(self) -> None:
        """Flush the other stream."""
        self._stream.flush()


def html_of(step: int, last: int, text: str) -> str:
    """Return a progress bar with the share of finished steps, followed by the text about the last step."""
    bar = f'<progress value="{step}" max="{max(1, last)}" style="width: 20em; vertical-align: middle"></progress>'
    return f'<div>{bar} <span style="font-family: monospace; white-space: pre-wrap">{escape(text)}</span></div>'
