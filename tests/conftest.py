"""What holds for all tests."""

from __future__ import annotations

import gc
import os

# Before torch is loaded, here and in what is started: a thread that waits for another sleeps. By default it spins, and
# where processes are more than cores that took nine tenths of the time of small kernels on two threads.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
from tests.sharing import Shared


def pytest_collection_finish() -> None:
    """What is there by now stays: no garbage collection looks at it again, in this process or in one forked from it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    """For what is made once in a session."""
    own = tmp_path_factory.getbasetemp()
    return Shared((own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared")
