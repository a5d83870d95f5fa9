"""A signal that a rank gets from its launcher and from others too is one request, however long is between the two."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest
from tests.faults.test_preempted import CHECKPOINTS, JOB, at_the_gate, wait_until_handed_on
from tests.launching import Gate, Run, Started, start
from tests.usual import parametrize

from shoal.launch.signals import BURST_SECONDS

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

LATER = BURST_SECONDS + 0.3
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "shoal")


def to_ranks(started: Started, number: int) -> None:
    ranks = started.workers()
    assert len(ranks) == 2
    for pid in ranks.values():
        os.kill(pid, number)


def assert_saved(started: Started, gate: Gate, code: int) -> None:
    """The ranks wait at the gate still, and save after the step in hand."""
    assert len(started.workers()) == 2, started.output
    gate.open()
    ended = started.wait(250)
    assert ended.code == code, ended.output
    assert (ended.result["status"], ended.result["steps"]) == ("preempted", gate.step + 1)
    assert "Traceback (most recent call last)" not in ended.output or code == 1  # torchrun's own, after a signal


@parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"], usual=["SIGTERM"])
def test_by_the_launcher_and_later_by_a_scheduler(number: int, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate", 6)
    with start(at_the_gate(tmp_path / "run", gate, 2)) as started:
        started.until(lambda: gate.reached(2), "the gate")
        to_ranks(started, number)
        time.sleep(LATER)
        started.send(number)
        wait_until_handed_on(started)
        time.sleep(LATER)
        to_ranks(started, signal.SIGTERM)  # what the launcher hands on
        time.sleep(0.2)
        assert_saved(started, gate, 75)


@pytest.mark.slow
def test_by_a_scheduler_and_later_by_torchruns_agent(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate", 6)
    wanted = Run(
        JOB, tmp_path / "run", None, True, CHECKPOINTS, environment=gate.environment, launcher=TORCHRUN, fresh=True
    )
    with start(wanted) as started:
        started.until(lambda: gate.reached(2), "the gate", 250)
        to_ranks(started, signal.SIGTERM)
        time.sleep(LATER)
        started.send(signal.SIGTERM)
        time.sleep(LATER)
        assert_saved(started, gate, 1)


def test_insistence_is_the_launchers(tmp_path: Path) -> None:
    """A second signal to the launcher kills ranks that were asked once, by whomever."""
    gate = Gate(tmp_path / "gate", 6)
    with start(at_the_gate(tmp_path / "run", gate, 2)) as started:
        started.until(lambda: gate.reached(2), "the gate")
        started.send(signal.SIGTERM)
        wait_until_handed_on(started)
        time.sleep(LATER)
        started.send(signal.SIGTERM)
        started.wait().expect(130)
    assert not (tmp_path / "run" / "result.json").exists()


def test_ranks_in_terminals_of_their_own_take_a_second_one_themselves(tmp_path: Path) -> None:
    """Nobody has started them but a person, who has only the terminals."""
    gate = Gate(tmp_path / "gate", 3)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", **gate.environment}
    runs = [Run(JOB, tmp_path / "run", None, True, environment={**variables, "RANK": rank}) for rank in "01"]
    with start(runs[0]) as first, start(runs[1]) as second:
        first.until(lambda: gate.reached(2), "the gate")
        first.send(signal.SIGINT)
        time.sleep(LATER)
        assert first.process.poll() is None
        first.send(signal.SIGINT)
        first.wait().expect(130)
        second.kill_all()
