"""Each way of starting, by real interpreters: the run, to the bit, of the forks that other tests take for them."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.faults.test_preempted import wait_until_handed_on
from tests.launching import JOBS, Ended, Gate, Run, run, start, start_command
from tests.ranks.test_exact import assert_one_run
from tests.usual import parametrize

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

JOB = JOBS / "tiny.py"
LIMIT_SECONDS = 250.0
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The launcher and two ranks, all of them forks."""
    return run(Run(JOB, tmp_path_factory.mktemp("forked") / "run", 2, exact=True)).expect(0)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_python_dash_m(devices: int, forked: Ended, tmp_path: Path) -> None:
    assert_one_run([forked, run(Run(JOB, tmp_path / "run", devices, exact=True, fresh=True), LIMIT_SECONDS)])


def test_the_script(forked: Ended, tmp_path: Path) -> None:
    script = str(Path(sys.executable).with_name("shoal"))
    command = [script, "run", str(JOB), "--devices", "2", "--exact", "--out", str(tmp_path / "run")]
    with start_command(command, tmp_path / "run") as started:
        assert_one_run([forked, started.wait(LIMIT_SECONDS)])


def test_torchrun(forked: Ended, tmp_path: Path) -> None:
    launcher = (*TORCHRUN, "-m", "shoal")
    ended = run(Run(JOB, tmp_path / "run", None, exact=True, launcher=launcher, fresh=True), LIMIT_SECONDS)
    assert_one_run([forked, ended])
    assert ended.result["world_size"] == 2


@parametrize("fresh", [True, False], usual=["False"])
def test_ranks_by_hand(fresh: bool, forked: Ended, tmp_path: Path) -> None:
    """RANK and WORLD_SIZE as whoever starts the ranks sets them."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                start(Run(JOB, tmp_path / "run", None, exact=True, environment={**address, "RANK": rank}, fresh=fresh))
            )
            for rank in ("0", "1")
        ]
        ends = [rank.wait(LIMIT_SECONDS).expect(0) for rank in ranks]
    assert_one_run([forked, ends[0]])


@pytest.mark.slow
def test_a_script_with_a_session_alone_and_under_torchrun(tmp_path: Path) -> None:
    told = []
    ways: dict[str, tuple[tuple[str, ...], bool]] = {"alone": ((), False), "two": (TORCHRUN, True)}
    for name, (launcher, fresh) in ways.items():
        command = [sys.executable, *launcher, str(JOBS / "own_loop.py")]
        with start_command(command, tmp_path / name, fresh=fresh) as started:
            ended = started.wait(LIMIT_SECONDS).expect(0)
        lines = [line for line in ended.stdout.splitlines() if line.startswith("told: ")]
        assert len(lines) == 1, ended.output
        told.append(json.loads(lines[0].removeprefix("told: ")))
    assert told[0] == told[1]
    assert told[0]["count"] == 33
    # The last step holds 4 samples, too few to compare; the one before is whole.
    assert told[0]["losses"][-2] < told[0]["losses"][0]


@pytest.mark.slow
def test_what_ends_forks_ends_interpreters(tmp_path: Path) -> None:
    """A signal, a mistake and a killed rank: the codes are those of tests/faults, and no process hangs at its end."""
    gate = Gate(tmp_path / "gate", 3)
    with start(Run(JOB, tmp_path / "stopped", 2, environment=gate.environment, fresh=True)) as started:
        started.until(lambda: gate.reached(2), "both ranks at the gate")
        started.send(signal.SIGTERM)
        wait_until_handed_on(started)
        gate.open()
        started.wait().expect(75)
    raises = Run(JOBS / "faulty.py", tmp_path / "raised", 2, environment={"TEST_RAISE": "backward:58"}, fresh=True)
    assert "no derivative here" in run(raises).expect(2).stderr
    gate = Gate(tmp_path / "other gate", 3)
    with start(Run(JOB, tmp_path / "lost", 2, environment=gate.environment, fresh=True)) as started:
        started.until(lambda: gate.reached(2), "both ranks at the gate")
        subprocess.run(["kill", "-9", str(started.workers()[1])], check=True)
        gate.open()
        started.wait().expect(69)
