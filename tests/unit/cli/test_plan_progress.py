"""The line that a long search shows."""

from __future__ import annotations

from io import StringIO

import pytest

from shoal.cli.plan import SearchProgress


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal(), StringIO()])
def test_a_short_search_shows_nothing(stream: StringIO) -> None:
    progress = SearchProgress(stream, iter([0.0, *[1.9] * 10]).__next__)
    for _ in range(640):
        progress.step()
    progress.end()
    assert stream.getvalue() == ""


def test_after_two_seconds_a_file_has_one_line() -> None:
    stream, times = StringIO(), iter([0.0, 1.0, 2.5, 3.0, 9.0])
    progress = SearchProgress(stream, times.__next__)
    for _ in range(256):
        progress.step()
    progress.end()
    assert stream.getvalue() == "searching: 128 groups of plans in 2 s ...\n"


def test_on_a_terminal_it_is_renewed_in_place_and_cleared() -> None:
    stream, times = Terminal(), iter([0.0, 2.5, 2.6, 3.0])
    progress = SearchProgress(stream, times.__next__)
    for _ in range(192):
        progress.step()
    progress.end()
    first, second = "searching: 64 groups of plans in 2 s", "searching: 192 groups of plans in 3 s"
    assert stream.getvalue() == f"\r{first}\r{second}\r{' ' * len(second)}\r"
