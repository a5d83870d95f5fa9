"""What holds for all tests."""

from __future__ import annotations

import gc
import os

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
