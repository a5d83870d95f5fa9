"""What holds for all tests."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Before torch is loaded, here and in what is started: a thread that waits for another sleeps. By default it spins, and
# where processes are more than cores that took nine tenths of the time of small kernels on two threads.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
from tests import forks

if TYPE_CHECKING:
    from tests.sharing import Shared

# Folders of tests that fork ranks from the process of pytest itself.
FORKING = ("bugs", "conformance", "ranks")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """GPUs are seen where tests/gpu alone is run: all other tests mean processes on cores, of which one has many."""
    # Messages are matched as whole sentences. How they fit a terminal is in tests/starting/test_terminal_words.py.
    writer = config.get_terminal_writer()
    writer.fullwidth = writer.fullwidth
    os.environ["COLUMNS"] = "2000"
    if "SHOAL_TEST_COUNTS" in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Counts(config.pluginmanager.get_plugin("terminalreporter")))
    # As in the background of a script, or under nohup: what tests start is asked to stop by these too.
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, lambda *_: None)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    own = Path(__file__).parent / "gpu"
    given = [(config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args]
    if not all(path.is_relative_to(own) for path in given):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


class Counts:
    """Says every 15 s how many tests are done, where no terminal shows it."""

    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self._reporter, self._done, self._total, self._next = reporter, 0, 0, time.monotonic() + 15.0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Counts the tests of this process."""
        self._total = len(session.items) or self._total

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: list[str]) -> None:
        """Counts the tests that workers share."""
        self._total = len(ids)

    def pytest_runtest_logfinish(self) -> None:
        """Counts a test, of this process or a worker."""
        self._done += 1
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + 15.0
            self._reporter.ensure_newline()
            self._reporter.write_line(f"test: {self._done} of {self._total} tests done")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[object]:
    """Collects without the garbage collector: it would visit each of thousands of tests and modules again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is there by now stays: no garbage collection looks at it again, in this process or in one forked from it.

    Ranks that a test forks from this process have what they import lazily: by itself each would take a second for it.
    """
    here = Path(__file__).parent
    if any(item.path.is_relative_to(here / name) for item in session.items for name in FORKING):
        forks.load()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    """For what is made once in a session."""
    from tests.sharing import Shared  # not above: it imports shoal, also in the process that only starts workers

    own = tmp_path_factory.getbasetemp()
    return Shared((own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared")
