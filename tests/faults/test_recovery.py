"""Ranks that are killed, stopped or hang: the command goes on by itself, and the run is the undisturbed one's bits."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.faults.test_preempted import CHECKPOINTS, JOB, STEPS, assert_same, random_step
from tests.launching import JOBS, Ended, Gate, Run, run, start
from tests.sharing import Shared
from tests.usual import parametrize

from shoal.planner.calibrate.comparison import account_of
from shoal.runs.run_files import read_run

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def undisturbed(shared: Shared) -> Ended:
    return shared.run(Run(JOB, Path(), 1, exact=True))


def events(ended: Ended) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ended.out / "events.jsonl").read_text(encoding="utf-8").splitlines()]


def gated(out: Path, gate: Gate, devices: int, **more: str) -> Run:
    return Run(JOB, out, devices, True, CHECKPOINTS, environment={**gate.environment, **more}, restarts=5)


@parametrize(
    ("devices", "victims", "step"),
    [(2, [1], 7), (3, [0], 9), (2, [0], 2), (4, [3], STEPS - 1), (3, [0, 1, 2], 9)],
    ids=["2", "3 rank 0", "2 before a checkpoint", "4 in the last step", "all of 3"],
    usual=["2 before a checkpoint", "all of 3"],
)
def test_a_killed_rank(devices: int, victims: list[int], step: int, undisturbed: Ended, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate", step)
    with start(gated(tmp_path / "run", gate, devices)) as started:
        started.until(lambda: gate.reached(devices), "the gate")
        workers = started.workers()
        for victim in victims:
            os.kill(workers[victim], signal.SIGKILL)
        gate.open()
        ended = started.wait().expect(0)
    assert_same(ended, undisturbed)
    assert ended.result["restarts"] == 1
    assert "was lost: it was killed by SIGKILL" in ended.stderr
    lost, going_on = events(ended)
    assert lost["kind"] == "lost"
    assert lost["rank"] in victims
    assert f"rank {lost['rank']} on " in ended.stderr
    assert "SIGKILL" in lost["what"]
    assert going_on["kind"] == "going_on"
    assert going_on["step"] == ended.result["resumed_from"] + 1 <= step + 1
    # One share, by whoever counts.
    assert 0.0 < ended.result["ettr"] < 1.0
    assert ended.result["ettr"] == pytest.approx(account_of(read_run(ended.out)).wall.ettr, abs=0.02)


@pytest.mark.slow
def test_killed_again_and_again(undisturbed: Ended, tmp_path: Path) -> None:
    """Rank after rank, each time further on: no budget runs out while new steps are trained."""
    gates = [Gate(tmp_path / f"gate-{step}", step) for step in range(1, STEPS, 2)]
    all_gates = {"TEST_GATE": ";".join(gate.environment["TEST_GATE"] for gate in gates)}
    # Not 1: records are written up to 50 ms late, so that a rank may have got further than anybody knows.
    with start(Run(JOB, tmp_path / "run", 2, True, CHECKPOINTS, environment=all_gates, restarts=2)) as started:
        for number, gate in enumerate(gates):
            started.until(lambda gate=gate: gate.reached(2), f"step {gate.step}")
            os.kill(started.workers()[number % 2], signal.SIGKILL)
            gate.open()
        ended = started.wait().expect(0)
    assert_same(ended, undisturbed)
    assert ended.result["restarts"] == len(gates)


@parametrize("how", ["stopped", "waits", "holds the GIL"], usual=["stopped"])
def test_a_rank_that_does_not_go_on(how: str, undisturbed: Ended, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate", random_step(how), "all" if how == "stopped" else "1")
    more = {"stopped": {}, "waits": {"TEST_HANG": "1"}, "holds the GIL": {"TEST_GIL": "1"}}[how]
    with start(gated(tmp_path / "run", gate, 2, **more)) as started:
        if how == "stopped":
            started.until(lambda: gate.reached(2), "the gate")
            os.kill(started.workers()[1], signal.SIGSTOP)
            gate.open()
        started.until(lambda: "was lost" in started.output, "the stuck rank's name")
        gate.open()
        ended = started.wait().expect(0)
    assert_same(ended, undisturbed)
    lost = events(ended)[0]
    assert lost["rank"] == 1
    assert lost["noticed"] == ("its state" if how == "stopped" else "its heartbeat")
    assert ("SIGSTOP" if how == "stopped" else "has been in optimizer") in lost["what"]
    assert "witness.py" in lost["what"], "its stack, with the line that it hangs in"
    assert "wait_at_gate" in lost["what"]


def test_ranks_are_copies_of_one_process_or_fresh_interpreters(undisturbed: Ended, tmp_path: Path) -> None:
    """The process that ranks are copied from may die; the ranks stay, and those that follow load torch themselves."""
    gates = [Gate(tmp_path / f"gate-{step}", step) for step in (5, 7, 9)]
    wanted = gated(tmp_path / "run", gates[0], 2, TEST_GATE=";".join(gate.environment["TEST_GATE"] for gate in gates))
    servers = []
    with start(wanted) as started:
        for gate in gates:
            started.until(lambda gate=gate: gate.reached(2), "the gate")  # type: ignore[misc]
            ranks = started.workers()
            assert sorted(ranks) == [0, 1]
            assert {psutil.Process(pid).ppid() for pid in ranks.values()} == {started.pid}
            servers.append(started.named("shoal-forks"))
            if gate is gates[1]:
                os.kill(servers[1][0], signal.SIGKILL)
            if gate is not gates[2]:
                os.kill(ranks[1], signal.SIGKILL)
            gate.open()
        ended = started.wait().expect(0)
    assert servers == [servers[0], servers[0], []]
    assert len(servers[0]) == 1
    assert_same(ended, undisturbed)
    assert ended.result["restarts"] == 2


def test_a_pause_of_two_seconds_is_nothing(undisturbed: Ended, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate", 7)
    with start(gated(tmp_path / "run", gate, 2)) as started:
        started.until(lambda: gate.reached(2), "the gate")
        worker = started.workers()[0]
        os.kill(worker, signal.SIGSTOP)
        gate.open()
        time.sleep(2.0)
        os.kill(worker, signal.SIGCONT)
        ended = started.wait().expect(0)
    assert_same(ended, undisturbed)
    assert ended.result["restarts"] == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_pauses_are_nothing(undisturbed: Ended, tmp_path: Path) -> None:
    """A hundred of two seconds, of one rank after the other."""
    gate = Gate(tmp_path / "gate", 7)
    with start(gated(tmp_path / "run", gate, 2)) as started:
        started.until(lambda: gate.reached(2), "the gate")
        workers = started.workers()
        for number in range(100):
            os.kill(workers[number % 2], signal.SIGSTOP)
            time.sleep(2.0)
            os.kill(workers[number % 2], signal.SIGCONT)
        gate.open()
        ended = started.wait().expect(0)
    assert_same(ended, undisturbed)
    assert ended.result["restarts"] == 0


DYING = """
import os
import sys
sys.path.insert(0, {folder!r})
import tiny


def job():
    return tiny.mlp(schedule=lambda progress: os._exit(7) if os.environ.get("RANK") == "1" and progress > 0.4 else 1.0)
"""


def test_lost_twice_in_the_same_way_it_ends(tmp_path: Path) -> None:
    job = tmp_path / "dying.py"
    job.write_text(DYING.format(folder=str(JOBS)), encoding="utf-8")
    ended = run(Run(job, tmp_path / "run", 2, arguments=CHECKPOINTS, restarts=5)).fails(69)
    assert "rank 1" in ended.stderr
    assert "it ended with code 7 without a word" in ended.stderr
    assert "lost twice in the same way, both times after step" in ended.stderr
    assert [event["kind"] for event in events(ended)].count("lost") == 2
