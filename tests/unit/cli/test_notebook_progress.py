"""Progress in a notebook: lines about steps change one element, all others stay lines."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.cli.notebook_progress import MARK, ProgressDisplay, html_of, progress_stream, record_line


class Handle:
    def __init__(self) -> None:
        self.shown: list[Any] = []

    def update(self, what: Any, *, raw: bool) -> None:
        assert raw, "it is text by type, not an object"
        self.shown.append(what)


TEXT = f"shoal 0.1: job\n{record_line(1, 4, 'step 1/4')}\na note\n{record_line(4, 4, 'loss < 1')}\ncompleted\n"


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_steps_change_the_element_and_notes_are_lines(size: int) -> None:
    """However the text is cut on its way."""
    stream, handle = io.StringIO(), Handle()
    display = ProgressDisplay(stream, handle)
    for begin in range(0, len(TEXT), size):
        display.write(TEXT[begin : begin + size])
    display.flush()
    assert stream.getvalue() == "shoal 0.1: job\na note\ncompleted\n"
    assert [one["text/plain"] for one in handle.shown] == ["step 1/4", "loss < 1"]
    assert 'value="4" max="4"' in handle.shown[-1]["text/html"]
    assert "loss &lt; 1" in handle.shown[-1]["text/html"]


def test_a_line_that_has_begun_is_shown_at_once() -> None:
    stream = io.StringIO()
    display = ProgressDisplay(stream, Handle())
    display.write("Password")
    assert stream.getvalue() == "Password"
    display.write(f": \n{MARK}")
    assert stream.getvalue() == "Password: \n"


def test_no_steps_at_all_are_no_error() -> None:
    assert 'max="1"' in html_of(0, 0, "")


def test_outside_of_a_kernel_there_are_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    assert progress_stream(None) == (None, False)
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert progress_stream(stream) == (stream, False)
    for shell in (None, SimpleNamespace()):  # no shell; that of a terminal
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda shell=shell: shell))
        assert progress_stream(stream) == (stream, False)


def test_a_kernel_that_shows_nothing_has_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, shell = io.StringIO(), SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    shown = SimpleNamespace(display=lambda what, **_: None)
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    assert progress_stream(stream) == (stream, False)
    handle = Handle()
    shown.display = lambda what, **_: handle
    found, takes_steps = progress_stream(stream)
    assert takes_steps
    assert isinstance(found, ProgressDisplay)
