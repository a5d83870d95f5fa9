"""Fixtures of all engines' tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.launching import JOBS, Ended, Run
from tests.sharing import Shared


@pytest.fixture(scope="module")
def undisturbed(shared: Shared) -> Ended:
    """The exact run of one process that no engine has a part in."""
    return shared.run(Run(JOBS / "tiny.py", Path(), 1, exact=True))
