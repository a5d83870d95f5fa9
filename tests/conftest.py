"""What holds for all tests."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

# Before torch is loaded, here and in what is started: a thread that waits for another sleeps. By default it spins, and
# where processes are more than cores that took nine tenths of the time of small kernels on two threads.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
from tests import forks
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
    # As in the background of a script, or under nohup: what tests start is asked to stop by these too.
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, lambda *_: None)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    own = Path(__file__).parent / "gpu"
    given = [(config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args]
    if not all(path.is_relative_to(own) for path in given):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


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
    own = tmp_path_factory.getbasetemp()
    return Shared((own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared")
