"""The program of docs/exactness.md says how initial weights come about."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.docs.pages import write_first_job
from tests.docs.test_readme import ROOT, blocks
from tests.forks import run

PAGE = (ROOT / "docs" / "exactness.md").read_text()


@pytest.mark.timeout(200)
def test_initial_weights(tmp_path: Path) -> None:
    write_first_job(tmp_path)
    (program,) = blocks("python", PAGE)
    (tmp_path / "initial_weights.py").write_text(program)
    done = run([sys.executable, "initial_weights.py"], cwd=tmp_path, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no-op" not in done.stderr, "a model that loads its weights is not warned of its outline"
    said = [line for line in done.stdout.splitlines() if line.endswith(("True", "False"))]
    assert said == ["plain True", "own_seed True", "from_file True"]
