"""The programs of docs/from-python.md are run as they stand there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.docs.pages import write_first_job
from tests.docs.test_readme import ROOT, blocks
from tests.forks import run

PAGE = (ROOT / "docs" / "from-python.md").read_text()
FILES = {block.split("\n", 1)[0][2:]: block for block in blocks("python", PAGE)}


@pytest.mark.timeout(300)
def test_the_programs_in_their_order(tmp_path: Path) -> None:
    assert list(FILES) == ["train.py", "choose.py"]
    write_first_job(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
        done = run([sys.executable, name], cwd=tmp_path, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
        if name == "train.py":
            assert "digits_job.py:job -> runs/digits_job" in done.stdout
            assert "'accuracy': 0.9" in done.stdout
    assert (tmp_path / "plan.toml").is_file()
    assert " - " in done.stdout
