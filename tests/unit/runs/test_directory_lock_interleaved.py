"""Generations in any interleaving: processes that take a run over and that commit to it, stopped at any line."""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import FencedError
from shoal.runs import directory
from shoal.runs.directory import Fence, newest

NAMES = ("commits", "takes over", "takes over too")
SOURCES = (directory.__file__,)


class Process:
    """A thread that stands still at every line of the code under test until it is let go on by one."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._go, self._stands, self.over = threading.Semaphore(0), threading.Semaphore(0), False
        self.result: Any = None
        self._work = work
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self._go.acquire()
        sys.settrace(self._trace)
        try:
            self.result = self._work()
        except FencedError as error:
            self.result = error
        finally:
            sys.settrace(None)
            self.over = True
            self._stands.release()

    def _trace(self, frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in SOURCES:
            return None
        if event == "line":
            self._stands.release()
            self._go.acquire()
        return self._trace

    def step(self) -> None:
        if not self.over:
            self._go.release()
            self._stands.acquire()

    def finish(self) -> None:
        while not self.over:
            self.step()
        self._thread.join()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(NAMES), st.integers(1, 12)), max_size=12), st.permutations(NAMES))
def test_in_any_order(turns: list[tuple[str, int]], last: list[str]) -> None:
    check(turns, last)


def test_one_that_stands_still_at_any_line_until_the_others_are_done() -> None:
    for name in NAMES:
        for lines in range(45):
            check([(name, lines)], [*(other for other in NAMES if other != name), name])


def check(turns: list[tuple[str, int]], last: list[str]) -> None:
    """No commit after a later generation has read the directory, none that it has not read, and one is the newest."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        path, first = place / "result.json", Fence.next(place, 1, "begun")
        path.write_text("before")

        def commits() -> bool:
            first.write(path, "committed")
            return True

        def takes() -> tuple[int, str]:
            return Fence.next(place, 1, "resumed").generation, path.read_text()

        processes = {name: Process(commits if name == "commits" else takes) for name in NAMES}
        for name, lines in turns:
            for _ in range(lines):
                processes[name].step()
        for name in last:
            processes[name].finish()
        taken = [p.result for name, p in processes.items() if name != "commits" and isinstance(p.result, tuple)]
        numbers = [number for number, _ in taken]
        assert numbers, "one of those that take it over has it"
        assert len(set(numbers)) == len(numbers)
        number, read = max(taken)
        assert number == newest(place)
        assert path.read_text() == read, "nothing is committed after the newest has read"
        assert (read == "committed") == (processes["commits"].result is True), "what was committed is read"
        assert list(place.glob(".*")) == []
