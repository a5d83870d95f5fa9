"""One run at a time trains into a directory, and a second is refused before it writes anything."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.launching import JOBS, Gate, Run, run, start

pytestmark = pytest.mark.faults

JOB = JOBS / "tiny.py"


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_second_run_in_the_directory_of_a_living_one_is_refused(tmp_path: Path) -> None:
    gate, out = Gate(tmp_path / "gate", 3), tmp_path / "run"
    wanted = Run(JOB, out, 2, environment=gate.environment)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    with start(wanted) as first:
        first.until(lambda: gate.reached(2), "both ranks at the gate")
        before = content(out)
        for second in (
            Run(JOB, out, None, arguments=("--resume",)),
            Run(JOB, out, 1),
            Run(JOB, out, None, arguments=("--resume", "--devices", "1"), environment=alone),
        ):
            refused = run(replace(second, environment=dict(second.environment))).fails(2)
            assert f"it is in use by pid {first.pid} on {os.uname().nodename} since" in refused.stderr
            assert f"(shoal run {JOB} --devices 2 --out {out} --max-restarts 0)" in refused.stderr
        assert content(out) == before
        gate.open()
        ended = first.wait().expect(0)
    assert ended.result["status"] == "completed"
    assert not (out / "lock.json").exists()


def test_after_a_kill_the_directory_is_free(tmp_path: Path) -> None:
    gate, out = Gate(tmp_path / "gate", 3), tmp_path / "run"
    with start(Run(JOB, out, 2, environment=gate.environment)) as first:
        first.until(lambda: gate.reached(2), "both ranks at the gate")
        first.process.kill()  # the launcher alone: its ranks die of that
        first.process.wait()  # a signal is on its way for a while
        run(Run(JOB, out, None, arguments=("--resume", "--devices", "1"))).expect(0)
    assert not (out / "lock.json").exists()
