"""An example is planned for this machine, and the plan is run as it was written."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.docs.test_readme import ROOT, blocks
from tests.forks import run

PAGE = (ROOT / "docs" / "plan.md").read_text()


def shoal(folder: Path, *words: str) -> str:
    """What a command prints; it runs in the folder that has its cache."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, "-m", "shoal", *words]
    done = run(command, cwd=folder, env=variables, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def tokens(line: str) -> list[str]:
    """Words and numbers of a line, without the bars of a drawing."""
    return re.findall(r"\d[\d,]*(?:\.\d+)?|[^\d\s█]+", line)


def alike(shown: list[str], told: list[str]) -> bool:
    """Whether two lines say the same, and their numbers are as good as the same."""

    def same(a: str, b: str) -> bool:
        if a[0].isdigit() and b[0].isdigit():
            x, y = float(a.replace(",", "")), float(b.replace(",", ""))
            return abs(x - y) <= 0.15 * max(x, y) + 1.0
        return a == b

    return len(shown) == len(told) and all(map(same, shown, told))


@pytest.mark.timeout(150)  # a process that imports torch
def test_the_page_shows_what_is_printed(tmp_path: Path) -> None:
    """Line after line, and "..." where some are left out; numbers as the catalogue has them at the time."""
    sample = next(block for block in blocks("console", PAGE) if "shoal plan" in block).splitlines()
    words = sample[0].removeprefix("$ shoal ").split()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    told = iter([tokens(line) for line in shoal(tmp_path, *words).splitlines()])
    for line in sample[1:]:
        if line.strip() not in ("", "..."):
            assert any(alike(tokens(line), other) for other in told), f"not printed, or not in this order: {line}"


@pytest.mark.timeout(500)  # five processes that import torch
def test_planned_run_and_learned(tmp_path: Path) -> None:
    job = str(ROOT / "examples" / "digits.py")
    told = shoal(
        tmp_path,
        "plan",
        job,
        "--cluster",
        "2xcpu",
        "-o",
        "plan.toml",
        "--html",
        "plan.html",
        "--mtbf",
        "1000",
        "--more",
    )
    for words in ("The best", "By number of devices", "What would change it", "Why not", "none to plan for"):
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
    assert "corrected by what runs have shown" in shoal(tmp_path, "plan", job, "--cluster", "2xcpu", "--more")
