"""`shoal doctor --script`: of a loop with a planted slowness, the first cause is this one, on two real processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests import forks
from tests.usual import parametrize

HERE = Path(__file__).parent
pytestmark = pytest.mark.ranks


def diagnosed(folder: Path, script: str, *words: str) -> tuple[int, dict[str, Any], str]:
    """The exit code, doctor.json and all output of a diagnosis."""
    command = [sys.executable, "-m", "shoal", "doctor", "--script", f"{HERE}/{script}", *words]
    ended = forks.run([*command, "--devices", "2", "--out", "out"], cwd=folder, timeout=110)
    path = folder / "out/doctor.json"
    return ended.returncode, json.loads(path.read_text()) if path.exists() else {}, ended.stdout + ended.stderr


SLOWNESSES = {
    "loader": ("data", "num_workers="),
    "rank": ("slow rank", "rank 1 as quick as the others"),
    "exchange": ("exchange", "every 100 steps"),
    "reads": ("read backs", "without .item()"),
    "python": ("own-code", "more rarely"),
    "evaluation": ("evaluation", "instead of"),
    "checkpoint": ("checkpoints", "instead of"),
}


@parametrize("slow", SLOWNESSES, usual=("loader", "rank"))
def test_a_planted_slowness_is_the_first_cause(slow: str, tmp_path: Path) -> None:
    code, document, output = diagnosed(tmp_path, f"slow.py --batch 8 --slow {slow}")
    cause, words = SLOWNESSES[slow]
    assert code == 0, output
    first = document["causes"][0]
    assert first["cause"] == cause, output
    assert words in document["remedies"][0]["words"], output
    if slow in ("rank", "python"):
        assert "slow.py" in first["seen"], output
    parts = document["ranks"][document["slowest_rank"]]
    assert sum(parts.values()) == pytest.approx(document["step_seconds"], rel=0.2)
    assert any(words.startswith("GPUs") for words in document["not_seen"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slow", "cause"),
    [
        ("sums", "no-sync"),
        ("optimizer", "fused-optimizer"),
        ("unused", "unused-parameters"),
        ("ragged", "ragged"),
    ],
)
def test_a_smaller_slowness_is_among_the_causes(slow: str, cause: str, tmp_path: Path) -> None:
    code, document, output = diagnosed(tmp_path, f"slow.py --batch 8 --slow {slow}")
    assert code == 0, output
    assert cause in [one["cause"] for one in document["causes"]], output


def test_a_script_that_ends_early_is_refused(tmp_path: Path) -> None:
    code, document, output = diagnosed(tmp_path, "ddp.py --batch 24")
    assert (code, document) == (2, {})
    assert "it made 2 updates, too few for a diagnosis" in " ".join(output.split())
    code, document, output = diagnosed(tmp_path, "ddp.py --fault raises")
    assert (code, document) == (2, {})
    assert "there is no data" in output
