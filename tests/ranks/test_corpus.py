"""Some models of the corpus, others every week: `shoal verify` calls none of them wrong."""

from __future__ import annotations

import sys
from datetime import date
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.forks import run

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.slow,  # half a minute; tests/ranks/test_models.py verifies models of transformers in every run
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        find_spec("transformers") is None, reason="transformers is not installed: pip install 'shoal[hf]'"
    ),
]

ROOT = Path(__file__).resolve().parents[2]
NUM_ROWS = 2
# The cheapest that tell most, and every layout that divides some of the models.
KINDS = ("fast", "one hash on 1, 2, 3", "ZeRO-3", "tensor 2", "pipeline 2", "context 2")


def test_this_weeks_models_are_verified() -> None:
    """What fails is named with the command that repeats it."""
    year, week, _ = date.today().isocalendar()
    seed = f"{year}-W{week:02}"
    command = [sys.executable, "-m", "benchmarks.corpus", "--sample", str(NUM_ROWS), "--seed", seed, "--cells", *KINDS]
    ended = run(command, cwd=ROOT, timeout=590)
    assert ended.returncode == 0, f"{' '.join(command)}\n{ended.stdout}\n{ended.stderr}"
    assert ended.stdout.count(": verified") >= 2 * NUM_ROWS - 2, ended.stdout
