"""A Ray cluster of one node on loopback, with a token, for tests."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MARK = "SHOAL_TEST_CLUSTER"
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}


def unavailable() -> str | None:
    """Why there is no Ray here; None where there is."""
    return None if importlib.util.find_spec("ray") else "the package ray is not installed"


def free_ports(number: int) -> list[int]:
    """Ports that nobody has now, each another one: Ray takes no 0 for these."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [int(probe.getsockname()[1]) for probe in probes]


@dataclass(frozen=True)
class RayCluster:
    """A head node: its address, and the variables with which it is reached."""

    address: str
    variables: dict[str, str]
    dashboard: str = ""

    def program(self, *words: str) -> list[str]:
        """A command of Ray's own."""
        return [sys.executable, "-m", "ray.scripts.scripts", *words]


@contextlib.contextmanager
def started(folder: Path, cpus: int = 4, *, dashboard: bool = False) -> Iterator[RayCluster]:
    """A cluster for a context; all of its processes are killed at its end."""
    mark = uuid.uuid4().hex
    variables = {**QUIET, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex * 2}
    cluster = RayCluster("", variables)
    dashboard_port, client_port, agent_port, metrics_port = free_ports(4)
    words = ["start", "--head", "--block", "--port=0", "--node-ip-address=127.0.0.1", f"--num-cpus={cpus}"]
    words += [f"--object-store-memory={200 << 20}", f"--include-dashboard={str(dashboard).lower()}"]
    words += ["--disable-usage-stats", f"--dashboard-port={dashboard_port}", f"--ray-client-server-port={client_port}"]
    # By default the same for every cluster of a host.
    words += [f"--dashboard-agent-listen-port={agent_port}", f"--metrics-export-port={metrics_port}"]
    log = folder / "ray.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            cluster.program(*words),
            env={**os.environ, **variables, _MARK: mark},
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        yield RayCluster(_address(log, process), variables, f"http://127.0.0.1:{dashboard_port}")
    finally:
        while _kill_all(mark):
            process.poll()
            time.sleep(0.02)
        process.wait()


def _address(log: Path, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        text = log.read_text(errors="replace")
        if "--address='" in text:
            return text.split("--address='")[1].split("'")[0]
        time.sleep(0.1)
    raise RuntimeError(f"no Ray cluster:\n{log.read_text(errors='replace')}")


def _kill_all(mark: str) -> bool:
    """Kills every process of the cluster; whether there was one."""
    found = False
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            with contextlib.suppress(OSError):
                if mark.encode() in (place / "environ").read_bytes():
                    os.kill(int(place.name), signal.SIGKILL)
                    found = True
    return found
