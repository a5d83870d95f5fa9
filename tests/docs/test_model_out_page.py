"""The commands and the program of docs/model-out.md are run as they stand there."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from tests.docs.pages import write_first_job
from tests.docs.test_readme import ROOT, blocks
from tests.forks import run

PAGE = (ROOT / "docs" / "model-out.md").read_text()
FILES = {block.split("\n", 1)[0][2:]: block for block in blocks("python", PAGE)}


@pytest.mark.timeout(300)
def test_the_page_in_its_order(tmp_path: Path) -> None:
    assert set(FILES) == {"watched_job.py", "after_training.py"}
    write_first_job(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    commands = [line.split() for block in blocks("sh", PAGE) for line in block.splitlines()]
    assert [words[1] for words in commands] == ["run", "export", "evaluate", "predict"]
    programs = [[sys.executable, "after_training.py"]]
    for words in (*([sys.executable, "-m", *words] for words in commands), *programs):
        done = run(words, cwd=tmp_path, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "torch.Size([64, 64])" in done.stdout
    assert (tmp_path / "exported" / "model.safetensors").is_file()
    assert (tmp_path / "exported_again" / "model.safetensors").is_file()
    assert np.load(tmp_path / "digits.npz")["outputs"].shape == (1797, 10)
