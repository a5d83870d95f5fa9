"""Which engines the tests of this folder may use: those that SHOAL_ENGINES names, as scripts/test-engines sets it."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest


def needs(engine: str, unavailable: Callable[[], str | None]) -> list[pytest.MarkDecorator]:
    """Marks of tests on a real engine: skipped where nobody asks for it. One that is asked for has to be there."""
    asked = engine in os.environ.get("SHOAL_ENGINES", "").split()
    reason = f"on a real engine: scripts/test-engines {engine}"
    if asked and (why := unavailable()) is not None:
        raise RuntimeError(f"SHOAL_ENGINES names {engine}, but {why}")
    return [pytest.mark.slow, pytest.mark.skipif(not asked, reason=reason)]
