"""The job trains, and learns something."""

from __future__ import annotations

from pathlib import Path

from flowers.train import job

import shoal


def test_it_learns(tmp_path: Path) -> None:
    run = shoal.run(job, epochs=2, devices=1, out=tmp_path / "run")
    assert run.result["metrics"]["accuracy"] > 0.8
