"""Hosts of `--on hosts` that freeze, are cut off, pause, or come back: with a real sshd, cgroups and cables."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.engines import freezer, sshd
from tests.engines.choice import needs
from tests.engines.same_run import assert_same, result
from tests.engines.sshd import SshHosts
from tests.engines.test_ssh import LIMIT_SECONDS, run
from tests.faults.test_recovery import events
from tests.launching import JOBS, Ended, Gate, Run, Started
from tests.sharing import Shared

pytestmark = [pytest.mark.faults, *needs("ssh", lambda: sshd.unavailable() or freezer.unavailable())]

STEP = 6
CHECKPOINTS = ("--checkpoint-every", "2")


@pytest.fixture(scope="module")
def undisturbed(shared: Shared) -> Ended:
    return shared.run(Run(JOBS / "tiny.py", Path(), 1, exact=True))


@pytest.fixture
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with sshd.started(tmp_path_factory.mktemp("ssh"), "h1", "h2") as found:
        yield found


def reach(started: Started, gate: Gate) -> None:
    started.until(lambda: gate.reached(2), "the gate", LIMIT_SECONDS)


def incidents(out: Path) -> list[dict[str, Any]]:
    return events(Ended(0, "", "", out))


class Gates:
    """Gates of one run."""

    def __init__(self, folder: Path, *steps: int) -> None:
        self.gates = [Gate(folder / f"gate-{step}", step) for step in steps]
        self.environment = {"TEST_GATE": ";".join(gate.environment["TEST_GATE"] for gate in self.gates)}


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_host_is_replaced_and_wakes(frozen: int, hosts: SshHosts, undisturbed: Ended, tmp_path: Path) -> None:
    """With all that runs there, its sshd too; it wakes once the other has gone on."""
    out, gates = tmp_path / "run", Gates(tmp_path, STEP, STEP + 4)
    first, later = gates.gates
    with run(hosts, out, *CHECKPOINTS, devices="1:2", gate=gates) as started, freezer.made() as cgroup:
        reach(started, first)
        cgroup.freeze(hosts.hosts[frozen].processes())
        first.open()
        started.until(lambda: later.reached(1), "a later step", LIMIT_SECONDS)
        cgroup.thaw()
        time.sleep(1.0)  # whoever wakes has time to disturb the run
        later.open()
        ended = started.wait(LIMIT_SECONDS).expect(0)
    assert f"note: h{frozen + 1} is skipped: 1 of 2 processes (no sign of life for 5 s)" in ended.stderr
    assert result(out)["world_size"] == 1
    assert_same(out, undisturbed)
    (lost,) = incidents(out)
    assert (lost["host"], lost["noticed"]) == (f"h{frozen + 1}", "its launcher's heartbeat")


def test_a_frozen_host_is_waited_for_without_a_range(hosts: SshHosts, undisturbed: Ended, tmp_path: Path) -> None:
    """Only what shoal has started there is frozen, so that a new start on the same host works."""
    out, gate = tmp_path / "run", Gate(tmp_path / "gate", STEP)
    with run(hosts, out, *CHECKPOINTS, gate=gate) as started, freezer.made() as cgroup:
        reach(started, gate)
        launcher = psutil.Process(started.workers()[1]).parent()
        assert launcher is not None
        cgroup.freeze([launcher.pid, *(child.pid for child in launcher.children(recursive=True))])
        gate.open()
        started.until(lambda: "completed after step" in started.output, "the result", LIMIT_SECONDS)
        cgroup.thaw()
        started.wait(LIMIT_SECONDS).expect(0)
    assert result(out)["world_size"] == 2
    assert_same(out, undisturbed)
    assert [one["noticed"] for one in incidents(out)] == ["its launcher's heartbeat"]


def test_hosts_of_a_range_that_are_cut_from_each_other(hosts: SshHosts, undisturbed: Ended, tmp_path: Path) -> None:
    """Both answer the command. All are tried once more, and then those that rank 0's host reaches."""
    out, gate = tmp_path / "run", Gate(tmp_path / "gate", STEP)
    with run(hosts, out, *CHECKPOINTS, devices="1:2", gate=gate) as started:
        reach(started, gate)
        hosts.hosts.part()
        gate.open()
        ended = started.wait(LIMIT_SECONDS).expect(0)
    assert "note: h2 is skipped: 1 of 2 processes (it does not reach rank 0's store at " in ended.stderr
    assert result(out)["world_size"] == 1
    assert_same(out, undisturbed)


def test_hosts_that_stay_cut_from_each_other(hosts: SshHosts, tmp_path: Path) -> None:
    out, gate = tmp_path / "run", Gate(tmp_path / "gate", STEP)
    with run(hosts, out, *CHECKPOINTS, "--max-restarts", "3", gate=gate) as started:
        reach(started, gate)
        hosts.hosts.part()
        gate.open()
        ended = started.wait(LIMIT_SECONDS).expect(69)
    assert "3 starts in a row got no further than step" in ended.stderr
    assert [event["kind"] for event in incidents(out)] == ["lost"] * 4


def test_a_cut_that_ends_in_time(hosts: SshHosts, undisturbed: Ended, tmp_path: Path) -> None:
    out, gate = tmp_path / "run", Gate(tmp_path / "gate", STEP)
    with run(hosts, out, *CHECKPOINTS, gate=gate) as started:
        reach(started, gate)
        hosts.hosts.part()
        gate.open()
        started.until(lambda: "does not reach rank 0's store" in started.output, "a start in vain", LIMIT_SECONDS)
        hosts.hosts.part(parted=False)
        started.wait(LIMIT_SECONDS).expect(0)
    assert result(out)["world_size"] == 2
    assert_same(out, undisturbed)


def test_a_host_that_pauses_is_waited_for(hosts: SshHosts, undisturbed: Ended, tmp_path: Path) -> None:
    out, gate = tmp_path / "run", Gate(tmp_path / "gate", STEP)
    with run(hosts, out, *CHECKPOINTS, gate=gate) as started:
        reach(started, gate)
        launcher = psutil.Process(started.workers()[1]).ppid()
        os.kill(launcher, signal.SIGTSTP)
        gate.open()
        time.sleep(8.0)  # longer than a host may be silent
        os.kill(launcher, signal.SIGCONT)
        started.wait(LIMIT_SECONDS).expect(0)
    assert result(out)["restarts"] == 0
    assert_same(out, undisturbed)


def test_two_losses_in_one_restart(hosts: SshHosts, undisturbed: Ended, tmp_path: Path) -> None:
    out, gate = tmp_path / "run", Gate(tmp_path / "gate", STEP)
    with run(hosts, out, *CHECKPOINTS, gate=gate) as started:
        reach(started, gate)
        first = started.workers()
        os.kill(first[1], signal.SIGKILL)
        gate.open()
        fresh = started.until(
            lambda: set(started.workers().values()) - set(first.values()), "a new rank", LIMIT_SECONDS
        )
        os.kill(fresh.pop(), signal.SIGKILL)
        started.wait(LIMIT_SECONDS).expect(0)
    assert result(out)["restarts"] == 2
    assert_same(out, undisturbed)
