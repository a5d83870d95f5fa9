"""A weight that no sum can have ends the training at its first step, naming it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.launching import JOBS, Run, run
from tests.usual import parametrize

pytestmark = pytest.mark.faults

SOURCE = """
import sys
sys.path.insert(0, {folder!r})
import tiny


def loss(model, batch):
    total, weight = tiny.classify(model, batch)
    return total, {weight}


def job():
    return tiny.mlp(loss=loss)
"""


@parametrize(
    ("weight", "said"),
    [("float('inf')", "weight is inf"), ("-weight", "weight is -"), ("weight * float('inf')", "weight is inf")],
    ids=["infinite", "negative", "infinite tensor"],
    usual=["infinite", "negative"],
)
def test_refused_at_once(weight: str, said: str, tmp_path: Path) -> None:
    job = tmp_path / "weighted.py"
    job.write_text(SOURCE.format(folder=str(JOBS), weight=weight), encoding="utf-8")
    ended = run(Run(job, tmp_path / "run", 2)).fails(2)
    assert "LossError" in ended.stderr
    assert said in ended.stderr
    assert "Traceback" not in ended.output
