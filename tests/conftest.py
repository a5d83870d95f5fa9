"""What holds for all tests."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """What is there by now stays: no garbage collection looks at it again, in this process or in one forked from it."""
    gc.collect()
    gc.freeze()
