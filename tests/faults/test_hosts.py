"""Hosts that are lost or cut off from each other: the ranks of the others end soon, and a new start goes on."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines import namespaces
from tests.engines.namespaces import Host, Hosts
from tests.faults.test_preempted import assert_same
from tests.launching import JOBS, Ended, Gate, Run, Started, start_command
from tests.sharing import Shared
from tests.usual import parametrize

from shoal.distributed.lost_hosts import HostWatch

pytestmark = pytest.mark.faults

JOB = f"{JOBS / 'tiny.py'}:gpt"
# By itself a rank would wait for ten minutes for a host that sends no word.
SOON_SECONDS = 60.0


@pytest.fixture(scope="module")
def undisturbed(shared: Shared) -> Ended:
    return shared.run(Run(JOB, Path(), 1, exact=True))


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    reason = namespaces.unavailable()
    if reason is not None:
        pytest.skip(reason)
    with namespaces.made("h1", "h2") as found:
        yield found


ANSWERS = "import socket; s = socket.create_server(('', 7000)); found = [s.accept() for _ in range(2)]; input()"


@contextlib.contextmanager
def listening(host: Host) -> Iterator[subprocess.Popen[bytes]]:
    """A process there that takes two connections on port 7000 and then does nothing."""
    command = host.command([sys.executable, "-S", "-c", ANSWERS])
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def connected(host: Host) -> socket.socket:
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection((host.address, 7000))
        time.sleep(0.02)


def test_connections_to_a_host_that_is_gone(hosts: Hosts) -> None:
    """Idle, and with data on their way; to a host whose process merely stands still they stay."""
    watch = HostWatch(after_seconds=2.5)
    with contextlib.ExitStack() as opened:
        opened.callback(watch.close)
        processes = [opened.enter_context(listening(host)) for host in hosts.hosts]
        with watch.opening():
            idle, stays = (opened.enter_context(connected(host)) for host in hosts.hosts)
        busy, full = (opened.enter_context(connected(host)) for host in hosts.hosts)
        processes[1].send_signal(signal.SIGSTOP)
        full.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                full.send(bytes(1 << 16))
        hosts[0].cut()
        busy.send(b"a word")
        for lost in (idle, busy):
            lost.settimeout(SOON_SECONDS)
            with contextlib.suppress(ConnectionError):
                assert lost.recv(1) == b"", "it is ended from here"
        for left in (stays, full):
            left.setblocking(False)
            with pytest.raises(BlockingIOError):
                left.recv(1)


@contextlib.contextmanager
def ranks(hosts: Hosts, out: Path, gate: Gate | None = None, *more: str) -> Iterator[list[Started]]:
    """A rank on each host, as torchrun would start it."""
    with contextlib.ExitStack() as opened:
        started = []
        for rank, host in enumerate(hosts.hosts):
            variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "h1", "MASTER_PORT": "29517"}
            variables |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "PYTHONPATH": str(JOBS)}
            variables |= gate.environment if gate else {}
            command = host.command(Run(JOB, out, 2, True, ("--checkpoint-every", "2", *more)).command)
            started.append(opened.enter_context(start_command(command, out, variables, fresh=True)))
        yield started


CRASHES = {"of rank 1": 1, "of rank 0": 0}
CUTS = ("both directions", "one direction")


def cut(hosts: Hosts, how: str) -> None:
    if how == "both directions":
        hosts[1].cut()
    else:
        hosts[0].lose_way_to(hosts[1])


@pytest.mark.slow
@parametrize("how", [*CRASHES, *CUTS], usual=[])
def test_a_lost_host(how: str, hosts: Hosts, undisturbed: Ended, tmp_path: Path) -> None:
    gate, out = Gate(tmp_path / "gate", 6), tmp_path / "run"
    with ranks(hosts, out, gate) as started:
        started[0].until(lambda: gate.reached(2), "the gate")
        if how in CRASHES:
            hosts[CRASHES[how]].crash()
        else:
            cut(hosts, how)
        gate.open()
        left = [one for rank, one in enumerate(started) if rank != CRASHES.get(how)]
        for one in left:
            ended = one.wait(SOON_SECONDS).fails(69)
            assert "has not answered for" in ended.stderr or len(left) == 2
            assert "another rank is gone" in ended.stderr
            assert "Traceback" not in ended.output
    hosts[1].mend(hosts.bridge)
    hosts[0].mend(hosts.bridge)
    hosts[0].find_way_to(hosts[1])
    with ranks(hosts, out, None, "--resume") as started:
        ended, _ = (one.wait(SOON_SECONDS).expect(0) for one in started)
    assert_same(ended, undisturbed)


@pytest.mark.slow
def test_a_short_cut_is_nothing(hosts: Hosts, undisturbed: Ended, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate", 6)
    with ranks(hosts, tmp_path / "run", gate) as started:
        started[0].until(lambda: gate.reached(2), "the gate")
        hosts[1].cut()
        gate.open()
        time.sleep(2.0)
        hosts[1].mend(hosts.bridge)
        ended, _ = (one.wait(SOON_SECONDS).expect(0) for one in started)
    assert_same(ended, undisturbed)


@pytest.mark.slow
def test_a_slow_connection(hosts: Hosts, undisturbed: Ended, tmp_path: Path) -> None:
    hosts[1].shape(1.0)
    with ranks(hosts, tmp_path / "run") as started:
        ended, _ = (one.wait(SOON_SECONDS).expect(0) for one in started)
    assert_same(ended, undisturbed)


@pytest.mark.slow
def test_a_connection_that_is_reset(hosts: Hosts, undisturbed: Ended, tmp_path: Path) -> None:
    gate, out = Gate(tmp_path / "gate", 6), tmp_path / "run"
    with ranks(hosts, out, gate) as started:
        started[0].until(lambda: gate.reached(2), "the gate")
        if not hosts[0].reset(hosts[1]):
            pytest.skip("this kernel closes no connection on request (ss -K)")
        gate.open()
        for one in started:
            assert "another rank is gone" in one.wait(SOON_SECONDS).fails(69).stderr
    with ranks(hosts, out, None, "--resume") as started:
        ended, _ = (one.wait(SOON_SECONDS).expect(0) for one in started)
    assert_same(ended, undisturbed)
