"""Accounts of real runs, ended in every way: the parts of the wall clock are the whole of it, and pages are made."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.faults.test_nonfinite import NAN_STEP, poisoned
from tests.faults.test_preempted import CHECKPOINTS, JOB
from tests.launching import JOBS, Ended, Gate, Run, run, start
from tests.sharing import Shared

from shoal.cli.main import main
from shoal.planner.calibrate.comparison import account_of
from shoal.report.account import Account
from shoal.runs.run_files import read_run

pytestmark = pytest.mark.faults

SUM = 0.005  # of the whole: the promise of a report
ROUNDED_SECONDS = 0.005  # instants are in milliseconds


def accounted(ended: Ended, page: Path) -> Account:
    """The account of a run whose parts are the whole, and of which a page is made."""
    found = account_of(read_run(ended.out))
    assert abs(sum(part.share for part in found.wall.parts) - 1.0) < SUM
    assert min(part.seconds for part in found.wall.parts) >= 0.0
    assert found.wall.of("not_recorded") == 0.0
    assert main(["report", str(ended.out), "-o", str(page)]) == 0
    return found


def test_a_run_to_its_end(shared: Shared, tmp_path: Path) -> None:
    ended = shared.run(Run(JOBS / "tiny.py", Path(), 3, arguments=("--checkpoint-every", "4")))
    found = accounted(ended, tmp_path / "page.html")
    assert found.status == "completed"
    assert found.checkpoints == (4, 8, 12, 16)
    # The account goes on to the last sign of the run; a result's own seconds are taken before it is written.
    assert found.wall.seconds >= ended.result["wall_seconds"] - ROUNDED_SECONDS
    in_steps = sum(record["seconds"] - record["spans"]["checkpoint"] for record in ended.records)
    spans = ("data_wait", "host_to_device", "forward", "backward", "exposed_communication", "optimizer", "other")
    assert found.wall.of(*spans) == pytest.approx(in_steps)
    assert found.wall.of("evaluation") > 0.0


@pytest.mark.slow
def test_a_preempted_one_that_lost_a_rank_later(tmp_path: Path) -> None:
    """Stopped after some steps, gone on on two ranks, of which one is killed."""
    gates, out = [Gate(tmp_path / "first", 5), Gate(tmp_path / "second", 11)], tmp_path / "run"
    with start(Run(JOB, out, 1, True, CHECKPOINTS, environment=gates[0].environment)) as started:
        started.until(lambda: gates[0].reached(1), "the first gate")
        os.kill(started.pid, signal.SIGTERM)
        gates[0].open()
        started.wait().expect(75)
    again = (*CHECKPOINTS, "--resume")
    with start(Run(JOB, out, 2, True, again, environment=gates[1].environment, restarts=1)) as started:
        started.until(lambda: gates[1].reached(2), "the second gate")
        os.kill(started.workers()[1], signal.SIGKILL)
        gates[1].open()
        ended = started.wait().expect(0)
    found = accounted(ended, tmp_path / "page.html")
    assert sorted(i.kind for i in found.incidents) == ["lost", "resumed", "resumed"]
    assert len(found.start_ups) == 3
    assert found.wall.of("idle") > 0.0
    assert found.samples.trained == sum(record["num_samples"] for record in ended.records)


@pytest.mark.slow
def test_one_that_fails_at_a_nan(tmp_path: Path) -> None:
    ended = run(poisoned(tmp_path / "run", "stop", False)).fails(65)
    found = accounted(ended, tmp_path / "page.html")
    assert (found.status, found.steps) == ("failed", NAN_STEP - 1)
    assert "not finite" in found.ending


@pytest.mark.slow
@pytest.mark.parametrize("plan", ['[server]\nmode = "asynchronous"\n[layout]\ndata = 2\n', "[layout]\ntensor = 2\n"])
def test_with_servers_and_divided(plan: str, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(plan)
    job = JOBS / "served.py" if "server" in plan else f"{JOBS / 'layouts.py'}:stack"
    ended = run(Run(job, tmp_path / "run", None, arguments=("--plan", str(tmp_path / "plan.toml")))).expect(0)
    found = accounted(ended, tmp_path / "page.html")
    assert found.status == "completed"
    assert found.wall.of("exposed_communication") > 0.0
