"""An example is planned for this machine, and the plan is run as it was written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.docs.test_readme import ROOT


def shoal(folder: Path, *words: str) -> str:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, "-m", "shoal", *words]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.timeout(500)  # five processes that import torch
def test_planned_run_and_learned(tmp_path: Path) -> None:
    job = str(ROOT / "examples" / "digits.py")
    told = shoal(
        tmp_path, "plan", job, "--cluster", "2xcpu", "-o", "plan.toml", "--html", "plan.html", "--mtbf", "1000"
    )
    for words in ("The best", "By number of devices", "What would change it", "Why not", "goodput"):
        assert words in told
    ElementTree.fromstring((tmp_path / "plan.html").read_text().removeprefix("<!DOCTYPE html>\n"))
    ran = shoal(tmp_path, "run", job, "--plan", "plan.toml", "--steps", "14", "--out", "out")
    assert "a step took" in ran
    found = json.loads((tmp_path / "out" / "result.json").read_text())["prediction"]
    assert found["cluster"] == "2xcpu"
    assert found["step_seconds"]["measured"] > 0
    assert found["parts"]["compute"]["measured"] > 0
    learned = shoal(tmp_path, "plan", "--learn", "out")
    assert "cluster 2xcpu: 1 run" in learned
    assert "corrected by what runs have shown" in shoal(tmp_path, "plan", job, "--cluster", "2xcpu")
