"""The commands and the program of docs/callbacks.md are run as they stand there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.docs.pages import write_first_job
from tests.docs.test_readme import ROOT, blocks
from tests.forks import run

PAGE = (ROOT / "docs" / "callbacks.md").read_text()
FILES = {block.split("\n", 1)[0][2:]: block for block in blocks("python", PAGE)}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_page_in_its_order(tmp_path: Path) -> None:
    assert set(FILES) == {"hooked_job.py", "scheduled_job.py"}
    write_first_job(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    commands = [line.split() for block in blocks("sh", PAGE) for line in block.splitlines()]
    assert [words[1] for words in commands] == ["run", "export", "evaluate", "run", "run"]
    said = {}
    for words in commands:
        done = run([sys.executable, "-m", *words], cwd=tmp_path, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
        said[words[1]] = done.stdout
    result = json.loads((tmp_path / "runs" / "hooked" / "result.json").read_text())
    assert result["ended_by"]["callback"] == "EarlyStopping"
    assert (tmp_path / "averaged" / "model.safetensors").is_file()
    assert f"{result['metrics']['ema_accuracy']:.4f}" in said["evaluate"]
