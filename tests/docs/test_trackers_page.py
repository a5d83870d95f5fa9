"""The commands of docs/trackers.md are run as they stand there."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from tests.docs.pages import write_first_job
from tests.docs.test_readme import ROOT, blocks
from tests.forks import run

PAGE = (ROOT / "docs" / "trackers.md").read_text()
FILES = {block.split("\n", 1)[0][2:]: block for block in blocks("python", PAGE)}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_page_in_its_order(tmp_path: Path) -> None:
    for package in ("tensorboard", "mlflow", "sqlalchemy"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the package {package} is not installed, see docs/trackers.md")
    assert set(FILES) == {"tracked_job.py"}
    write_first_job(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    for line in [line for block in blocks("sh", PAGE) for line in block.splitlines()]:
        done = run([sys.executable, "-m", *line.split()], cwd=tmp_path, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "goes on without it" not in done.stdout
    for folder in ("runs/tracked/tensorboard", "events/tracked", "events/logged"):
        assert list((tmp_path / folder).glob("events.out.*")), folder
    assert (tmp_path / "runs.db").is_file()
