"""Whoever watches is watched: a supervisor that cannot be blinded by stopped, frozen or shifted processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines import freezer
from tests.faults.test_joining import free_port
from tests.faults.test_preempted import CHECKPOINTS, JOB, assert_same
from tests.faults.test_recovery import events, gated
from tests.launching import JOBS, Ended, Gate, Run, Started, start
from tests.sharing import Shared
from tests.usual import parametrize

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def undisturbed(shared: Shared) -> Ended:
    return shared.run(Run(JOB, Path(), 1, exact=True))


@pytest.fixture
def freezes() -> None:
    reason = freezer.unavailable()
    if reason is not None:
        pytest.skip(reason)


@parametrize("loses", [True, False], ids=["and a rank is killed", "to the end"], usual=["and a rank is killed"])
def test_the_process_that_forks_ranks_is_stopped(loses: bool, undisturbed: Ended, tmp_path: Path) -> None:
    """The command still sees its ranks' ends: it starts them again without the server, and ends itself."""
    gate = Gate(tmp_path / "gate", 7)
    with start(gated(tmp_path / "run", gate, 2)) as started:
        started.until(lambda: gate.reached(2), "the gate")
        (server,) = started.named("shoal-forks")
        os.kill(server, signal.SIGSTOP)
        if loses:
            os.kill(started.workers()[1], signal.SIGKILL)
        gate.open()
        ended = started.wait().expect(0)
    assert_same(ended, undisturbed)
    assert ended.result["restarts"] == int(loses)


@pytest.mark.usefixtures("freezes")
def test_a_frozen_rank(undisturbed: Ended, tmp_path: Path) -> None:
    """It looks like a process that waits for a disk, and not even SIGKILL ends it: the others go on without it."""
    gate = Gate(tmp_path / "gate", 7)
    with start(gated(tmp_path / "run", gate, 2)) as started, freezer.made() as cgroup:
        started.until(lambda: gate.reached(2), "the gate")
        cgroup.freeze([started.workers()[1]])
        gate.open()
        started.until(lambda: "completed after step" in started.output, "the result")
        cgroup.thaw()
        ended = started.wait().expect(0)
    assert_same(ended, undisturbed)
    lost, going_on = events(ended)
    assert (lost["rank"], lost["noticed"]) == (1, "its cgroup")
    assert "was frozen (by its cgroup) for" in lost["what"]
    assert going_on["kind"] == "going_on"


FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)


@parametrize(
    ("ranks", "how"),
    [("0", "wall -86400"), ("0", "wall 86400"), ("1", "-1d"), ("1", "+0 x1.01")],
    ids=["the date, back", "the date, ahead", "all clocks, back", "all clocks, fast"],
    usual=["the date, back"],
)
def test_clocks_that_jump(ranks: str, how: str, undisturbed: Ended, tmp_path: Path) -> None:
    """A rank that hangs is still noticed, and no time in the result is negative or longer than the run."""
    gate = Gate(tmp_path / "gate", 7, "1")
    variables = {"TEST_CLOCK": f"5:{ranks}:{how}", "TEST_HANG": "1"}
    if not how.startswith("wall"):
        if FAKETIME is None:
            pytest.skip("libfaketime is not installed: apt-get install faketime")
        variables |= {"LD_PRELOAD": str(FAKETIME), "FAKETIME": "+0", "FAKETIME_NO_CACHE": "1"}
    began = time.monotonic()
    with start(gated(tmp_path / "run", gate, 2, **variables)) as started:
        started.until(lambda: "was lost" in started.output, "the stuck rank's name")
        gate.open()
        ended = started.wait().expect(0)
    assert_same(ended, undisturbed)
    lost, going_on = events(ended)
    assert (lost["rank"], lost["noticed"]) == (1, "its heartbeat")
    assert 0.0 < going_on["seconds"] < ended.result["wall_seconds"] < time.monotonic() - began
    assert 0.0 < ended.result["ettr"] < 1.0


