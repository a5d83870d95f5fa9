"""The commands and programs of docs/fine-tuning.md are run as they stand there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.docs.test_readme import ROOT, blocks
from tests.forks import run

PAGE = (ROOT / "docs" / "fine-tuning.md").read_text()
FILES = {block.split("\n", 1)[0][2:]: block for block in blocks("python", PAGE)}


@pytest.mark.timeout(300)
def test_the_page_in_its_order(tmp_path: Path) -> None:
    assert set(FILES) == {"tuned_job.py", "in_python.py"}
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    said, ended = [], []
    for line in [line for block in blocks("sh", PAGE) for line in block.splitlines()]:
        done = run([sys.executable, "-m", *line.split()], cwd=tmp_path, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
        said.append(done.stdout)
        ended.append(json.loads((tmp_path / line.split("--out ")[1].split()[0] / "result.json").read_text()))
    five, _, ten, more = ended
    begun = json.loads((tmp_path / "runs" / "ten" / "job.json").read_text())["initial_weights"]
    assert begun["sha256"] == five["weights_sha256"]
    assert len(begun["mismatched"]) == 2
    assert ten["world_size"] == 2
    assert "another shape there: head.weight: [5, 64] in the checkpoint, [10, 64] in the model" in said[2]
    assert (five["steps"], more["resumed_from"], more["steps"]) == (30, 30, 60)
    assert "length: 2 epochs (30 steps), 4 epochs (60 steps) from here on" in said[3]
    done = run([sys.executable, "in_python.py"], cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["True"]
