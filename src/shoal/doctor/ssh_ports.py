"""Check of the ports between hosts that ssh reaches. It detects firewalls that block ranks but not ssh."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from shoal.doctor.health import HealthCheck, Severity
from shoal.errors import CommandError, LaunchError
from shoal.launch.launchers.ssh_hosts import SSH_OPTIONS, address_of

_GRACE_SECONDS = 5.0
_OPEN = (
    "a firewall is between them: ranks listen on ports that the system chooses (sysctl net.ipv4.ip_local_port_range); "
    "open these among the hosts, or name a network on which they are: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME"
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
    probes: dict[str, subprocess.Popen[str]] = {}
    try:
        for host in hosts:
            probes[host] = _probe(host, words[1:])
        ports = {host: [int(port) for port in _line(host, probe)] for host, probe in probes.items()}
        places = {h: [(addresses[o], port) for o in hosts if o != h for port in ports[o]] for h in hosts}
        for host, probe in probes.items():
            assert probe.stdin is not None, "it is a pipe"
            probe.stdin.write(json.dumps(places[host]) + "\n")
            probe.stdin.flush()
        told = {h: dict(zip(places[h], map(str, _line(h, probe)), strict=True)) for h, probe in probes.items()}
    finally:
        _end(probes.values())
    return tuple(_judged(hosts, addresses, told))


def _judged(
    hosts: Sequence[str], addresses: Mapping[str, str], told: Mapping[str, Mapping[tuple[str, int], str]]
) -> Iterator[HealthCheck]:
    for host in hosts:
        for other in (name for name in hosts if name != host):
            found = {port: why for (address, port), why in told[host].items() if address == addresses[other]}
            shut = {port: why for port, why in found.items() if why}
            subject = f"{host} to {other}"
            if not shut:
                yield HealthCheck(subject, Severity.OK, f"{addresses[other]} is reached at {_listed(found)}")
                continue
            why = f"{addresses[other]} is not reached at {_listed(shut)}: {next(iter(shut.values()))}"
            yield HealthCheck(subject, Severity.ERROR, why, _OPEN)


def _listed(ports: Mapping[int, str]) -> str:
    return f"port{'s' if len(ports) > 1 else ''} {', '.join(map(str, ports))}"


def _probe(host: str, options: Sequence[str]) -> subprocess.Popen[str]:
    remote = f"exec {shlex.quote(sys.executable)} -m shoal.launch.port_probe"
    words, pipe = ["ssh", *SSH_OPTIONS, *options, "--", host, remote], subprocess.PIPE
    return subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def _line(host: str, probe: subprocess.Popen[str]) -> list[Any]:
    """Return a host's next answer. Raises: LaunchError if there is none."""
    assert probe.stdout is not None, "it is a pipe"
    for line in probe.stdout:
        if line.startswith("["):  # skips a greeting of the host's shell
            found: list[Any] = json.loads(line)
            return found
    raise LaunchError(
        given=f"host {host}",
        conflict=probe.communicate()[1].strip()[-300:] or "ssh ended without a word",
        remedy=f"let `ssh {host} {shlex.quote(sys.executable)} -m shoal --version` work without a password first",
    )


def _end(probes: Iterable[subprocess.Popen[str]]) -> None:
    """End the listening processes."""
    for probe in probes:
        try:
            probe.communicate(timeout=_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            probe.kill()
            probe.communicate()
