"""An installation that Python finds over a symbolic link."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.ranks
def test_stages_of_a_linked_installation_exchange_activations(tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to(ROOT / "src")
    (tmp_path / "plan.toml").write_text("[layout]\npipeline = 2\n")
    command = ["run", str(ROOT / "examples/digits.py"), "--plan", "plan.toml", "--steps", "2"]
    run = subprocess.run(
        [sys.executable, "-m", "shoal", *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "linked")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
