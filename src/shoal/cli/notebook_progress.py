"""Progress of a run in a notebook: one element of the cell that is updated, of what rank 0 says of its steps."""

from __future__ import annotations

import importlib
import io
import json
import sys
from html import escape
from typing import Any, TextIO

# What a line about a step begins with: no text of a job does.
MARK = "\x1e"


def record_line(step: int, last: int, text: str) -> str:
    """A line about a step, for a `ProgressDisplay` in another process."""
    return MARK + json.dumps({"step": step, "last": last, "text": text})


def progress_stream(stream: TextIO | None) -> tuple[TextIO | None, bool]:
    """The stream that shows a run's output, and whether it takes lines about steps: in a notebook's kernel it does."""
    kernel = getattr(_shell(), "kernel", None) if stream is not None else None
    if stream is None or kernel is None:
        return stream, False
    try:
        handle = importlib.import_module("IPython.display").display(_Shown(""), display_id=True)
    except Exception:  # whatever shows things here: lines serve too
        return stream, False
    if handle is None:
        return stream, False
    shown: Any = ProgressDisplay(stream, handle)
    return shown, True


def _shell() -> Any:
    """IPython's shell, if this process has one."""
    module = sys.modules.get("IPython")
    return module.get_ipython() if module is not None and hasattr(module, "get_ipython") else None


class _Shown:
    """HTML with the same as text, for displays that show no HTML."""

    def __init__(self, html: str, text: str = "") -> None:
        self._html, self._text = html, text

    def _repr_html_(self) -> str:
        return self._html

    def __repr__(self) -> str:
        return self._text


class ProgressDisplay(io.TextIOBase):
    """Text stream whose lines about steps change a display's one element; all else goes on to another stream."""

    def __init__(self, stream: TextIO, handle: Any) -> None:
        """`handle` has an `update`, as a display handle of IPython."""
        self._stream, self._handle, self._begun = stream, handle, ""

    def write(self, text: str) -> int:
        """Takes text in pieces of any size; the number of characters."""
        *whole, self._begun = (self._begun + text).split("\n")
        passed = "".join(f"{line}\n" for line in whole if not self._show(line))
        if self._begun and not self._begun.startswith(MARK):  # a line that has only begun is shown at once
            passed, self._begun = passed + self._begun, ""
        self._stream.write(passed)
        return len(text)

    def _show(self, line: str) -> bool:
        """Whether a line is about a step, which is shown."""
        if not line.startswith(MARK):
            return False
        try:
            told = json.loads(line[len(MARK) :])
            self._handle.update(_Shown(html_of(told["step"], told["last"], told["text"]), told["text"]))
        except Exception:  # a line of the job's own, or a kernel that shows nothing now: never a reason to stop
            return False
        return True

    def flush(self) -> None:
        """Flushes the other stream."""
        self._stream.flush()


def html_of(step: int, last: int, text: str) -> str:
    """A bar with the share of all steps that is done, and what there is to say of the last."""
    bar = f'<progress value="{step}" max="{max(1, last)}" style="width: 20em; vertical-align: middle"></progress>'
    return f'<div>{bar} <span style="font-family: monospace; white-space: pre-wrap">{escape(text)}</span></div>'
