"""One laboratory for all that a worker observes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.settings.laboratory import Laboratory


@pytest.fixture(scope="session")
def laboratory() -> Iterator[Laboratory]:
    """Makes calls, each once."""
    made = Laboratory()
    yield made
    made.close()
