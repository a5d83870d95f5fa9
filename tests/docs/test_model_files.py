"""The job files of docs/models.md are verified as they stand there."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.docs.test_readme import ROOT, blocks
from tests.forks import run
from tests.usual import parametrize

FILES = {block.split("\n", 1)[0][2:]: block for block in blocks("python", (ROOT / "docs" / "models.md").read_text())}
NEEDS = {"bert_job.py": "transformers", "keras_job.py": "keras"}


def test_every_block_is_a_file() -> None:
    assert set(FILES) == set(NEEDS)


@parametrize("name", FILES, usual=["bert_job.py"])
def test_verified_on_two_ranks(name: str, tmp_path: Path) -> None:
    if find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    (tmp_path / name).write_text(FILES[name])
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "KERAS_HOME": str(tmp_path)}
    words = ("-m", "shoal", "verify", name, "--devices", "2", "--steps", "1", "--out", "out")
    done = run([sys.executable, *words], cwd=tmp_path, env=variables, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "grain by grain" not in done.stdout
