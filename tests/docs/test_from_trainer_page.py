"""The program and the command of docs/coming-from/trainer.md are run as they stand there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.docs.test_readme import ROOT, blocks
from tests.forks import run

PAGE = (ROOT / "docs" / "coming-from" / "trainer.md").read_text()


@pytest.mark.slow
def test_the_page(tmp_path: Path) -> None:
    (program,) = blocks("python", PAGE)
    (command,) = blocks("sh", PAGE)
    (tmp_path / "trainer_job.py").write_text(program)
    done = run([sys.executable, "-m", *command.split()], cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "runs" / "trainer" / "result.json").read_text())
    assert (result["steps"], result["samples"], result["world_size"]) == (4, 64, 2)
