"""One laboratory for all that a worker observes."""

from __future__ import annotations

import pytest
from tests.settings.laboratory import Laboratory
from tests.sharing import Shared


@pytest.fixture(scope="session")
def laboratory(shared: Shared) -> Laboratory:
    """Makes calls, each once."""
    return Laboratory(shared)
