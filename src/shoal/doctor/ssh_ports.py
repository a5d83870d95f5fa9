"""Check of the ports between hosts that ssh reaches. It detects firewalls that block ranks but not ssh."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from shoal.doctor.health import HealthCheck, Severity
from shoal.errors import CommandError
from shoal.launch.launchers.ssh import HostProbe, address_of

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
    probes: dict[str, HostProbe] = {}
    try:
        for host in hosts:
            probes[host] = HostProbe(host, words[1:], "ports")
        ports = {host: [int(port) for port in probe.answer()] for host, probe in probes.items()}
        places = {h: [(addresses[o], port) for o in hosts if o != h for port in ports[o]] for h in hosts}
        for host, probe in probes.items():
            probe.child.tell(places[host])
        reasons = {h: dict(zip(places[h], map(str, probe.answer()), strict=True)) for h, probe in probes.items()}
    finally:
        for probe in probes.values():
            probe.close()

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
