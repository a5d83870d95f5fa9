"""Fixtures of all engines' tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.launching import EXAMPLES, JOBS, Ended, Run, run
from tests.sharing import Shared


@pytest.fixture(scope="module")
def undisturbed(shared: Shared) -> Ended:
    """The exact run of one process that no engine has a part in."""
    return shared.run(Run(JOBS / "tiny.py", Path(), 1, exact=True))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the project template; its job waits at a gate."""
    folder = shutil.copytree(EXAMPLES / "project", tmp_path / "project", ignore=shutil.ignore_patterns("__pycache__"))
    job = folder / "src" / "flowers" / "train.py"
    text = job.read_text(encoding="utf-8").replace("import shoal\n", "import shoal\nfrom witness import Gated\n")
    job.write_text(text.replace("seed=seed,\n", "seed=seed,\n        schedule=Gated(),\n"), encoding="utf-8")
    return folder


@pytest.fixture
def project_alone(project: Path) -> Ended:
    """The exact run of the project by one process of this machine."""
    arguments, variables = ("--config", "configs/small.yaml"), {"PYTHONPATH": str(JOBS)}
    alone = Run("src/flowers/train.py", project / "alone", 1, True, arguments, environment=variables, cwd=project)
    return run(alone).expect(0)
