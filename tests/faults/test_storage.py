"""The checkpoints' disk fails: training that nobody could go on from is not reported as safe."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
from tests.launching import JOBS, Gate, Run, run, start
from tests.usual import parametrize

pytestmark = pytest.mark.faults

JOB = f"{JOBS / 'tiny.py'}:job"


@parametrize(("stop", "devices"), [(False, 2), (True, 1)], ids=["to the end", "preempted"], usual=[])
def test_the_last_checkpoint_cannot_be_written(stop: bool, devices: int, tmp_path: Path) -> None:
    gate, out = Gate(tmp_path / "gate", 9), tmp_path / "run"
    with start(Run(JOB, out, devices, environment=gate.environment)) as started:
        started.until(lambda: gate.reached(devices), "the gate")
        shutil.rmtree(out / "checkpoints", ignore_errors=True)
        (out / "checkpoints").write_text("in the way")
        if stop:
            started.send(signal.SIGTERM)
        gate.open()
        ended = started.wait().fails(73)
    assert "StorageError" in ended.stderr
    assert "it could not be written" in ended.stderr
    assert "Traceback" not in ended.output
    assert ended.result["status"] == "failed"
    assert ended.result["error"]["kind"] == "StorageError"
    if not stop:  # what was trained is told all the same
        assert ended.result["steps"] == 16
        assert ended.result["metrics"]["accuracy"] > 0
    # Mended, it starts over, as it has to.
    (out / "checkpoints").unlink()
    run(Run(JOB, out, devices, arguments=("--resume",))).expect(0)
