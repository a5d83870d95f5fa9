"""The pages of engines: their commands are run as they stand there."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.docs.pages import tell
from tests.docs.test_readme import ROOT

NEEDS = {"slurm": None, "ssh": None, "torchrun": None, "kubernetes": None, "ray": "ray", "spark": "pyspark"}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NEEDS)
def test_the_page_in_its_order(name: str, tmp_path: Path) -> None:
    needed = NEEDS[name]
    if needed is not None and find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    tell((ROOT / "docs" / "engines" / f"{name}.md").read_text("utf-8"), tmp_path)
