"""Strangers on the ports of a start: whatever they send, the run begins, and is the undisturbed one's bits."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.test_preempted import CHECKPOINTS, JOB, assert_same
from tests.launching import JOBS, Ended, Run, Started, start
from tests.ranks.test_relayout import plan
from tests.sharing import Shared
from tests.usual import parametrize

pytestmark = pytest.mark.faults

# Of port scanners, browsers and clients of TLS; and eight zeros, which Gloo takes for the number of a connection.
SCAN = (b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\0\x01", b"\xff" * 4096)
ZEROS = (bytes(8),)
_LISTENING, _EACH = "0A", 3


@pytest.fixture(scope="module")
def undisturbed(shared: Shared) -> Ended:
    return shared.run(Run(JOB, Path(), 1, exact=True))


def listening(started: Started) -> set[int]:
    """The ports on which processes of the command listen."""
    sockets = set()
    for pid in started.processes():
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    sockets.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    lines = [line.split() for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]]
    return {int(f[1].rpartition(":")[2], 16) for f in lines if f[3] == _LISTENING and f"socket:[{f[9]}]" in sockets}


@contextlib.contextmanager
def strangers(started: Started, texts: tuple[bytes, ...]) -> Iterator[dict[int, int]]:
    """Connections to every port as soon as it is there, kept open: how many each got."""
    told: dict[int, int] = {}
    over, held = threading.Event(), contextlib.ExitStack()

    def send() -> None:
        while not over.is_set():
            for port in listening(started):
                if told.setdefault(port, 0) >= _EACH * len(texts):
                    continue
                for text in texts:
                    with contextlib.suppress(OSError):
                        connection = held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=1.0))
                        connection.sendall(text)
                        told[port] += 1

    sender = threading.Thread(target=send)
    sender.start()
    try:
        with held:
            yield told
    finally:
        over.set()
        sender.join()


@parametrize(
    ("texts", "layout"),
    [(SCAN, {"data": 3}), (SCAN, {"pipeline": 2}), (ZEROS, {"data": 3}), (ZEROS, {"pipeline": 2})],
    ids=["scan", "scan of stages", "zeros", "zeros to stages"],
    usual=["scan"],
)
def test_the_run_begins(texts: tuple[bytes, ...], layout: dict[str, int], undisturbed: Ended, tmp_path: Path) -> None:
    """Zeros may take the place of a connection between stages: such a start is seen to stand still, and made anew."""
    exact = "data" in layout
    job = JOB if exact else f"{JOBS / 'layouts.py'}:stack"
    wanted = Run(job, tmp_path / "run", None, exact, (*CHECKPOINTS, *plan(tmp_path / "plan.toml", {"layout": layout})))
    wanted.restarts = 5 if texts is ZEROS else 0
    with start(wanted) as started, strangers(started, texts) as told:
        ended = started.wait().expect(0)
    assert len([port for port, count in told.items() if count]) > 2, "the store, and ranks"
    if exact:
        assert_same(ended, undisturbed)
