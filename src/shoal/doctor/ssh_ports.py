"""Check of the ports between hosts that ssh reaches. It detects firewalls that block ranks but not ssh."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.doctor.health import HealthCheck, Severity
from shoal.errors import CommandError, LaunchError
from shoal.launch.launchers.ssh import SSH_OPTIONS, address_of
from shoal.launch.supervise.child import Child

_GRACE_SECONDS = 5.0
_OPEN = (
    "a firewall is between them: ranks listen on ports that the system chooses (sysctl net.ipv4.ip_local_port_range); "
    "open these among the hosts, or name a network on which they are: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME"
)


class PortProbe:
    """Process on a host that listens, and tries the ports of other hosts."""

    def __init__(self, host: str, options: Sequence[str]) -> None:
        remote = f"exec {shlex.quote(sys.executable)} -m shoal.launch.supervise.host_process ports"
        words = ["ssh", *SSH_OPTIONS, *options, "--", host, remote]
        self._host, self._complaints = host, list[str]()
        self.child = Child(words, listens=True, output=subprocess.PIPE, errors=self._complaints.append)

    def answer(self) -> list[Any]:
        """Return the next answer. Raises: LaunchError if there is none."""
        assert self.child.process.stdout is not None, "it is a pipe"
        for line in self.child.process.stdout:
            if line.startswith("["):  # skips a greeting of the host's shell
                answer: list[Any] = json.loads(line)
                return answer
        self.child.finish(_GRACE_SECONDS)
        raise LaunchError(
            given=f"host {self._host}",
            conflict="\n".join(self._complaints).strip()[-300:] or "ssh ended without a word",
            remedy=f"let `ssh {self._host} {shlex.quote(sys.executable)} -m shoal --version` work without a password "
            "first",
        )


def between(given: str) -> tuple[HealthCheck, ...]:
    """Check whether each host reaches every other host at ports like those of ranks.

    Args:
        given: "first,second", then options of ssh.

    Raises:
        CommandError: there are fewer than two hosts.
        LaunchError: ssh or shoal does not start on a host.
    """
    words = shlex.split(given)
    hosts = [name for name in (words[0].split(",") if words else ()) if name]
    wrong = [name for name in hosts if name.startswith("-")]
    if len(set(hosts)) < max(2, len(hosts)) or wrong:
        raise CommandError(
            given=f"--hosts {given}",
            conflict=f"{wrong[0]!r} is no host" if wrong else "ports are tried between two hosts or more, each once",
            remedy="write --hosts first,second as ssh takes the names, and options of ssh after them",
        )
    addresses = {host: address_of(host, words[1:]) for host in hosts}
    probes: dict[str, PortProbe] = {}
    try:
        for host in hosts:
            probes[host] = PortProbe(host, words[1:])
        ports = {host: [int(port) for port in probe.answer()] for host, probe in probes.items()}
        places = {h: [(addresses[o], port) for o in hosts if o != h for port in ports[o]] for h in hosts}
        for host, probe in probes.items():
            probe.child.tell(places[host])
        reasons = {h: dict(zip(places[h], map(str, probe.answer()), strict=True)) for h, probe in probes.items()}
    finally:
        for probe in probes.values():
            probe.child.finish(_GRACE_SECONDS)

    def listed(ports: Mapping[int, str]) -> str:
        return f"port{'s' if len(ports) > 1 else ''} {', '.join(map(str, ports))}"

    checks = []
    for host in hosts:
        for other in (name for name in hosts if name != host):
            of_other = {port: why for (address, port), why in reasons[host].items() if address == addresses[other]}
            shut = {port: why for port, why in of_other.items() if why}
            subject = f"{host} to {other}"
            if shut:
                why = f"{addresses[other]} is not reached at {listed(shut)}: {next(iter(shut.values()))}"
                checks.append(HealthCheck(subject, Severity.ERROR, why, _OPEN))
            else:
                checks.append(HealthCheck(subject, Severity.OK, f"{addresses[other]} is reached at {listed(of_other)}"))
    return tuple(checks)
