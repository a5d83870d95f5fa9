"""Folders of launchers: one that lives keeps its own, and what a killed one left is removed by the next."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shoal.launch.supervise.ranks import StartFolder

WAITS = """
import time
from shoal.launch.supervise.ranks import StartFolder
print(StartFolder().path, flush=True)
time.sleep(60)
"""


def test_what_a_killed_launcher_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "shoal-job-of-another").mkdir()
    with subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        mine = StartFolder()
        assert theirs.parent == mine.path.parent == tmp_path
        assert theirs.is_dir(), "its launcher lives"
        other.kill()
        other.wait()
        again = StartFolder()
    assert not theirs.exists()
    assert mine.path.is_dir()
    mine.close()
    again.close()
    assert [path.name for path in tmp_path.iterdir()] == ["shoal-job-of-another"]
