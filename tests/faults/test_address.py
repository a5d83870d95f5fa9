"""Runs whose directory is an address: with a rank lost, and resumed on more devices, they are the undisturbed run."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from tests.launching import JOBS, Gate, Run, run, start
from tests.sharing import Shared


def test_a_lost_rank_and_other_devices(shared: Shared, tmp_path: Path) -> None:
    undisturbed = shared.run(Run(JOBS / "tiny.py", Path(), 1, exact=True))
    there, gate = tmp_path / "there", Gate(tmp_path / "gate", 6)
    out = ("--out", f"file://{there}")
    words = (*out, "--checkpoint-every", "2", "--steps", "9")
    first = Run(JOBS / "tiny.py", tmp_path, 2, True, words, environment=gate.environment, restarts=2)
    with start(first) as started:
        started.until(lambda: gate.reached(2), "the gate", 60)
        os.kill(started.workers()[1], signal.SIGKILL)
        gate.open()
        ended = started.wait().expect(0)
    assert "resumed     after step" in ended.stdout
    run(Run(JOBS / "tiny.py", tmp_path, 3, True, (*out, "--resume", "--steps", "16"))).expect(0)
    result = json.loads((there / "result.json").read_text(encoding="utf-8"))
    same = ("weights_sha256", "sample_digest", "steps")
    assert [result[name] for name in same] == [undisturbed.result[name] for name in same]
    kinds = [json.loads(line)["kind"] for line in (there / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    assert kinds == ["lost", "going_on"]


@pytest.mark.slow
def test_a_run_that_another_has_followed_ends(tmp_path: Path) -> None:
    """As one whose host was cut off, and that was started again elsewhere."""
    gate, out = Gate(tmp_path / "gate", 6), ("--out", f"file://{tmp_path}/there")
    job, words = JOBS / "tiny.py", (*out, "--checkpoint-every", "2")
    with start(Run(job, tmp_path / "a", 1, True, words, environment=gate.environment)) as older:
        older.until(lambda: gate.reached(1), "the gate", 60)
        newer = run(Run(job, tmp_path / "b", 1, True, (*words, "--resume", "--steps", "16"))).expect(0)
        gate.open()
        ended = older.wait().expect(73)
    assert "another run trains there since" in ended.stderr
    assert "resumed     after step 6" in newer.stdout
    result = json.loads((tmp_path / "there" / "result.json").read_text(encoding="utf-8"))
    assert result["status"] == "completed"
