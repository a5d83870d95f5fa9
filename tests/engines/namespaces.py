"""Hosts on one machine: network namespaces with names and addresses of their own, between which links can fail.

Needs root, iproute2 and util-linux. All namespaces reach each other and this machine over one bridge.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# Not `ip netns exec`, which hides /sys/fs/cgroup.
_ENTER = (
    'hostname "$0" && mount --bind "$1" /etc/hosts && mount --bind /dev/null /etc/resolv.conf && shift && exec "$@"'
)


def unavailable() -> str | None:
    """Why there can be no such hosts here; None where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "bridge", "nsenter", "unshare", "hostname"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    name = f"shoal-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"no network namespace can be made here: {tried.stderr.strip()}"
    _run("ip", "netns", "del", name)
    return None


@dataclass(frozen=True)
class Host:
    """A namespace as a host."""

    name: str
    address: str
    namespace: str
    link: str  # this machine's end of its cable
    known: Path  # its /etc/hosts

    def command(self, words: Sequence[str]) -> list[str]:
        """The words of a command that runs there, as the process that is started itself."""
        enter = ["nsenter", f"--net=/run/netns/{self.namespace}", "unshare", "--uts", "--mount"]
        return [*enter, "sh", "-c", _ENTER, self.name, str(self.known), *words]

    def processes(self) -> list[int]:
        """Ids of all processes there."""
        listed = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True).stdout
        return [int(pid) for pid in listed.split()]

    def crash(self) -> None:
        """Kills all that runs there, without a packet to others: the cable is out before."""
        self.cut()
        self.kill_all()

    def kill_all(self) -> None:
        """Kills all that runs there."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def cut(self) -> None:
        """Takes its cable out: no packet arrives any more, and nobody is told."""
        _run("ip", "link", "set", self.link, "nomaster")

    def mend(self, bridge: str) -> None:
        """Puts the cable in again."""
        _run("ip", "link", "set", self.link, "master", bridge)

    def lose_way_to(self, other: Host) -> None:
        """From now on no packet goes from here to the other host, while its own arrive."""
        _run("ip", "-n", self.namespace, "route", "add", "blackhole", f"{other.address}/32")

    def find_way_to(self, other: Host) -> None:
        """Undoes `lose_way_to`, where that was."""
        words = ["ip", "-n", self.namespace, "route", "del", "blackhole", f"{other.address}/32"]
        subprocess.run(words, capture_output=True)

    def reset(self, other: Host) -> bool:
        """Closes all connections with the other host, with a word to both ends; whether the kernel has done it."""
        words = ["nsenter", f"--net=/run/netns/{self.namespace}", "ss", "-HK", "dst", other.address]
        return bool(subprocess.run(words, capture_output=True, text=True).stdout.strip())

    def shape(self, megabits: float) -> None:
        """Limits what the host sends and receives, in megabits a second each."""
        limit = ("root", "tbf", "rate", f"{megabits}mbit", "burst", "64kb", "latency", "50ms")
        _run("tc", "qdisc", "replace", "dev", self.link, *limit)
        _run("tc", "-n", self.namespace, "qdisc", "replace", "dev", "eth0", *limit)


@dataclass(frozen=True)
class Hosts:
    """Hosts of one network: `gateway` is this machine's address in it."""

    hosts: tuple[Host, ...]
    bridge: str
    gateway: str

    def __getitem__(self, number: int) -> Host:
        return self.hosts[number]

    def part(self, *, parted: bool = True) -> None:
        """From now on no packet of a host reaches another, while this machine reaches all; or undoes that."""
        for host in self.hosts:
            _run("bridge", "link", "set", "dev", host.link, "isolated", "on" if parted else "off")


@contextlib.contextmanager
def made(*names: str) -> Iterator[Hosts]:
    """Hosts of these names for a context; all that runs there is killed at its end. Raises: CalledProcessError."""
    mark = f"{os.getpid() % 100000}x{random.randrange(1000)}"
    bridge, net = f"sb{mark}", f"10.{random.randrange(64, 128)}.{random.randrange(256)}"
    with tempfile.TemporaryDirectory(prefix="shoal-hosts-") as folder:
        known = Path(folder) / "hosts"
        hosts = tuple(
            Host(n, f"{net}.{k + 2}", f"shoal-{mark}-{n}", f"sv{mark}{k}", known) for k, n in enumerate(names)
        )
        known.write_text("".join(["127.0.0.1 localhost\n", *(f"{h.address} {h.name}\n" for h in hosts)]))
        try:
            # An address of its own: by itself a bridge takes one of its ports', whose packets would still arrive here
            # after its cable is out.
            _run("ip", "link", "add", bridge, "address", "02:73:68:6f:61:6c", "type", "bridge")
            _run("ip", "addr", "add", f"{net}.1/24", "dev", bridge)
            _run("ip", "link", "set", bridge, "up")
            for host in hosts:
                _add(host, bridge)
            yield Hosts(hosts, bridge, f"{net}.1")
        finally:
            for host in hosts:
                host.kill_all()
                subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True)
                subprocess.run(["ip", "link", "del", host.link], capture_output=True)
            subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def _add(host: Host, bridge: str) -> None:
    inside = ("ip", "-n", host.namespace)
    _run("ip", "netns", "add", host.namespace)
    _run("ip", "link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
    _run("ip", "link", "set", host.link, "master", bridge, "up")
    _run(*inside, "addr", "add", f"{host.address}/24", "dev", "eth0")
    _run(*inside, "link", "set", "lo", "up")
    _run(*inside, "link", "set", "eth0", "up")


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)