class Proxy:
    """Between a rank and the store: passes bytes on after `delay_seconds`, and stalls or resets connections."""

    def __init__(self, port: int, delay_seconds: float = 0.0) -> None:
        self._to, self._delay = port, delay_seconds
        self._flows = threading.Event()
        self._flows.set()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._to))
                except OSError:  # nobody listens yet
                    near.close()
                    continue
                self._sockets += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while content := source.recv(1 << 16):
                time.sleep(self._delay)
                self._flows.wait()
                sink.sendall(content)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def stall(self) -> None:
        """Passes nothing on any more."""
        self._flows.clear()

    def reset(self) -> None:
        """Ends all connections with a packet that says so."""
        for one in self._sockets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            one.close()

    def close(self) -> None:
        """Lets go of all connections."""
        self._flows.set()
        for one in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


@contextlib.contextmanager
def ranks_behind_a_proxy(out: Path, gate: Gate, delay_seconds: float = 0.0) -> Iterator[tuple[list[Started], Proxy]]:
    """Two ranks as torchrun would start them, of which rank 1 reaches the store through a proxy."""
    port = free_port()
    with contextlib.ExitStack() as opened:
        proxy = opened.enter_context(contextlib.closing(Proxy(port, delay_seconds)))
        shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", **gate.environment}
        started = []
        for rank, at in enumerate((port, proxy.port)):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(at)}
            wanted = Run(JOB, out, None, True, CHECKPOINTS, environment={**shared, **own})
            started.append(opened.enter_context(start(wanted)))
        yield started, proxy


@parametrize("how", ["delays", "stalls", "resets"], usual=["stalls"])
def test_a_proxy_between_the_store_and_a_rank(how: str, undisturbed: Ended, tmp_path: Path) -> None:
    """Ranks need the store only to meet: what happens to it later ends no run."""
    gate, out = Gate(tmp_path / "gate", 6), tmp_path / "run"
    with ranks_behind_a_proxy(out, gate, 0.05 if how == "delays" else 0.0) as (started, proxy):
        started[0].until(lambda: gate.reached(2), "the gate")
        if how == "stalls":
            proxy.stall()
        elif how == "resets":
            proxy.reset()
        gate.open()
        ended, _ = (one.wait().expect(0) for one in started)
    assert_same(ended, undisturbed)


PATIENT = """
import sys
import time
sys.path.insert(0, {folder!r})
import tiny
import torch
import witness

STEPS = []


class Slow(torch.nn.Linear):
    def forward(self, batch):
        if witness.rank() == "1" and not witness.is_look():
            time.sleep({evaluation} if not self.training else 0 if STEPS else {step})
            STEPS.append(self.training)
        return super().forward(batch)


def job():
    return tiny.mlp(model=lambda: torch.nn.Sequential(Slow(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_first_step_of_a_minute_and_a_long_evaluation_are_no_losses(tmp_path: Path) -> None:
    job = tmp_path / "patient.py"
    job.write_text(PATIENT.format(folder=str(JOBS), step=60, evaluation=20), encoding="utf-8")
    with start(Run(job, tmp_path / "run", 2, arguments=("--steps", "4"), restarts=5)) as started:
        ended = started.wait(600.0).expect(0)
    assert ended.result["restarts"] == 0
    assert "lost" not in ended.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_2000_steps_beside_eight_busy_processes_are_no_losses(tmp_path: Path) -> None:
    busy = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(8)]
    try:
        arguments = ("--steps", "2000", "--checkpoint-every", "100")
        with start(Run(f"{JOBS / 'tiny.py'}:mlp", tmp_path / "run", 2, arguments=arguments, restarts=5)) as started:
            ended = started.wait(800.0).expect(0)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert (ended.result["steps"], ended.result["restarts"]) == (2000, 0)
    assert "lost" not in ended.stderr
