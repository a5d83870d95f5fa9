"""Sweeps of the examples: each trial is a run with its settings, and a pruned one is listed as stopped."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from tests import forks
from tests.launching import EXAMPLES

from shoal.runs.collection import RunEntry, runs_below


def swept(folder: Path, module: str, trials: int, devices: int) -> list[RunEntry]:
    """Run a sweep of an example, and return its runs."""
    program = f"import {module}\nif __name__ == '__main__':\n    {module}.sweep({trials}, {devices}, 'runs')\n"
    (folder / "main.py").write_text(program, encoding="utf-8")
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join((str(EXAMPLES), os.environ.get("PYTHONPATH", "")))}
    words = [sys.executable, "main.py"]
    done = forks.run(words, cwd=folder, env=variables, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return list(runs_below(folder / "runs"))


@pytest.mark.timeout(300)
def test_a_loop_stops_runs_below_the_median(tmp_path: Path) -> None:
    runs = swept(tmp_path, "sweep", 4, 2)
    assert [run.name for run in runs] == ["0", "1", "2", "3"]
    assert [run.devices for run in runs] == [2] * 4
    assert len({run.settings["lr"] for run in runs}) == 4
    assert [run.state for run in runs[:2]] == ["completed"] * 2, "there is no median yet"
    stopped = [run for run in runs if run.state == "stopped"]
    assert stopped
    for run in stopped:
        assert run.stopped is not None
        assert run.stopped.startswith("by MedianPruner: pruned: the median of ")
        assert run.num_steps is not None
        assert run.steps < run.num_steps


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_optuna_chooses_and_prunes(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="Optuna is no dependency of shoal: pip install optuna")
    runs = swept(tmp_path, "sweep_optuna", 6, 1)
    assert len(runs) == 6
    assert {run.state for run in runs} == {"completed", "stopped"}
    assert len({run.settings["lr"] for run in runs}) == 6
